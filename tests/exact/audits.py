"""What the audit finds in a process that holds nothing else; each is called in a child."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import unbroken
from unbroken.errors import UnsavedState


class PositionLoader(DataLoader[Any]):
    """A loader that says where it stands."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        del state


# Beside the one that the loader was given, and the one of the system, which has no state.
RNG: dict[str, Callable[[], object]] = {
    "torch": torch.Generator,
    "numpy": numpy.random.default_rng,
    "numpy, old": numpy.random.RandomState,
    "python": random.Random,
}


DRAW: dict[str, Callable[[Any], object]] = {
    "torch": lambda rng: torch.rand(1, generator=rng),
    "numpy": lambda rng: rng.random(),
    "numpy, old": lambda rng: rng.rand(),
    "python": lambda rng: rng.random(),
}


def forgotten(kind: str, directory: str) -> tuple[str, ...]:
    """Everything is handed over but one kind; returns what is named."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    served = torch.Generator()
    inner = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    everything: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.SequentialLR(
            optimizer, [inner, torch.optim.lr_scheduler.ConstantLR(optimizer)], [4]
        ),
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        "scaler": torch.amp.GradScaler("cpu"),
        "ema": AveragedModel(model),
        "data": PositionLoader([1, 2, 3], generator=served),  # type: ignore[arg-type]
    }
    idle = torch.amp.GradScaler("cpu", enabled=False)
    system = random.SystemRandom()
    used_up = random.Random(3)
    used_up.random()
    handed = {name: thing for name, thing in everything.items() if name != kind}
    forgotten_thing = everything.get(kind)
    if kind in RNG:
        forgotten_thing = RNG[kind]()
    try:
        with unbroken.Run(directory, settings=unbroken.Settings(audit="error", save_steps=1), **handed) as run:
            # Only a generator that is drawn from is state: the first save finds it changed.
            for _ in run.steps(1):
                if kind in RNG:
                    DRAW[kind](forgotten_thing)
            return ()
    except UnsavedState as unsaved:
        assert forgotten_thing is not None
        return unsaved.found
    finally:
        del idle, system, used_up
