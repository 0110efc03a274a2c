"""The position of a Lightning ``Trainer`` in its training data inside an epoch, through public interfaces only.

Lightning restores a loader with ``state_dict``, such as torchdata's ``StatefulDataLoader``. A ``DataLoader`` of torch
without workers draws its order when its first batch is fetched. So the sampler inside its batch sampler is wrapped, to
save the RNG states at the start of an epoch: a resume draws the same order and skips the samples that were served. With
workers, the order is drawn when Lightning makes the iterator, before any callback is called: that is not supported.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from unbroken.state.items import Stateful
from unbroken.state.loaders import rngs_of
from unbroken.state.rng import capture_rng, restore_rng, rng_devices

# In a checkpoint: what the order of a pass was drawn from, the generators that a loader holds, and how many samples of
# the pass were served.
_BEGAN: Final = "began"
_HELD: Final = "generators"
_SERVED: Final = "served"


@dataclass(frozen=True)
class Draws:
    """What an order is drawn from: the global RNGs, and the generators that a loader holds."""

    rng: Any
    generators: Mapping[str, torch.Tensor]

    @classmethod
    def now(cls, generators: Sequence[torch.Generator]) -> "Draws":
        """The states as they are."""
        states = {str(place): each.get_state() for place, each in enumerate(generators)}
        return cls(capture_rng(rng_devices()), states)

    def restore(self, generators: Sequence[torch.Generator]) -> None:
        """Set the states."""
        self.restore_held(generators)
        restore_rng(self.rng)

    def restore_held(self, generators: Sequence[torch.Generator]) -> None:
        """Set the states of the generators that a loader holds, and leave the global RNGs."""
        for place, each in enumerate(generators):
            if (state := self.generators.get(str(place))) is not None:
                each.set_state(state)


class EpochOrder:
    """A sampler that remembers what it began to draw from, and can leave out the samples already served."""

    def __init__(self, sampler: Any, generators: Sequence[torch.Generator], batch_size: int) -> None:  # noqa: ANN401
        self.sampler, self.generators, self.batch_size = sampler, generators, batch_size
        self.began: Draws | None = None
        # Of the current pass. Among several loaders a short one begins again while the longest continues.
        self.served = 0
        self._resumed: tuple[int, Draws | None, Draws, Callable[[], Any]] | None = None

    def resume(self, served: int, began: Draws | None, now: Draws, take_rng: Callable[[], Any]) -> None:
        """Let the next iteration be that of an interrupted pass.

        Args:
            served: how many samples of it were served.
            began: what its order was drawn from; None if it was not yet made.
            now: what the next batch is drawn from.
            take_rng: gives the global RNG states of the next batch to the first loader that is read, None to others:
                these draw from what the first one leaves.
        """
        self._resumed = (served, began, now, take_rng)

    def __iter__(self) -> Iterator[Any]:
        """The order of a pass over the data."""
        resumed, self._resumed = self._resumed, None
        order = None if resumed is None else self._again(*resumed)
        if order is None:
            self.began, self.served = Draws.now(self.generators), 0
            order = iter(self.sampler)
        for index in order:
            self.served += 1
            yield index

    def _again(self, served: int, began: Draws | None, now: Draws, take_rng: Callable[[], Any]) -> Iterator[Any] | None:
        """The rest of an interrupted pass; None if it had not begun, and with it what it will be drawn from."""
        order = None
        rng = take_rng()
        if rng is None:
            rng = capture_rng(rng_devices())
        if began is not None:
            began.restore(self.generators)
            self.began, self.served = Draws.now(self.generators), served
            order = iter(self.sampler)
            for _ in range(served):
                next(order)
        now.restore_held(self.generators)
        restore_rng(rng)
        return order

    def __len__(self) -> int:
        """How many samples an epoch has."""
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the sampler has
        """What the sampler has, ``set_epoch`` for example."""
        return getattr(self.__dict__["sampler"], name)


class TrainPosition:
    """The position in the training data of one job."""

    def __init__(self, loaders: object) -> None:
        """Wrap the samplers of plain loaders; ``loaders`` is ``trainer.train_dataloader``."""
        self.loaders = loaders
        self._loaders = list(_flat(loaders))
        self._orders: list[EpochOrder] = []
        self._rng: Any = None
        for loader in self._loaders:
            if isinstance(loader, DataLoader) and not isinstance(loader, Stateful) and problem_of(loader) is None:
                batches: Any = loader.batch_sampler
                held = [each for each in rngs_of(loader) if isinstance(each, torch.Generator)]
                batches.sampler = order = EpochOrder(_unwrapped(batches.sampler), held, int(batches.batch_size))
                self._orders.append(order)

    @property
    def problems(self) -> list[str]:
        """Why a resume inside an epoch would not be exact; one sentence for each loader."""
        return [problem for loader in self._loaders if (problem := problem_of(loader)) is not None]

    @property
    def is_made_from_global_rng(self) -> bool:
        """Whether an epoch depends on no other one: no loader has a state or a generator of its own."""
        return len(self._orders) == len(self._loaders) and not any(order.generators for order in self._orders)

    def states(self) -> dict[str, Any]:
        """All that the position depends on, by name."""
        found: dict[str, Any] = {"rng": capture_rng(rng_devices())}
        for place, order in enumerate(self._orders):
            found[f"{_HELD}_{place}"] = Draws.now(order.generators).generators
            if order.began is not None:
                found[f"{_BEGAN}_{place}"] = order.began.rng
                found[f"{_BEGAN}_{_HELD}_{place}"] = order.began.generators
                found[f"{_SERVED}_{place}"] = {"samples": order.served}
        return found

    def resume(self, batches: int, saved: Mapping[str, Any]) -> None:
        """Continue behind so many batches; the RNG states are restored when the next one is fetched."""
        self._rng = saved["rng"]
        for place, order in enumerate(self._orders):
            now = Draws(saved["rng"], saved.get(f"{_HELD}_{place}", {}))
            began = saved.get(f"{_BEGAN}_{place}")
            held = saved.get(f"{_BEGAN}_{_HELD}_{place}", {})
            # A checkpoint of an earlier version does not say it.
            served = int(saved.get(f"{_SERVED}_{place}", {}).get("samples", batches * order.batch_size))
            order.resume(served, None if began is None else Draws(began, held), now, self._take_rng)
        if len(self._orders) < len(self._loaders):
            # Another loader may be read first: it does not ask.
            restore_rng(self._take_rng())

    def _take_rng(self) -> Any:  # noqa: ANN401 - the states of all global RNGs
        rng, self._rng = self._rng, None
        return rng


def _unwrapped(sampler: Any) -> Any:  # noqa: ANN401 - any sampler
    """The sampler itself: a loader may come from an earlier ``fit``."""
    return sampler.sampler if isinstance(sampler, EpochOrder) else sampler


def problem_of(loader: object) -> str | None:
    """Why the position of a loader inside an epoch cannot be restored; None if it can."""
    if isinstance(loader, Stateful):
        return None
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"{name} has no state_dict and load_state_dict"
    if isinstance(loader.dataset, IterableDataset):
        return f"{name} reads an iterable dataset, whose position is not known"
    if loader.num_workers:
        return f"{name} has num_workers={loader.num_workers}, which read ahead before a callback is called"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"{name} has a batch sampler of its own"
    return None


def _flat(loaders: object) -> Iterator[object]:
    if isinstance(loaders, Mapping):
        for each in loaders.values():
            yield from _flat(each)
    elif isinstance(loaders, list | tuple):
        for each in loaders:
            yield from _flat(each)
    elif loaders is not None:
        yield loaders


def sizes_of(loaders: object) -> dict[str, Any]:
    """Batch size and length of the data, as far as loaders say."""
    found: dict[str, Any] = {}
    for place, loader in enumerate(_flat(loaders)):
        suffix = "" if place == 0 else f"_{place}"
        found[f"batch_size{suffix}"] = getattr(loader, "batch_size", None)
        found[f"dataset_length{suffix}"] = _length(getattr(loader, "dataset", None))
    return found


def _length(dataset: object) -> int | None:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
