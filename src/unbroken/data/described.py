"""Where a sample comes from, in a person's words: its bucket and epoch, and the document of each of its windows."""

from dataclasses import dataclass

import numpy as np

from unbroken.data.shards import Index
from unbroken.data.stream import Stream


@dataclass(frozen=True)
class DescribedWindow:
    """One window of a sample: ``first`` to ``last`` of a document's tokens, of which the first ``masked`` repeat."""

    shard: str
    document: int
    document_tokens: int
    first: int
    last: int
    masked: int


@dataclass(frozen=True)
class Described:
    """One sample: where it stands in its bucket, its windows, and their tokens end to end, padding left out."""

    sample: int
    bucket: str
    phase: int
    ordinal: int
    epoch: int
    windows: tuple[DescribedWindow, ...]
    tokens: tuple[int, ...]


def describe(stream: Stream, sample: int) -> Described:
    """Look one sample up.

    Raises:
        IndexError: it is negative or lies beyond the end.
        ShardDamaged: a shard is not in order.
        StorageFailed: the system refused to read.
    """
    asked = np.array([sample], np.int64)
    number, ordinal = (int(each[0]) for each in stream.schedule.locate(asked))
    bucket = stream.buckets[number]
    group, sequence = bucket.order.locate(np.array([ordinal], np.int64))
    _, _, slots = next(iter(bucket.windows(group, sequence)))
    rows = (each.tolist() for each in (slots.shard, slots.offset, slots.length, slots.masked))
    windows = tuple(_window(stream, *row) for row in zip(*rows, strict=True))
    used = sum(window.last - window.first for window in windows)
    return Described(
        sample=sample,
        bucket=bucket.name,
        phase=stream.schedule.phase_at(sample),
        ordinal=ordinal,
        epoch=int(bucket.order.epoch_of(np.array([ordinal], np.int64))[0]),
        windows=windows,
        tokens=tuple(stream.read(asked).tokens[0, :used].tolist()),
    )


def _window(stream: Stream, number: int, offset: int, length: int, masked: int) -> DescribedWindow:
    shard = stream.shards[number]
    index = shard.index
    entry = _entry_at(index, offset)
    start, end = index.offsets(entry, entry + 1).tolist()
    return DescribedWindow(shard.name, entry, end - start, offset - start, offset - start + length, masked)


def _entry_at(index: Index, offset: int) -> int:
    """The entry that a token belongs to, by bisection over the file: an index may be larger than memory."""
    low, high = 0, index.entries - 1
    while low < high:
        middle = (low + high + 1) // 2
        if int(index.offsets(middle, middle)[0]) <= offset:
            low = middle
        else:
            high = middle - 1
    return low
