"""What the ranks of a world read, for tests of loaders."""

import json
from collections.abc import Iterator
from typing import Any

from unbroken.data.loader import Batch, Loader
from unbroken.data.stream import Stream

Read = dict[int, list[int]]


def taken(batches: Iterator[Batch] | Loader, count: int | None = None) -> Read:
    """The tokens of every sample in some batches."""
    found: Read = {}
    for number, batch in enumerate(batches):
        for row, sample in enumerate(batch.samples):
            assert sample not in found
            found[sample] = batch.tokens[row].tolist()
        if count is not None and number + 1 == count:
            break
    return found


def world_of(stream: Stream, world: int, state: dict[str, Any] | None = None, **more: Any) -> list[Loader]:  # noqa: ANN401
    """The loaders of all ranks."""
    sizes = {"global_batch_size": 8, "per_device_batch_size": 2, **more}
    loaders = [Loader(stream, rank=rank, world_size=world, **sizes) for rank in range(world)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
    return loaders


def read_steps(loaders: list[Loader], steps: int) -> Read:
    """What the ranks of a world read in so many steps."""
    found: Read = {}
    for loader in loaders:
        found |= taken(iter(loader), steps * loader.lanes.per_step)
    return found
