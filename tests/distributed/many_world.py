"""What ranks run that open many runs in one process, and what each leaves behind."""

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import unbroken
from tests.patience import PATIENCE_S
from unbroken.records.stop import SIGNALS


class Stumble(Exception):
    """An error of the script's own."""


class Loop:
    """A small model with its optimizer, trained by many runs."""

    def __init__(self, lone: Sequence[int] = ()) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.group = dist.new_group(list(lone)) if lone else None

    def run(self, directory: str, save_steps: int | None = None) -> unbroken.Run:
        """A run over it that nobody has entered yet."""
        chosen = unbroken.Settings(audit="off", save_steps=save_steps)
        objects = {"model": self.model, "optimizer": self.optimizer}
        return unbroken.Run(directory, settings=chosen, process_group=self.group, **objects)

    def train(self, run: unbroken.Run, total: int, fails_at: int | None = None) -> list[int]:
        """The steps that one entry makes."""
        done: list[int] = []
        with run:
            for step in run.steps(total):
                self.optimizer.zero_grad()
                self.model(torch.ones(3, 4)).sum().backward()
                self.optimizer.step()
                done.append(step)
                if step == fails_at:
                    raise Stumble
        return done

    def weights(self) -> list[float]:
        """All weights, in order."""
        return [float(each) for p in self.model.parameters() for each in p.detach().flatten()]


def held(loop: Loop, most: Mapping[str, int] | None = None) -> dict[str, Any]:
    """What this process holds that a run could leave behind, once it is no more than that; gloo closes late."""
    gc.collect()
    groups = len(dist.distributed_c10d._world.pg_map)
    until_s = time.monotonic() + PATIENCE_S
    while (counts := counted()) and most is not None and any(counts[what] > most[what] for what in counts):
        if time.monotonic() > until_s:
            break
        time.sleep(0.02)
    return {
        "counts": counts,
        "threads": sorted(each.name for each in threading.enumerate()),
        "groups": groups,
        "hooks": len(loop.optimizer._optimizer_step_pre_hooks),
        "handlers": [signal.getsignal(each) for each in (*SIGNALS, signal.SIGCHLD)] == handlers(),
    }


def counted() -> dict[str, int]:
    """How many descriptors and threads there are."""
    return {what: len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")}


def handlers() -> list[Any]:
    """The handlers that stood before the first run."""
    if not _handlers:
        _handlers.extend(signal.getsignal(each) for each in (*SIGNALS, signal.SIGCHLD))
    return _handlers


_handlers: list[Any] = []


def many(directory: str, runs: int) -> dict[str, Any]:
    """Open so many runs, every fifth left by an error, and say what is held after the first ones and after all."""
    handlers()
    loop = Loop()
    first: dict[str, Any] = {}
    for number in range(runs):
        fails_at = 1 if number % 5 == 4 else None
        with contextlib.suppress(Stumble):
            loop.train(loop.run(f"{directory}/{number}"), 2, fails_at)
        if number == 5:
            first = held(loop)
    return {"first": first, "last": held(loop, first["counts"])}


def again(directory: str) -> dict[str, Any]:
    """Enter the same object three times with a higher target each, then a new one, and compare with one long run."""
    loop = Loop()
    run = loop.run(directory)
    steps = [loop.train(run, total) for total in (2, 2, 5)]
    steps.append(loop.train(loop.run(directory), 6))
    whole = Loop()
    whole.train(whole.run(f"{directory}-whole"), 6)
    return {"steps": steps, "equal": loop.weights() == whole.weights(), "step": run.step}


def unsaved(directory: str) -> str:
    """Enter the same object again after an error before the first checkpoint."""
    loop = Loop()
    run = loop.run(directory)
    with contextlib.suppress(Stumble):
        loop.train(run, 4, fails_at=1)
    try:
        loop.train(run, 4)
    except unbroken.errors.NotExact as refused:
        return " ".join([str(refused), *refused.details()])
    return "it was let in"


def subset(directory: str, members: Sequence[int]) -> dict[str, Any]:
    """Train on some of the ranks only; the others do something else meanwhile."""
    loop = Loop(lone=members)
    rank = dist.get_rank()
    if rank not in members:
        try:
            loop.train(loop.run(directory), 1)
        except unbroken.errors.NotInGroup as refused:
            return {"refused": str(refused)}
        return {"refused": ""}
    steps = [loop.train(loop.run(directory, save_steps=1), total) for total in (2, 4)]
    return {"steps": steps}
