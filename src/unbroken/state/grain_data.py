"""Grain's datasets and loaders: their iterators say where they stand, and the order is a function of their seeds.

Grain hands a generator to functions that want random numbers, made of the seed and the sample's number, so that its
workers have no RNG state to restore. Each new iterator starts with the same order: ``repeat()`` before the end of the
pipeline is Grain's way to further epochs.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from unbroken.state.pipelines import is_of, stages_of

_PACKAGE: Final = "grain."
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
# In the state of Grain's DataLoader, texts that it compares with those of the loader that takes the state.
_COMPARED: Final = ("sampler", "data_source")
# Stages with a function to which Grain passes no generator.
_MAPPED: Final = ("Map", "MapMapDataset", "MapIterDataset")


class GrainLoader:
    """A dataset or loader of Grain, or an iterator of one, as a loader with a state."""

    is_complete = True

    def __init__(self, pipeline: Any) -> None:  # noqa: ANN401 - of a library that may not be installed
        self.pipeline = pipeline
        self._iterator: Any = None
        self._loaded: Any = None
        # Each worker process has a stage of its own.
        self.worker_count = sum(is_of(stage, _PACKAGE, "ProcessPrefetchIterDataset") for stage in stages_of(pipeline))

    def __iter__(self) -> Iterator[Any]:
        iterator: Any = iter(self.pipeline)
        if self._loaded is not None:
            iterator.set_state(_fitted(self._loaded, iterator.get_state()))
        self._iterator, self._loaded = iterator, None
        return iterator  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """Where its iterator stands."""
        return {"iterator": self._loaded if self._iterator is None else self._iterator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there when the next iterator is made."""
        self._loaded, self._iterator = state["iterator"], None

    @property
    def notices(self) -> list[str]:
        """Warnings about the pipeline when a run is entered."""
        # A DataLoader makes stages of its operations in which all functions look alike.
        operations = getattr(self.pipeline, "_operations", None)
        stages = stages_of(self.pipeline) if operations is None else operations
        found = []
        if any(is_of(stage, _PACKAGE, name) for stage in stages for name in _MAPPED):
            said = "map functions of Grain run in threads or processes ahead of the loop"
            found.append(
                f"{said}: exact unless they draw random numbers, which random_map gives each sample of its own"
            )
        if self.worker_count:
            found.append(
                "worker processes of Grain do not ignore stop signals, and outlive a SIGKILL of this process: "
                "send SIGTERM to this process and not to its process group"
            )
        return found


def as_loader(loader: object) -> GrainLoader | None:
    """A dataset, loader or iterator of Grain as a loader with a state; None for anything else."""
    known = ("MapDataset", "IterDataset", "DataLoader", "DatasetIterator", "DataLoaderIterator")
    return GrainLoader(loader) if any(is_of(loader, _PACKAGE, name) for name in known) else None


def _fitted(state: Any, here: Any) -> Any:  # noqa: ANN401 - bytes of a DataLoader, a dict of a dataset
    """A state that Grain takes: it compares reprs, and that of a plain object has its address, new in every process."""
    if not isinstance(state, bytes) or not isinstance(here, bytes):
        return state
    saved, live = json.loads(state), json.loads(here)
    for name in _COMPARED:
        if _ADDRESS.sub("", str(saved.get(name))) == _ADDRESS.sub("", str(live.get(name))):
            saved[name] = live.get(name)
    return json.dumps(saved).encode()
