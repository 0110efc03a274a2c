"""The stream as datasets, for trainers that make their own loaders.

``SampleDataset`` is map-style: item k is sample k, so a trainer that counts samples resumes exactly. It must not
shuffle: the stream is shuffled already. ``SampleIterable`` is for trainers that want an iterable: it starts at any
sample and gives each worker of a loader the samples of that worker's batches, so that the order does not depend on the
number of workers.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final, Literal

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from unbroken.data.lanes import cut_lanes
from unbroken.data.stream import Stream

Names = Literal["unbroken", "huggingface"]
Sample = dict[str, torch.Tensor]
# Our names and those of Hugging Face models, which have no common name for documents.
_CALLED: Final[dict[Names, dict[str, str]]] = {
    "unbroken": {"tokens": "tokens", "labels": "labels", "doc_ids": "doc_ids", "positions": "positions"},
    "huggingface": {"tokens": "input_ids", "labels": "labels", "positions": "position_ids"},
}


def _samples(stream: Stream, numbers: Sequence[int], names: Names) -> list[Sample]:
    rows = stream.read(numbers)
    positions = torch.arange(stream.max_length).repeat(len(numbers), 1)
    tokens, labels, doc_ids = map(torch.from_numpy, (rows.tokens, rows.labels, rows.doc_ids))
    called = _CALLED[names]
    found = []
    for row in range(len(numbers)):
        whole = {"tokens": tokens[row], "labels": labels[row], "doc_ids": doc_ids[row], "positions": positions[row]}
        found.append({called[name]: tensor for name, tensor in whole.items() if name in called})
    return found


def _require_names(names: Names) -> None:
    if names not in _CALLED:
        raise ValueError(f"names is {names!r}; it is one of {', '.join(_CALLED)}")


class SampleDataset(Dataset[Sample]):
    """Item k is sample k of a stream that ends.

    Args:
        stream: the stream to read.
        names: the names of the tensors: ``tokens``, ``labels``, ``doc_ids``, ``positions``, or as Hugging Face models
            take them: ``input_ids``, ``labels``, ``position_ids``.
        length: how many samples there are, for a stream without an end, or to end earlier.

    Raises:
        TypeError: the stream has no end and no length was given.
        ValueError: ``names`` is unknown.
    """

    def __init__(self, stream: Stream, *, names: Names = "unbroken", length: int | None = None) -> None:
        _require_names(names)
        self.stream = stream
        self.names: Names = names
        self._length = len(stream) if length is None else length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < self._length:
            raise IndexError(f"samples are 0 to {self._length - 1}, not {number}")
        return _samples(self.stream, [number], self.names)[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Sample]:
        """All samples of a batch with one look-up; torch calls this where it exists."""
        if bad := [number for number in numbers if not 0 <= number < self._length]:
            raise IndexError(f"samples are 0 to {self._length - 1}, not {bad[0]}")
        return _samples(self.stream, numbers, self.names)


class SampleIterable(IterableDataset[Sample]):
    """The samples of a stream in order, from ``start`` on.

    Args:
        stream: the stream to read.
        batch_size: that of the loader that iterates this. A loader takes whole batches from its workers in
            turn, so each worker yields only the samples of its own batches.
        start: the first sample.
        rank: the rank whose samples are yielded; every rank has its own loader.
        world_size: the number of ranks; each reads ``batch_size`` of every ``batch_size * world_size`` samples.
        names: the names of the tensors, as for ``SampleDataset``.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        batch_size: int,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
        names: Names = "unbroken",
    ) -> None:
        _require_names(names)
        if batch_size < 1 or start < 0 or not 0 <= rank < world_size:
            raise ValueError(f"no batches of {batch_size} from sample {start} on for rank {rank} of {world_size}")
        self.stream = stream
        self.batch_size = batch_size
        self.start = start
        self.rank = rank
        self.world_size = world_size
        self.names: Names = names
        self._lanes = cut_lanes(batch_size * world_size, batch_size, rank, world_size)

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        nth, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        end = self.stream.end
        for turn in count(nth, workers):
            if end is not None and self.start + (turn + 1) * self._lanes.global_batch > end:
                # Only whole batches, on every rank: a rank with one more would wait for the others forever.
                return
            samples = self._lanes.samples(np.array([turn], np.int64), self.start)
            yield from _samples(self.stream, samples.tolist(), self.names)
