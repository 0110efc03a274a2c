"""A small training with everything that a resume can get wrong, and the digest of all of it.

Dropout, batch statistics, AdamW, a learning rate per step with warm-up and cosine, a shuffled loader, augmentation by
numpy's and python's generators, a gradient scaler, an average of the weights, a counter of the loop's own and a best
metric. ``train`` is one job: it resumes or starts, and can be told where to die.
"""

import functools
import hashlib
import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import unbroken
from unbroken.disk import LocalDisk
from unbroken.files import LOCAL
from unbroken.state.cursor import Cursor
from unbroken.state.rng import capture_rng
from unbroken.testing import FaultyDisk, Kill, Operation

TOTAL = 12
WARM_UP = 4
Things = dict[str, Any]


class Counter:
    """A user's own object with state."""

    def __init__(self) -> None:
        self.seen = 0
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, object]:
        return {"seen": self.seen, "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.losses = state["seen"], list(state["losses"])


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        directory: the run.
        total: the target.
        save_steps: the cadence.
        die_at: the step in which the job kills itself, and where in it.
        settles: let the save in flight be committed before that.
        die_in_save: the number of the change to the store, from 0, before which it kills itself.
        mutation: what to break in the resume, by name; see ``mutations``.
        settings: more settings.
    """

    directory: str
    total: int = TOTAL
    save_steps: int = 3
    die_at: tuple[int, str] | None = None
    settles: bool = False
    die_in_save: int | None = None
    mutation: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def schedule(step: int) -> float:
    """Warm-up, then cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (TOTAL - WARM_UP)))


def build(seed: int = 1) -> Things:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    data = TensorDataset(torch.randn(40, 6), torch.randn(40, 1))
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, schedule),
        "scaler": torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5),
        "ema": AveragedModel(model, multi_avg_fn=average, use_buffers=True),
        "counter": Counter(),
        "data": DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3)),
    }


def one_step(objects: Things, batch: tuple[torch.Tensor, torch.Tensor], pause: Callable[[str], None]) -> torch.Tensor:
    features, target = batch
    features = features + torch.from_numpy(np.random.randn(*features.shape)).float() * 0.05
    if random.random() < 0.5:
        features = -features
    scaler, optimizer = objects["scaler"], objects["optimizer"]
    with torch.autocast("cpu", dtype=torch.float16):
        loss: torch.Tensor = ((objects["model"](features) - target) ** 2).float().mean()
    pause("forward")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    pause("backward")
    scaler.step(optimizer)
    scaler.update()
    objects["scheduler"].step()
    objects["ema"].update_parameters(objects["model"])
    objects["counter"].seen += len(target)
    objects["counter"].losses.append(loss.item())
    pause("end")
    return loss


def train(case: Case) -> dict[str, Any]:
    """One job of a run; returns how it stands at its end."""
    objects = build()
    if case.die_in_save is not None:
        _die_in_save(case.die_in_save, Path(case.directory) / "checkpoints")
    if case.mutation is not None:
        from tests.exact.mutations import MUTATIONS

        MUTATIONS[case.mutation](objects)
    settings = unbroken.Settings(save_steps=case.save_steps, logging_steps=1, **case.settings)
    with unbroken.Run(case.directory, settings=settings, **objects) as run:
        began = run.step
        for step in run.steps(case.total):
            lr = objects["optimizer"].param_groups[0]["lr"]
            loss = one_step(objects, next(run.data), functools.partial(_pause, case, step + 1))
            run.counters["best"] = min(run.counters.get("best", math.inf), loss.item())
            run.counters["samples"] = run.counters.get("samples", 0) + 8
            run.log(loss=loss, lr=lr, scale=objects["scaler"].get_scale())
    return {"began": began, "step": run.step, "digest": digest(objects, run), "is_stopped": run.is_stopped}


def _pause(case: Case, step: int, where: str) -> None:
    if case.die_at == (step, where):
        while case.settles and is_saving():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def is_saving() -> bool:
    """Whether a save is in flight in this process."""
    return any(thread.name == "unbroken-save" for thread in threading.enumerate())


def is_a_change(operation: Operation, store: Path) -> bool:
    return operation.is_mutating and store in (operation.path, *operation.path.parents)


def _die_in_save(number: int, store: Path) -> None:
    """Die before the so-manieth change to the store, counted over all saves of this job."""
    seen = iter(range(1 << 30))

    def plan(operation: Operation) -> Kill | None:
        return Kill(really=True) if is_a_change(operation, store) and next(seen) == number else None

    set_disk(FaultyDisk(LocalDisk(), plan))


def set_disk(disk: FaultyDisk) -> None:
    """Put another disk under everything this process does."""
    object.__setattr__(LOCAL, "disk", disk)


def count_changes(case: Case) -> list[str]:
    """Every change to the store that an undisturbed job makes, in words."""
    disk = FaultyDisk(LocalDisk())
    set_disk(disk)
    train(case)
    store = Path(case.directory) / "checkpoints"
    return [f"{each.name} {each.path.name}" for each in disk.operations if is_a_change(each, store)]


# ---- what is compared ----


def digest(objects: Things, run: unbroken.Run) -> str:
    """Everything: tensors, values, generators, counters, the position in the data."""
    said = hashlib.sha256()
    for name, thing in sorted(objects.items()):
        state = Cursor.state_dict(run.data) if name == "data" else thing.state_dict()
        said.update(f"{name} {spelled(state)}".encode())
    said.update(spelled(capture_rng()).encode())
    said.update(spelled([run.step, run.counters]).encode())
    return said.hexdigest()


def spelled(value: object) -> str:
    """A value as text that is equal exactly when every bit of it is."""
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return f"{value.dtype}{tuple(value.shape)}{hashlib.sha256(bits).hexdigest()}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key!r}:{spelled(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(spelled, value)) + "]"
    return float.hex(value) if isinstance(value, float) else repr(value)


def logged(directory: str) -> dict[int, dict[str, str]]:
    """The bits of every metric of every step, as the last job that computed it wrote them."""
    rows: dict[int, dict[str, str]] = {}
    for path in sorted((Path(directory) / "metrics").iterdir()):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "step" in row:
                rows[row["step"]] = row["bits"]
    return rows


def facts(directory: str, kind: str) -> list[dict[str, Any]]:
    """The facts of one kind in the journal, in order."""
    lines = [line for path in sorted((Path(directory) / "journal").iterdir()) for line in path.read_text().splitlines()]
    return [found for line in lines if (found := json.loads(line))["kind"] == kind]
