"""One pass over a loader that Accelerate prepared, and how a later job continues inside it.

The RNG states that a pass began with are kept, because samplers and loader workers are seeded from them when its
iterator is made. To continue, they are restored, the iterator is made again, the batches that were done are passed, and
the states of the checkpoint are restored once the next batch is there. The batches are passed in one of three ways:

- ``index``: by ``skip_first_batches``: their samples are not read. Exact where making a batch draws no random numbers.
- ``reread``: they are read and dropped, so that workers and data sets draw what they drew before.
- ``state``: the loader continues from its own state: an iterable data set with a ``state_dict``, in torchdata's loader.
"""

import gc
import json
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from types import GeneratorType, SimpleNamespace
from typing import Any, Final, Literal

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.data_loader import (  # type: ignore[import-untyped]
    DataLoaderDispatcher,
    SeedableRandomSampler,
)
from torch.utils.data import IterableDataset

from unbroken.errors import DataEnded
from unbroken.state.cursor import set_states, states_of
from unbroken.state.encode import decode, encode
from unbroken.state.items import Stateful
from unbroken.state.loaders import carry_worker_rng, renew, rngs_of, worker_count
from unbroken.state.rng import capture_rng, restore_rng, rng_devices
from unbroken.state.wrappers import real_loader

Way = Literal["index", "reread", "state"]
_END: Final = object()


@dataclass(frozen=True)
class Began:
    """What a pass began with on this rank: the RNG states, those of the loader's own generators, and its epoch."""

    rng: Mapping[str, Any]
    own: list[object]
    iteration: int | None


def begin_pass(loader: object) -> Began:
    """Note what a pass begins with. Workers kept from the last one are ended: nobody knows their RNG states."""
    _renew(loader)
    return Began(capture_rng(rng_devices()), states_of(loader), iteration_of(loader))


def _renew(loader: object) -> None:
    if getattr(loader, "use_stateful_dataloader", False):
        carry_worker_rng(real_loader(loader))
    renew(loader)


def way_of(loader: object, *, reread: bool | None) -> Way:
    """How the batches that were done are passed.

    Args:
        loader: the loader.
        reread: what the user says; None to reread where making a batch may draw random numbers that can be drawn again.
    """
    inner: Any = real_loader(loader)
    dataset = getattr(inner, "dataset", None)
    is_iterable = isinstance(dataset, IterableDataset)
    if getattr(loader, "use_stateful_dataloader", False):
        # Its own state counts from the beginning of the pass: a loader that skips would count from elsewhere.
        return "state" if is_iterable and isinstance(dataset, Stateful) else "reread"
    if needs_first_batch(loader):
        reread = True
    if reread is None:
        holder = SimpleNamespace(dataset=dataset, collate_fn=getattr(inner, "collate_fn", None))
        reread = bool(worker_count(loader)) or bool(rngs_of(holder))
    return "reread" if reread or is_iterable else "index"


def needs_first_batch(loader: object) -> bool:
    """Whether the last batch may be filled up with samples of the first one: then that one has to be read.

    Where one process reads for all, a last batch that does not divide by their number is filled up with the first
    samples that this iterator has read; with one that skips by index those would be others.
    """
    if not isinstance(loader, DataLoaderDispatcher) or loader.state.num_processes == 1:
        return False
    inner: Any = real_loader(loader)
    size, sampler = getattr(inner, "batch_size", None), getattr(inner, "sampler", None)
    if getattr(inner, "drop_last", False):
        return False
    if not size or not isinstance(sampler, Sized):
        return True
    processes = int(loader.state.num_processes)
    last = len(sampler) % (size if loader.split_batches else size * processes)
    return bool(last % processes)


class ContinuedPass:
    """The rest of a pass that an earlier job began."""

    def __init__(self, accelerator: Accelerator, loader: Any, began: Began, batches: int, way: Way) -> None:  # noqa: ANN401
        self._accelerator, self._loader, self._began = accelerator, loader, began
        self._batches, self._way = batches, way

    def rest(self, rng: object, *, epoch: int) -> Iterator[Any]:
        """The batches that were not done yet; ``rng`` are the RNG states when the last one was.

        Raises:
            DataEnded: the loader has fewer batches than were done.
        """
        loader = self._loader
        set_iteration(loader, self._began.iteration)
        if self._way == "state" and _is_finished(loader):
            # The next epoch of such a loader begins with the state in which this one has left the data set.
            iter(loader.base_dataloader)
            batches: Iterator[Any] = iter(())
        else:
            if self._way == "reread":
                forget_own_state(loader)
            _renew(loader)
            restore_rng(self._began.rng)
            set_states(loader, self._began.own)
            batches = self._placed(epoch)
        first = next(batches, _END)
        restore_rng(rng)
        if first is not _END:
            yield first
            yield from batches
        renew(loader)
        if self._began.iteration is not None:
            # The loader that skips has counted this epoch, and not the one that it was made of.
            set_iteration(loader, self._began.iteration + 1)

    def _placed(self, epoch: int) -> Iterator[Any]:
        loader, done = self._loader, self._batches
        batches: Iterator[Any]
        if self._way == "state":
            batches = iter(loader)
            return batches
        if self._way == "index":
            batches = iter(self._accelerator.skip_first_batches(loader, done * _batches_of_sampler(loader)))
            return batches
        batches = iter(loader)
        for found in range(done):
            if next(batches, _END) is _END:
                raise DataEnded(epoch=epoch, served=done, found=found)
        return batches


