"""Groups: the bounded runs of a bucket's entries that are packed together.

Small consecutive shards share a group, so that they pack well; a large shard is split at entry boundaries, so that a
plan is built and read in bounded memory. Groups depend only on counts and offsets. Shards that are added later form
new groups: existing groups never change.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from unbroken.data.corpus.shards import open_index

# Cached plans depend on these two: a change here needs a new group_plan.FORMAT.
GROUP_ENTRIES: Final = 1 << 20
GROUP_TOKENS: Final = 1 << 27


class Counted(Protocol):
    """The properties of a shard that a plan depends on."""

    @property
    def entries(self) -> int:
        """How many entries it has."""

    @property
    def tokens(self) -> int:
        """How many tokens they have."""

    @property
    def index_digest(self) -> str:
        """The digest of its index: where every entry lies."""

    @property
    def idx_path(self) -> Path:
        """Where its index is."""


class Offsets(Protocol):
    """The parts of a shard's index that are read, by range."""

    def offsets(self, first: int, last: int) -> NDArray[np.int64]:
        """Where entries begin, in tokens, and where the last of them ends."""

    def prefixes(self, first: int, last: int) -> NDArray[np.unsignedinteger[Any]]:
        """How many of the first tokens of each entry are masked."""


OpenIndex = Callable[[Path], Offsets]


@dataclass(frozen=True)
class Span:
    """A run of entries of one shard, and the tokens it covers there."""

    shard: int
    first: int
    last: int
    start_token: int
    tokens: int

    @property
    def entries(self) -> int:
        """How many entries it has."""
        return self.last - self.first


Group = tuple[Span, ...]


def form_groups(shards: Sequence[Counted], *, stride: int, index_of: OpenIndex = open_index) -> list[Group]:
    """Cut a bucket into groups, in the order of its shards.

    Args:
        shards: the shards of the bucket, in order.
        stride: tokens from window to window; a short stride makes groups smaller, to bound the number of windows.
        index_of: opens an index; called only for a shard that must be split.

    Raises:
        ShardDamaged: an index that had to be read is not in order.
        StorageFailed: an I/O error.
    """
    limit = min(GROUP_TOKENS, stride * GROUP_ENTRIES)
    groups: list[list[Span]] = []
    entries = tokens = 0
    for span in _spans(shards, limit, index_of):
        entries, tokens = entries + span.entries, tokens + span.tokens
        if not groups or entries > GROUP_ENTRIES or tokens > limit:
            groups.append([])
            entries, tokens = span.entries, span.tokens
        groups[-1].append(span)
    return [tuple(spans) for spans in groups]


def _spans(shards: Sequence[Counted], limit: int, index_of: OpenIndex) -> Iterator[Span]:
    for number, shard in enumerate(shards):
        if shard.entries <= GROUP_ENTRIES and shard.tokens <= limit:
            if shard.entries:
                yield Span(number, 0, shard.entries, 0, shard.tokens)
            continue
        index = index_of(shard.idx_path)
        first = start = 0
        while first < shard.entries:
            last, end = _furthest(index, first, min(first + GROUP_ENTRIES, shard.entries), start + limit)
            yield Span(number, first, last, start, end - start)
            first, start = last, end


def _furthest(index: Offsets, first: int, last: int, most: int) -> tuple[int, int]:
    """The last entry boundary up to ``last`` within ``most`` tokens, and the tokens before it.

    At least one entry is taken, whatever its size: an entry is never split between groups.
    """
    low, high = first + 1, last
    while low < high:
        middle = (low + high + 1) // 2
        if _token_at(index, middle) <= most:
            low = middle
        else:
            high = middle - 1
    return low, _token_at(index, low)


def _token_at(index: Offsets, entry: int) -> int:
    return int(index.offsets(entry, entry)[0])
