"""Loaders whose run is resumed on another number of ranks: saved by two, resumed by one with the same global batch."""

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import unbroken
from unbroken.data.corpus.catalogue import open_corpus
from unbroken.data.loader import Loader
from unbroken.data.stream import Stream
from unbroken.errors import NotExact

# Of the first epoch, half before the change and half behind it.
SAMPLES, GLOBAL_BATCH, STEPS = 24, 6, 2


@dataclass(frozen=True)
class Job:
    """Where and by how many ranks a loader is made."""

    folder: Path
    ranks: int
    rank: int

    @property
    def batch(self) -> int:
        return GLOBAL_BATCH // self.ranks


def sampled(job: Job) -> Any:  # noqa: ANN401
    data: Any = list(range(SAMPLES))
    return DataLoader(data, job.batch, sampler=DistributedSampler(data, job.ranks, job.rank, seed=3))


def by_node(job: Job) -> Any:  # noqa: ANN401
    import datasets  # type: ignore[import-untyped]
    from datasets.distributed import split_dataset_by_node  # type: ignore[import-untyped]

    rows = datasets.Dataset.from_dict({"number": list(range(SAMPLES))}).to_iterable_dataset(num_shards=6)
    return DataLoader(split_dataset_by_node(rows, rank=job.rank, world_size=job.ranks), job.batch)


def alike(job: Job) -> Any:  # noqa: ANN401
    data: Any = list(range(SAMPLES))
    return DataLoader(data, 3, shuffle=True, generator=torch.Generator().manual_seed(3))


def streamed(job: Job) -> Any:  # noqa: ANN401
    stream = Stream(open_corpus(job.folder), max_length=32, overlap_size=4, seed=5, epochs=None)
    return Loader(stream, global_batch_size=GLOBAL_BATCH, per_device_batch_size=job.batch)


_SEEDED_APART = "the same, replayed, after another `manual_seed` on each rank"
# By the name that the table has.
CASES: dict[str, Callable[[Job], Any]] = {
    "`unbroken.data.Loader`": streamed,
    "`DistributedSampler`, same global batch size": sampled,
    "`split_dataset_by_node`, or any other that is known to split its data by rank": by_node,
    "one that gives every rank the same batches": alike,
    _SEEDED_APART: alike,
}


def numbers(batch: Any) -> list[int]:  # noqa: ANN401
    """The samples of a batch of any of them."""
    if hasattr(batch, "samples"):
        return list(batch.samples)
    found = batch["number"] if isinstance(batch, dict) else batch
    return [int(each) for each in found]


class Lines(logging.Handler):
    """What a run logs at its start."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def train(folder: str, name: str, *, is_accepted: bool) -> tuple[list[int] | None, list[str]]:
    """One job of two steps: the samples that this rank was served, None where it was refused, and what was logged."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    accept = ("data",) if is_accepted else ()
    settings = unbroken.Settings(save_steps=None, audit="off", catch_signals=False, console=False, accept=accept)
    lines, log = Lines(), logging.getLogger("unbroken")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    seen: list[int] = []
    place = Path(folder) / str(list(CASES).index(name))
    seed = rank if name == _SEEDED_APART else 0
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    try:
        loader = CASES[name](Job(Path(folder) / "corpus", ranks, rank))
        with unbroken.Run(place, settings=settings, model=torch.nn.Linear(1, 1), data=loader) as run:
            for step in run.steps(1_000):
                seen += [number for batch in _batches(run, loader) for number in numbers(batch)]
                if (step + 1) % STEPS == 0:
                    run.stop()
    except NotExact:
        return None, lines.said
    finally:
        log.removeHandler(lines)
    return seen, lines.said


def _batches(run: Any, loader: Any) -> Iterator[Any]:  # noqa: ANN401
    for _ in range(loader.lanes.per_step if isinstance(loader, Loader) else 1):
        yield next(run.data)


def train_all(folder: str) -> list[tuple[list[int] | None, list[str]]]:
    """The first job of each case, on two ranks."""
    return [train(folder, name, is_accepted=False) for name in CASES]


def resume_all(folder: str) -> list[tuple[bool, list[int]]]:
    """The second job of each, on one: whether it was refused, and what it was served when that was accepted."""
    found = []
    for name in CASES:
        seen, _ = train(folder, name, is_accepted=False)
        accepted = seen if seen is not None else train(folder, name, is_accepted=True)[0]
        found.append((seen is None, accepted or []))
    return found
