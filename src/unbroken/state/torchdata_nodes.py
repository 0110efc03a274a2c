"""Graphs of ``torchdata.nodes``: iterated by their root, resumed from their state or from the start of their epoch.

A node's state is exact where its samplers' orders are functions of the epoch. torchdata 0.11 does not restore a random
sampler or a stateful one in a later epoch, nor a weighted mixture at the end of one. Such a graph is put back to the
start of its epoch, with the RNG state and the samplers' epochs of that time, and replayed.
"""

import copy
from collections.abc import Iterator
from typing import Any, Final

from torch.utils.data import SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from unbroken.state import hugging_face
from unbroken.state.pipelines import is_of, stages_of

_PACKAGE: Final = "torchdata."
# Nodes whose state is exact at every position: each is compared there in a test.
_EXACT: Final = frozenset(
    {"Batcher", "IterableWrapper", "Mapper", "ParallelMapper", "_ParallelMapperImpl", "Prefetcher", "PinMemory"}
    | {"SamplerWrapper", "Unbatcher"}
)


class NodeLoader:
    """A graph of nodes as a loader. A ``Loader`` of torchdata is taken apart: it looks one batch ahead at a resume."""

    def __init__(self, root: Any) -> None:  # noqa: ANN401 - of a library that may not be installed
        self.pipeline = root
        stages: list[Any] = [stage for stage in stages_of(root) if is_of(stage, _PACKAGE, "BaseNode")]
        # What the graph draws its order from: for these the RNG states are kept.
        self.sources = [
            getattr(stage, name)
            for stage in stages
            for name in ("sampler", "iterable", "map_fn")
            if getattr(stage, name, None) is not None
        ]
        # One of the script's own may hold what it reads from under any name.
        self.own_nodes = [stage for stage in stages if not type(stage).__module__.startswith(_PACKAGE)]
        self._samplers: list[Any] = [stage for stage in stages if is_of(stage, _PACKAGE, "SamplerWrapper")]
        self._stages = stages
        self._loaded: dict[str, Any] | None = None
        self._is_started = False
        self.is_complete = all(_is_exact(stage) for stage in stages)

    def __iter__(self) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded["root"] is not None:
            for node, epoch in zip(self._samplers, loaded["epochs"], strict=True):
                # torchdata does not set the epoch of a sampler that has a state.
                if callable(set_epoch := getattr(node.sampler, "set_epoch", None)):
                    set_epoch(epoch)
            # Nodes keep and change what they are given, and the start of an epoch is needed again.
            self.pipeline.reset(copy.deepcopy(loaded["root"]))
        else:
            for node in self._samplers:
                # torchdata's stateful sampler says where the last epoch ended until it draws again.
                if getattr(node.sampler, "yielded", 0):
                    node.sampler.yielded = 0
            self.pipeline.reset(None)
        self._is_started = True
        return iter(self.pipeline)

    def state_dict(self) -> dict[str, Any]:
        """Where the graph stands."""
        # Asking a graph that was never iterated would start its threads, and draw its order.
        if not self._is_started:
            return self._loaded or {"root": None, "epochs": []}
        return {"root": copy.deepcopy(self.pipeline.state_dict()), "epochs": [node.epoch for node in self._samplers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there when the next iterator is made."""
        self._loaded, self._is_started = state, False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of streaming datasets in the graph; its samplers count epochs by themselves."""
        for stage in self._stages:
            if (dataset := hugging_face.streaming_in(getattr(stage, "iterable", None))) is not None:
                dataset.set_epoch(epoch)

    @property
    def notices(self) -> list[str]:
        """Warnings about the graph when a run is entered."""
        found = [each for stage in self._stages for each in hugging_face.remarks(getattr(stage, "iterable", None))]
        mappers: list[Any] = [stage for stage in self._stages if getattr(stage, "map_fn", None) is not None]
        if any(not getattr(stage, "in_order", True) for stage in mappers):
            found.append(
                "not exact: ParallelMapper has in_order=False, so that samples come in the order in which workers "
                "finish; in_order=True makes it exact"
            )
        is_read_ahead = any(is_of(stage, _PACKAGE, "Prefetcher") for stage in self._stages)
        reads = is_read_ahead and any(_reads_scripts(stage) for stage in self._stages)
        if reads or any(getattr(stage, "num_workers", 0) or is_read_ahead for stage in mappers):
            found.append(
                "map functions and iterables of torchdata.nodes run in threads or processes ahead of the loop: "
                "exact unless they draw random numbers from a shared generator"
            )
        return found


def as_loader(loader: Any) -> NodeLoader | None:  # noqa: ANN401 - any loader
    """A node, or a ``Loader`` of nodes, as a loader; None for anything else."""
    if is_of(loader, _PACKAGE, "BaseNode"):
        return NodeLoader(loader)
    if is_of(loader, "torchdata.nodes.", "Loader"):
        return NodeLoader(loader.root)
    return None


def _reads_scripts(stage: object) -> bool:
    """Whether a node iterates something of the script's, which may draw random numbers."""
    iterable = getattr(stage, "iterable", None)
    is_known = isinstance(iterable, list | tuple | range) or hugging_face.streaming_in(iterable) is not None
    return iterable is not None and not is_known


def _is_exact(stage: Any) -> bool:  # noqa: ANN401 - of a library that may not be installed
    if type(stage).__name__ not in _EXACT or not type(stage).__module__.startswith(_PACKAGE):
        return False
    if hasattr(stage, "sampler"):
        return type(stage.sampler) in (SequentialSampler, DistributedSampler)
    if hasattr(stage, "iterable"):
        dataset = hugging_face.streaming_in(stage.iterable)
        is_plain = isinstance(stage.iterable, list | tuple | range)
        return is_plain or (dataset is not None and hugging_face.says_all(dataset))
    return True