def _batches_of_sampler(loader: Any) -> int:  # noqa: ANN401
    """How many batches of the sampler make one of the loader: one for each process where the first one reads for all.

    ``skip_first_batches`` counts those of the sampler.
    """
    is_dispatched = isinstance(loader, DataLoaderDispatcher)
    return int(loader.state.num_processes) if is_dispatched and not loader.split_batches else 1


def iteration_of(loader: object) -> int | None:
    """How many passes a prepared loader has made; its sampler shuffles by it. None for any other."""
    found = getattr(loader, "iteration", None)
    return found if isinstance(found, int) else None


def set_iteration(loader: object, iteration: int | None) -> None:
    """Let a prepared loader make a pass of this number next."""
    set_epoch = getattr(loader, "set_epoch", None)
    if iteration is not None and callable(set_epoch):
        set_epoch(iteration)


def seed_of(loader: object) -> int | None:
    """The seed by which Accelerate's own sampler shuffles every epoch; None for any other sampler."""
    sampler = _sampler_of(loader)
    return sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None


def set_seed_of(loader: object, seed: int | None) -> None:
    """Let the sampler shuffle by the seed that the run began with."""
    sampler = _sampler_of(loader)
    if seed is not None and isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = seed


def settle(loader: object) -> None:
    """Let a loader begin its first pass as it begins every other one, so that a resume can begin any of them again.

    Accelerate's own sampler makes a generator in its first pass, which it seeds in each; torchdata's loader has made
    its first iterator, and drawn for it, when it was prepared.
    """
    _renew(loader)
    sampler = _sampler_of(loader)
    if isinstance(sampler, SeedableRandomSampler) and sampler.generator is None:
        sampler.generator = torch.Generator()


def _sampler_of(loader: object) -> object:
    get_sampler = getattr(loader, "get_sampler", None)
    return get_sampler() if callable(get_sampler) else None


def forget_own_state(loader: object) -> None:
    """Let torchdata's loader start at the beginning, although ``load_state`` has given it a state."""
    inner: Any = real_loader(loader)
    if getattr(loader, "use_stateful_dataloader", False):
        inner.load_state_dict({})
        inner.next_iter_state = None


def _is_finished(loader: object) -> bool:
    inner: Any = real_loader(loader)
    state = getattr(inner, "next_iter_state", None)
    return isinstance(state, dict) and bool(state.get("_iterator_finished"))


def is_iterated(loader: object) -> bool:
    """Whether somebody holds an iterator of a prepared loader that has begun and is not at its end."""
    # By its type: isinstance asks objects of others for their class, and some warn.
    generators = [each for each in gc.get_objects() if type(each) is GeneratorType]
    frames = [each.gi_frame for each in generators if each.gi_code.co_name == "__iter__" and each.gi_suspended]
    return any(frame is not None and frame.f_locals.get("self") is loader for frame in frames)


def batch_count(loader: object) -> int | None:
    """How many batches a pass has; None where the loader does not say."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except (TypeError, NotImplementedError):
        return None


# ---- the states of generators as text ----


def packed_states(states: list[object]) -> str:
    """States of generators as one text."""
    plain = [each.numpy().tobytes() if isinstance(each, torch.Tensor) else each for each in states]
    return json.dumps(encode(plain, item="data", path="data", take_tensor=lambda _, __: None, allow_pickle=False))


def unpacked_states(text: str) -> list[object]:
    """The states that ``packed_states`` made this of."""
    found: Any = decode(json.loads(text), item="data", give_tensor=lambda _: torch.empty(0), allow_pickle=False)
    return [torch.frombuffer(bytearray(each), dtype=torch.uint8) if isinstance(each, bytes) else each for each in found]
