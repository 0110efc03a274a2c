"""Batches with random augmentation from every kind of loader, whole and resumed; each case is called in a child."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import unbroken
from unbroken.errors import StateDiffers
from unbroken.loop.run import Run

# Four batches an epoch; the stop is in the middle of the second epoch, the end in the third.
SAMPLES, BATCH, TOTAL, STOP = 8, 2, 10, 6


def augmented(value: float, rng: numpy.random.Generator) -> torch.Tensor:
    """A sample with noise from every source that a dataset may draw from."""
    noise = random.random() + float(numpy.random.rand()) + torch.rand(1).item() + float(rng.random())
    return torch.tensor([value, noise])


class Samples(Dataset[torch.Tensor]):
    """Any sample by its number; it has a generator of its own beside the global ones."""

    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(7)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return augmented(float(index), self.rng)


class Stream(IterableDataset[torch.Tensor]):
    """Samples in an order that it draws itself, shared out among the workers."""

    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(7)

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        numbers = list(range(first, SAMPLES, stride))
        random.shuffle(numbers)
        for number in numbers:
            yield augmented(float(number), self.rng)


class StatefulStream(IterableDataset[torch.Tensor]):
    """Samples in order, with a state: where it stands."""

    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(7)
        self.at = 0
        self._is_loaded = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self.at, self._is_loaded = (self.at if self._is_loaded else 0), False
        for number in range(first, SAMPLES, stride)[self.at :]:
            self.at += 1
            yield augmented(float(number), self.rng)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self._is_loaded = state["at"], True


DATASETS = {"map-style": Samples, "iterable": Stream, "iterable with `state_dict`": StatefulStream}


@dataclass(frozen=True)
class Case:
    """One kind of loader, as the table has it."""

    loader: str
    dataset: str
    workers: int
    persistent: bool = False
    in_order: bool = True

    def make(self) -> Any:  # noqa: ANN401 - whatever a framework makes of it
        """The loader, with new workers and generators."""
        dataset: Any = DATASETS[self.dataset]()
        options: dict[str, Any] = {"batch_size": BATCH, "num_workers": self.workers, "in_order": self.in_order}
        if self.workers:
            options |= {"persistent_workers": self.persistent, "multiprocessing_context": "fork"}
        if self.dataset == "map-style":
            options["shuffle"] = True
        if self.loader == "StatefulDataLoader":
            from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

            return StatefulDataLoader(dataset, **options)
        plain = DataLoader(dataset, **options)
        if self.loader == "Accelerate":
            from accelerate import Accelerator  # type: ignore[import-untyped]

            return Accelerator(cpu=True).prepare(plain)
        if self.loader == "Fabric":
            from lightning.fabric import Fabric

            return Fabric(accelerator="cpu", devices=1).setup_dataloaders(plain)
        return plain


CASES = (
    *(
        Case(loader, dataset, workers, persistent)
        for loader in ("DataLoader", "StatefulDataLoader")
        for dataset in DATASETS
        for workers, persistent in ((0, False), (2, False), (2, True))
        if loader == "StatefulDataLoader" or dataset != "iterable with `state_dict`"
    ),
    Case("Accelerate", "map-style", 2),
    Case("Fabric", "map-style", 2),
    Case("DataLoader", "map-style", 2, in_order=False),
)


def _job(case: Case, directory: str, stop_at: int) -> tuple[list[str], str, list[str]]:
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    model = nn.Linear(2, 1)
    batches = []
    settings = unbroken.Settings(save_steps=None, audit="off", catch_signals=False)
    with Run(directory, settings=settings, model=model, data=case.make()) as run:
        cursor: Any = run.data
        for step in run.steps(TOTAL):
            batch = next(run.data)
            # The loop draws too, from the generators of the main process.
            made = batch.double().sum(0) + torch.rand(1).item() + random.random()
            batches.append(" ".join(value.hex() for value in made.tolist()))
            if step + 1 == stop_at:
                run.stop("enough")
        return batches, "own state" if cursor.is_stateful else "replayed", cursor.notices


def differing(case: Case, directory: str) -> tuple[int, str, list[str]]:
    """How many batches differ between a whole run and one that was resumed, how it resumes, what is said of it."""
    # Importing a framework draws random numbers, once in a process.
    case.make()
    whole, how, said = _job(case, f"{directory}/whole", 0)
    first, _, _ = _job(case, f"{directory}/parts", STOP)
    rest, _, _ = _job(case, f"{directory}/parts", 0)
    assert len(first + rest) == len(whole) == TOTAL
    return sum(one != other for one, other in zip(whole, first + rest, strict=True)), how, said


def resized(loader: str, directory: str) -> list[str]:
    """What is said when a run is resumed with another number of workers."""
    settings = unbroken.Settings(save_steps=None, audit="off", catch_signals=False)
    for workers in (1, 2):
        case = Case(loader, "map-style", workers)
        try:
            with Run(directory, settings=settings, model=nn.Linear(2, 1), data=case.make()) as run:
                for _ in run.steps(workers):
                    next(run.data)
                said = list(run.data.notices)
        except StateDiffers as refused:
            said = list(refused.changed)
    return said
