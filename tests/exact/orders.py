"""A job that notes the ids of every sample it is served, for every kind of loader; each is called in a child."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler  # type: ignore[import-untyped]

import unbroken
from tests.exact.training import is_saving

SAMPLES = 20
BATCH = 3
PER_EPOCH = 7
TOTAL = 16
_ALL = TensorDataset(torch.arange(SAMPLES))
# Of two ranks this job is one, so that its own share is as large.
_SHARED = TensorDataset(torch.arange(2 * SAMPLES))


@dataclass(frozen=True)
class Order:
    """One job: the run's directory, the loader by name, its workers, and the step in which the job kills itself."""

    directory: str
    loader: str
    workers: int = 0
    die_at: int | None = None
    total: int = TOTAL


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _shares() -> dict[str, Any]:
    return {"num_replicas": 2, "rank": 1, "shuffle": True, "seed": 5}


LOADERS: dict[str, Callable[..., Any]] = {
    "shuffled": lambda **more: DataLoader(_ALL, BATCH, shuffle=True, **more),
    "own generator": lambda **more: DataLoader(_ALL, BATCH, shuffle=True, generator=_generator(), **more),
    "sampler's generator": lambda **more: DataLoader(
        _ALL, BATCH, sampler=RandomSampler(_ALL, generator=_generator()), **more
    ),
    "distributed": lambda **more: DataLoader(_SHARED, BATCH, sampler=DistributedSampler(_SHARED, **_shares()), **more),
    "stateful shuffled": lambda **more: StatefulDataLoader(_ALL, BATCH, shuffle=True, **more),
    "stateful own generator": lambda **more: StatefulDataLoader(
        _ALL, BATCH, shuffle=True, generator=_generator(), **more
    ),
    "stateful distributed": lambda **more: StatefulDataLoader(
        _SHARED, BATCH, sampler=StatefulDistributedSampler(_SHARED, **_shares()), **more
    ),
    "stateful, plain sampler": lambda **more: StatefulDataLoader(
        _SHARED, BATCH, sampler=DistributedSampler(_SHARED, **_shares()), **more
    ),
}


def serve(order: Order) -> int:
    """Train with one of the loaders, to the end or to the batch at which the job dies; returns the step it began at."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    # A child of a fork server would start its workers with a server of its own, which outlives it.
    more = {"num_workers": order.workers, "prefetch_factor": 2, "multiprocessing_context": "fork"}
    loader = LOADERS[order.loader](**(more if order.workers else {}))
    return train(order, loader, lambda batch: batch[0].tolist())


def train(order: Order, loader: object, ids_of: Callable[[Any], list[int]]) -> int:
    """Train to the end, or to the batch at which it dies; returns the step it began at.

    Dying comes after the batch is drawn and after the save of the step before is committed, so that what is saved is
    the very position in front of that batch, while workers have fetched further.
    """
    model = nn.Linear(1, 1)
    objects: dict[str, object] = {"model": model, "data": loader}
    served = Path(f"{order.directory}.served")
    settings = unbroken.Settings(save_steps=None, audit="off")
    with unbroken.Run(order.directory, settings=settings, **objects) as run, served.open("a") as notes:
        began = run.step
        for step in run.steps(order.total):
            ids = ids_of(next(run.data))
            notes.write(json.dumps([step + 1, ids, run.data.epoch]) + "\n")
            notes.flush()
            # A model draws too, from the generator that a shuffle without its own is drawn from.
            run.log(loss=model(torch.tensor(ids)[:, None] * torch.rand(())).mean())
            if order.die_at == step + 2:
                run.save()
            if order.die_at == step + 1:
                while is_saving():
                    time.sleep(0.005)
                os.kill(os.getpid(), signal.SIGKILL)
    return began


def served_in(directory: str) -> list[tuple[int, tuple[int, ...]]]:
    """Every batch that any job of a run was served, as step and ids, in the order of serving."""
    lines = Path(f"{directory}.served").read_text().splitlines()
    return [(step, tuple(ids)) for step, ids, _ in map(json.loads, lines)]


def epochs_in(directory: str) -> list[int]:
    """The epoch of every batch that any job of a run was served."""
    return [epoch for _, _, epoch in map(json.loads, Path(f"{directory}.served").read_text().splitlines())]
