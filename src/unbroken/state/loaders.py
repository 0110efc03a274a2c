"""Sources of randomness of a loader, and how a resume makes it draw the same numbers.

A loader of torch is replayed from the start of its epoch: its iterator, its workers and their RNGs are recreated from
the same seeds, so that every batch comes again as it was. For that the workers must be new in every epoch. torchdata's
``StatefulDataLoader`` is not replayed where its state_dict is complete; what it leaves out, the RNG state of its
workers, is saved with the state that each worker reports after each batch. Nothing here changes what a loader gives.
"""

import array
import copy
import functools
import importlib
import inspect
import json
import random
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from unbroken import torch_private
from unbroken.state import grain_data, hugging_face, torchdata_nodes
from unbroken.state.encode import decode, encode
from unbroken.state.items import Stateful
from unbroken.state.rng import is_rng, rng_state, set_rng_state
from unbroken.state.wrappers import is_wrapped_loader, real_loader

_DEEPEST: Final = 5
_LONGEST: Final = 64
_MOST: Final = 10_000
_TORCHDATA: Final = "torchdata."
_WORKER: Final = "torchdata.stateful_dataloader.worker"


def adapted(loader: Any) -> Any:  # noqa: ANN401 - any loader
    """A loader whose state has the names that all have: nodes of torchdata and Grain's pipelines have other ones."""
    return torchdata_nodes.as_loader(loader) or grain_data.as_loader(loader) or loader


def says_all(loader: object) -> bool:
    """Whether a loader's own state is all there is to restore, so that it need not be replayed.

    A framework's wrapper looks one batch ahead of its loader's state, and torchdata restores neither an order that its
    sampler draws on demand, nor what an iterable dataset without ``state_dict`` drew: those are replayed.
    """
    if is_wrapped_loader(loader) or not isinstance(loader, Stateful):
        return False
    if isinstance(loader, torchdata_nodes.NodeLoader | grain_data.GrainLoader):
        return loader.is_complete
    if (streaming := hugging_face.streaming_in(loader)) is not None and not hugging_face.says_all(streaming):
        return False
    if not _is_torchdata(type(loader)):
        return True
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset):
        says_order = isinstance(dataset, Stateful)
    else:
        batches = getattr(loader, "batch_sampler", None)
        says_order = _says_order(getattr(loader, "sampler", None)) and (batches is None or _says_order(batches))
    return says_order and (not _workers(loader) or _knows_torchdata())


def _is_torchdata(kind: type[object]) -> bool:
    return any(each.__module__.startswith(_TORCHDATA) for each in kind.__mro__)


def _says_order(sampler: object) -> bool:
    # The order of the two from torch is a function of their arguments and the epoch.
    is_fixed = type(sampler) in (SequentialSampler, DistributedSampler)
    return is_fixed or _is_torchdata(type(sampler)) or isinstance(sampler, Stateful)


def _workers(loader: object) -> int:
    found = getattr(real_loader(loader), "num_workers", 0)
    return found if isinstance(found, int) else 0


def worker_count(loader: object) -> int | None:
    """How many workers a loader of torch or Grain has; None for any other."""
    if isinstance(loader, grain_data.GrainLoader):
        return loader.worker_count
    return _workers(loader) if isinstance(real_loader(loader), torch.utils.data.DataLoader) else None


def renew(loader: object) -> None:
    """Let the next iterator be a new one with new workers: those kept over epochs carry an unknown RNG state."""
    inner: Any = real_loader(loader)
    if not isinstance(inner, torch.utils.data.DataLoader) or not torch_private.end_workers(inner):
        return
    if hasattr(inner, "_initial_iter_for_state_dict"):
        inner._initial_iter_for_state_dict = False


def remarks(loader: object, *, is_replayed: bool) -> list[str]:
    """Warnings about a loader when a run is entered."""
    if isinstance(loader, torchdata_nodes.NodeLoader | grain_data.GrainLoader):
        return loader.notices
    inner: Any = real_loader(loader)
    found = hugging_face.remarks(loader)
    if not isinstance(inner, torch.utils.data.DataLoader) or not inner.num_workers:
        return found
    name = type(inner).__name__
    if not getattr(inner, "in_order", True):
        found.append(
            f"not exact: {name} has in_order=False, so that batches come in the order in which workers finish; "
            "in_order=True makes it exact"
        )
    if inner.persistent_workers and is_replayed:
        found.append(
            f"{name} has persistent_workers=True; its workers are restarted at each epoch anyway, because a resume "
            "could not restore the RNG state they carry over (persistent_workers=False silences this)"
        )
    return found


def told_epochs(loader: Any) -> list[Any]:  # noqa: ANN401
    """What a loop tells the epoch: a loader, its samplers and its dataset, as far as they have ``set_epoch``."""
    batches = getattr(loader, "batch_sampler", None)
    held = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = {id(each): each for each in (*held, getattr(loader, "dataset", None))}
    return [each for each in found.values() if callable(getattr(each, "set_epoch", None))]


# ---- generators that a loader owns ----


def rngs_of(loader: object) -> list[Any]:
    """The generators that a loader, its samplers and its dataset hold, each once, always in the same order."""
    inner: Any = real_loader(loader)
    found: dict[int, object] = {}
    skipped = {id(torch.default_generator), *map(id, torch.cuda.default_generators), id(getattr(random, "_inst", None))}
    if (numpy := sys.modules.get("numpy")) is not None:
        skipped.add(id(numpy.random.mtrand._rand))
    seen: set[int] = set()
    roots = [
        getattr(inner, name, None)
        for name in ("generator", "sampler", "batch_sampler", "dataset", "collate_fn", "sources", "own_nodes")
    ]
    if not isinstance(inner, torch.utils.data.DataLoader | Stateful):
        # A loader of the script's own.
        roots.append(inner)
    for root in roots:
        for each in _inside(root, 0, seen):
            if id(each) not in skipped:
                found.setdefault(id(each), each)
    return list(found.values())


