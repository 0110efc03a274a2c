"""A data pipeline as a tree of stages, and a digest of what its order depends on.

A position says nothing by itself: batch 7 of another order, batch size or number of ranks is another batch. So what a
loader is made of is saved beside the position and compared at a resume. Libraries are known by the names of their
modules, so that none has to be installed. What a loader does not show, such as the code of a function, is not compared.
"""

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any, Final

import xxhash
from torch.utils.data import DataLoader

from unbroken.state.rng import is_rng, rng_state
from unbroken.state.wrappers import real_loader

# Attributes by which a stage holds the one, or the several, that it reads from: Hugging Face's, torchdata's, Grain's.
_SOURCE: Final = ("ex_iterable", "iterable", "source", "_dataset", "_ex_iterable")
_SOURCES: Final = ("ex_iterables", "source_nodes", "_parents", "_datasets")
# Attributes that decide which samples a stage gives, and in which order.
_DECIDING: Final = (
    *("batch_size", "batched", "buffer_size", "drop_last", "drop_last_batch", "kwargs", "max_input_shards", "n"),
    *("num_times", "offset", "probabilities", "seed", "shuffle", "step", "stop_criteria", "stopping_strategy"),
    "weights",
    *("_batch_size", "_drop_remainder", "_length", "_sampler", "_seed", "_start", "_step", "_stop", "_window_size"),
    *("generator", "iterable", "sampler"),
)
_MOST_STAGES: Final = 1_000
_ROWS_COMPARED: Final = 1_000
_DEEPEST: Final = 4


def is_of(thing: object, module: str, name: str) -> bool:
    """Whether the class of an object, or one that it inherits from, has this name in this package."""
    return any(each.__name__ == name and f"{each.__module__}.".startswith(module) for each in type(thing).__mro__)


def stages_of(root: object) -> Iterator[object]:
    """The stages of a pipeline, the last one first."""
    waiting, seen = [root], 0
    while waiting and seen < _MOST_STAGES:
        stage = waiting.pop()
        seen += 1
        yield stage
        waiting += [each for name in _SOURCE if (each := getattr(stage, name, None)) is not None]
        for name in _SOURCES:
            held = getattr(stage, name, None) or ()
            waiting += held.values() if isinstance(held, Mapping) else held


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a position in a loader depends on; None for what the loader does not say."""

    batch_size: int | None
    ranks: int | None
    samples: int | None
    order: str | None

    def changes(self, saved: Mapping[str, Any]) -> list[str]:
        """What differs from a checkpoint's."""
        found = []
        for name, said in (
            ("batch_size", "batch_size was {} and is {}"),
            ("ranks", "the loader split the data over {} ranks and now splits it over {}"),
            ("samples", "the dataset had {:,} samples and has {:,}"),
        ):
            before, now = saved.get(name), getattr(self, name)
            if isinstance(before, int) and now is not None and before != now:
                found.append(said.format(before, now))
        before = saved.get("order")
        if not found and before is not None and self.order is not None and before != self.order:
            found.append(
                "the pipeline is another one: its stages, files or shuffle seed differ "
                "(shuffle() without a seed differs from job to job)"
            )
        return found

    def as_state(self) -> dict[str, Any]:
        """The same as plain values."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def identity_of(loader: object) -> Identity:
    """What a position in this loader depends on."""
    inner: Any = real_loader(loader)
    dataset = getattr(inner, "dataset", None) if isinstance(inner, DataLoader) else inner
    root = getattr(inner, "pipeline", dataset)
    is_known = any(is_of(root, module, name) for module, name in _ROOTS)
    is_map_style = isinstance(inner, DataLoader) and hasattr(dataset, "__getitem__")
    # A streaming dataset has neither, and asking some for their length would read them.
    samples = _length(dataset) if is_map_style or is_of(root, "datasets.", "Dataset") else None
    size = getattr(inner, "batch_size", None)
    return Identity(
        size if isinstance(size, int) else None,
        _ranks(inner, root if is_known else None),
        samples,
        _digest(root) if is_known else None,
    )


_ROOTS: Final = (
    ("datasets.", "IterableDataset"),
    ("datasets.", "Dataset"),
    ("torchdata.", "BaseNode"),
    ("grain.", "MapDataset"),
    ("grain.", "IterDataset"),
    ("grain.", "DataLoader"),
)


def _length(dataset: Any) -> int | None:  # noqa: ANN401 - whatever a user's dataset is
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _ranks(loader: object, root: object) -> int | None:
    """Over how many ranks a loader splits its data, where it says so."""
    holders: list[tuple[object, str]] = [
        (getattr(loader, "sampler", None), "num_replicas"),
        (getattr(loader, "batch_sampler", None), "num_processes"),
        (getattr(root, "_distributed", None), "world_size"),
        (getattr(getattr(root, "_sampler", None), "_shard_options", None), "shard_count"),
    ]
    for stage in stages_of(root):
        holders += [(getattr(stage, "sampler", None), "num_replicas"), (stage, "world_size")]
    for holder, name in holders:
        if isinstance(found := getattr(holder, name, None), int):
            return found
    return None


def _digest(root: object) -> str:
    stages = [_described(stage, 0) for stage in stages_of(root)]
    return xxhash.xxh3_64_hexdigest(json.dumps(stages, sort_keys=True).encode())


def _described(value: object, depth: int) -> object:
    """A value as JSON that is the same in every process; of what has no such form, its type."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        # Data that was moved to another directory is the same data.
        return PurePath(value).name
    if is_rng(value):
        return str(rng_state(value))
    if depth < _DEEPEST:
        if isinstance(value, Mapping):
            return {str(key): _described(each, depth + 1) for key, each in value.items()}
        if isinstance(value, list | tuple | range):
            return [len(value), *(_described(each, depth + 1) for each in _spread(value))]
        if is_of(value, "datasets.", "Dataset"):
            return _described_rows(value)
        named = _deciding(value)
        if named:
            return {"": type(value).__name__, **{name: _described(each, depth + 1) for name, each in named.items()}}
    return type(value).__name__


def _deciding(stage: object) -> dict[str, object]:
    held: Collection[str] = getattr(stage, "__dict__", {})
    return {name: getattr(stage, name) for name in _DECIDING if name in held}


def _described_rows(dataset: Any) -> object:  # noqa: ANN401 - a Dataset of a library that may not be installed
    """Which rows of its files a map-style dataset has: shuffle(), filter() and select() leave a list of them."""
    rows = getattr(dataset, "_indices", None)
    if rows is None:
        return [len(dataset)]
    column = rows.column(0)
    return [len(dataset), *(column[at].as_py() for at in _spread(range(len(column))))]


def _spread(values: Any) -> Any:  # noqa: ANN401 - any sequence
    """Some of many values, evenly spread; all of few."""
    return values[:: max(1, len(values) // _ROWS_COMPARED)]
