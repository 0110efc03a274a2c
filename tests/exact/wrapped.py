"""Training with what frameworks make of a model, an optimizer, a scheduler and a loader; each is called in a child."""

import gc
import random
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset, random_split

import unbroken
from unbroken.errors import NotAnItem, UnsavedState

TOTAL, STOP = 8, 4


def _plain(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    split = torch.Generator().manual_seed(1)
    # Three batches an epoch: it stops in the second one. The generator of the split is never drawn from again.
    train, _ = random_split(TensorDataset(torch.arange(48.0).reshape(16, 3) / 48), [12, 4], generator=split)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        "data": DataLoader(train, batch_size=4, shuffle=True),
    }


def _accelerate(objects: dict[str, Any]) -> dict[str, Any]:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*objects.values())
    return dict(zip(objects, prepared, strict=True))


def _fabric(objects: dict[str, Any]) -> dict[str, Any]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(objects["model"], objects["optimizer"])
    return {**objects, "model": model, "optimizer": optimizer, "data": fabric.setup_dataloaders(objects["data"])}


def _compiled(objects: dict[str, Any]) -> dict[str, Any]:
    return {**objects, "model": torch.compile(objects["model"], backend="eager")}


def _averaged(objects: dict[str, Any]) -> dict[str, Any]:
    return {**objects, "ema": AveragedModel(objects["model"])}


def _with_rngs(objects: dict[str, Any]) -> dict[str, Any]:
    return {
        **objects,
        "of_torch": torch.Generator().manual_seed(5),
        "of_numpy": numpy.random.default_rng(5),
        "old": numpy.random.RandomState(5),
        "bits": numpy.random.PCG64(5),
        "of_python": random.Random(5),
    }


WRAP = {
    "accelerate": _accelerate,
    "fabric": _fabric,
    "compiled": _compiled,
    "averaged": _averaged,
    "own generators": _with_rngs,
}


def _drawn(objects: dict[str, Any]) -> float:
    if "of_torch" not in objects:
        return 0.0
    made = torch.rand(1, generator=objects["of_torch"]).item() + objects["of_numpy"].standard_normal()
    return float(
        made + objects["old"].randn() + objects["bits"].random_raw() / 2**64 + objects["of_python"].gauss(0, 1)
    )


def _job(directory: str, objects: dict[str, Any], stop_at: int) -> list[str]:
    # The user's names for what he made, as a script has them.
    model, optimizer, scheduler = objects["model"], objects["optimizer"], objects["scheduler"]
    settings = unbroken.Settings(audit="error", save_steps=3, catch_signals=False)
    losses = []
    with unbroken.Run(directory, settings=settings, **objects) as run:
        for step in run.steps(TOTAL):
            (batch,) = next(run.data)
            loss = model(batch + _drawn(objects)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if "ema" in objects:
                objects["ema"].update_parameters(model)
            losses.append(loss.item().hex())
            if step + 1 == stop_at:
                run.stop("enough")
    return losses


def chain(kind: str, directory: str) -> tuple[list[str], list[str]]:
    """The losses of one whole run, and of one that was stopped and resumed with new objects, in the same process."""
    garbage: list[object] = [torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)]
    garbage.append(garbage)
    del garbage
    gc.disable()
    whole = _job(f"{directory}/whole", WRAP[kind](_plain(0)), 0)
    first = _job(f"{directory}/parts", WRAP[kind](_plain(0)), STOP)
    rest = _job(f"{directory}/parts", WRAP[kind](_plain(9)), 0)
    return whole, first + rest


class Hollow(torch.optim.SGD):
    """An optimizer around another one that imitates it without being set up."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


class Mute:
    """An object whose state cannot be asked for."""

    def state_dict(self) -> dict[str, object]:
        raise AttributeError("there is none yet")

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError(state)


def refused(kind: str, directory: str) -> str:
    """What is said of something that would fail at the first save."""
    objects = _plain(0)
    if kind == "hollow":
        objects["optimizer"] = Hollow(objects["optimizer"])
    else:
        objects["note"] = Mute()
    try:
        _job(directory, objects, 0)
    except NotAnItem as said:
        return said.headline()
    return ""


def ignored(directory: str) -> tuple[tuple[str, ...], int]:
    """What is named without a word, and the steps that are done where that name is to be skipped."""
    model = nn.Linear(2, 1)
    teacher = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    named: tuple[str, ...] = ()
    try:
        with unbroken.Run(directory, settings=unbroken.Settings(audit="error"), model=model):
            pass
    except UnsavedState as said:
        named = said.found
    quiet = unbroken.Settings(audit="error", audit_ignore=("teacher",))
    with unbroken.Run(directory, settings=quiet, model=model) as run:
        for _ in run.steps(2):
            teacher.zero_grad()
    return named, run.step