def _inside(value: object, depth: int, seen: set[int]) -> Iterator[object]:
    """The generators in an object's attributes, and in theirs."""
    if id(value) in seen or len(seen) > _MOST:
        return
    seen.add(id(value))
    if is_rng(value):
        yield value
        return
    if depth == _DEEPEST or isinstance(value, type | ModuleType | FunctionType | torch.Tensor | torch.nn.Module):
        return
    held: list[object] = []
    if isinstance(value, dict):
        held = list(value.values()) if len(value) <= _LONGEST else []
    elif isinstance(value, list | tuple):
        held = list(value) if len(value) <= _LONGEST else []
    elif isinstance(value, functools.partial):
        held = [value.func, *value.args, *value.keywords.values()]
    elif inspect.ismethod(value):
        held = [value.__self__]
    elif isinstance(members := getattr(value, "__dict__", None), dict):
        held = list(members.values())
    for each in held:
        yield from _inside(each, depth + 1, seen)


# ---- the RNGs of StatefulDataLoader's workers ----

_MARK: Final = "unbroken_rng"
_DATASET: Final = "dataset"
_ENDED: Final = "ended"


@functools.cache
def _knows_torchdata() -> bool:
    """Whether torchdata's workers report and take their state in the way that is hooked into here."""
    try:
        worker = importlib.import_module(_WORKER)
    except ImportError:
        return False
    make = getattr(worker, "_make_state_dict", None)
    take = getattr(worker, "try_to_deserialize", None)
    return (
        callable(make)
        and callable(take)
        and list(inspect.signature(make).parameters) == ["worker_id", "dataset_kind", "fetcher", "dataset"]
        and len(inspect.signature(take).parameters) == 2
    )


def carry_worker_rng(loader: object) -> None:
    """Let the workers of a ``StatefulDataLoader`` report their RNG state with their own, and take it at a resume."""
    held: Any = loader
    if _is_torchdata(type(loader)) and _workers(loader) and not isinstance(held.worker_init_fn, CarriedRng):
        held.worker_init_fn = CarriedRng(held.worker_init_fn)


class CarriedRng:
    """A ``worker_init_fn`` that calls the user's and hooks into torchdata's state of this worker process."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        """Prepare this worker process."""
        if self._init is not None:
            self._init(worker_id)
        worker: Any = importlib.import_module(_WORKER)
        waiting: list[tuple[str, bool]] = []
        loaded: list[object] = []
        make, take = worker._make_state_dict, worker.try_to_deserialize

        def reported(worker_id: int, dataset_kind: Any, fetcher: Any, dataset: Any) -> dict[str, Any]:  # noqa: ANN401
            if waiting:
                # The first report comes after dataset and iterator are restored; making an iterator may draw.
                rng, is_ended = waiting.pop()
                _set_worker_rng(rng, (dataset, fetcher.collate_fn))
                if is_ended:
                    # torchdata reads on, and a dataset that goes back to its start at its end gives all again.
                    fetcher.ended = True
            state: dict[str, Any] = make(worker_id, dataset_kind, fetcher, dataset)
            rng = _worker_rng((dataset, fetcher.collate_fn))
            # A dataset that restores its position at the first sample does not know it in the first report.
            place = loaded.pop() if loaded else state[worker._DATASET_STATE]
            state[worker._DATASET_STATE] = {_MARK: rng, _DATASET: place, _ENDED: _is_ended(fetcher)}
            return state

        def taken(value: Any, held: Any) -> Any:  # noqa: ANN401
            if isinstance(held, dict) and _MARK in held:
                waiting.append((held[_MARK], held.get(_ENDED, False)))
                # An empty state has no values, and torchdata keeps values.
                held = held.get(_DATASET, {})
                if held is None:
                    return value
                if held:
                    loaded.append(copy.deepcopy(held))
            return take(value, held)

        worker._make_state_dict, worker.try_to_deserialize = reported, taken


def _is_ended(fetcher: Any) -> bool:  # noqa: ANN401 - torch's, of one of two kinds
    """Whether a worker has read its iterable dataset to the end."""
    iterator = getattr(fetcher, "dataset_iter", None)
    is_closed = inspect.isgenerator(iterator) and inspect.getgeneratorstate(iterator) == inspect.GEN_CLOSED
    return is_closed or bool(getattr(fetcher, "ended", False))


def _worker_rng(owners: object) -> str:
    """The RNG state of a worker process as one text: torchdata compares states value by value."""
    version, words, gauss = random.getstate()
    state: dict[str, object] = {
        "python": (version, array.array("I", words).tobytes(), gauss),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "own": [_plain(rng_state(each)) for each in _inside(owners, 0, set())],
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    return json.dumps(encode(state, item="data", path="data", take_tensor=lambda _, __: None, allow_pickle=False))


def _set_worker_rng(text: str, owners: object) -> None:
    state: Any = decode(json.loads(text), item="data", give_tensor=lambda _: torch.empty(0), allow_pickle=False)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array.array("I", words)), gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    for rng, held in zip(_inside(owners, 0, set()), state["own"], strict=True):
        set_rng_state(rng, _tensor(held) if isinstance(held, bytes) else held)


def _plain(state: object) -> object:
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else state


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
