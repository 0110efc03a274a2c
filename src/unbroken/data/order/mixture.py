"""Interleave several sources into one sequence of slots: exact counts, balanced throughout, random access.

Item j of a source with quota q has the time ``(2j + 1) / 2q``; slots are all items sorted by time, then by source. No
scan from the start is needed: exact integers give the items of each source before any slot, and only a block around it
is laid out. Within every 64 slots the sources are shuffled by key, so that a source never aligns with ranks or batches;
each source still gives its items in order.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unbroken.data.order.keyed import mix64

BLOCK: Final = 4096
SHUFFLED: Final = 64  # divides BLOCK
LARGEST: Final = 1 << 48  # a block's products stay below 2**63
CACHED: Final = 8


def apportion(weights: Sequence[Fraction], n: int) -> list[int]:
    """Divide ``n`` into whole shares by weight, each within one of its exact share (largest remainder).

    Raises:
        ValueError: a weight is negative, or all are zero.
    """
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise ValueError("weights must be at least 0, and one of them above 0")
    exact = [weight * n / total for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: n - sum(shares)]:
        shares[i] += 1
    return shares


@dataclass(frozen=True)
class _Block:
    """Consecutive slots; ``before`` counts the items of each source before the first."""

    before: list[int]
    source: NDArray[np.int64]
    ordinal: NDArray[np.int64]


class Interleave:
    """``sum(quotas)`` slots, exactly ``quotas[i]`` of them for source i."""

    def __init__(self, quotas: Sequence[int], key: int) -> None:
        if min(quotas, default=0) < 0 or not 0 < sum(quotas) <= LARGEST:
            raise ValueError(f"quotas must be counts with a sum from 1 to {LARGEST}, are {list(quotas)}")
        self.quotas = tuple(int(quota) for quota in quotas)
        self.slots = sum(self.quotas)
        self._key = np.uint64(key % (1 << 64))
        # Fine enough that no two different times fall between two neighbouring ticks.
        self._ticks = 2 * max(self.quotas) ** 2 + 1
        self._blocks: OrderedDict[int, _Block] = OrderedDict()

    def locate(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each slot, and the index of the item in that source."""
        if slots.size and (int(slots.min()) < 0 or int(slots.max()) >= self.slots):
            raise ValueError(f"slots are 0 to {self.slots - 1}")
        source, ordinal = np.empty_like(slots), np.empty_like(slots)
        numbers = slots // BLOCK
        for number in np.unique(numbers).tolist():
            here = numbers == number
            block, places = self._block(number), slots[here] - number * BLOCK
            source[here], ordinal[here] = block.source[places], block.ordinal[places]
        return source, ordinal

    def slot_of(self, source: int, ordinal: int) -> int:
        """The slot of an item of a source."""
        if not 0 <= ordinal < self.quotas[source]:
            raise ValueError(f"source {source} has items 0 to {self.quotas[source] - 1}, not {ordinal}")
        number = self._rank(source, ordinal) // BLOCK
        block = self._block(number)
        at = np.flatnonzero((block.source == source) & (block.ordinal == ordinal))
        return number * BLOCK + int(at[0])

    def taken(self, slot: int) -> list[int]:
        """How many items of each source come before a slot; after the last slot, all."""
        if not 0 <= slot <= self.slots:
            raise ValueError(f"slots are 0 to {self.slots}, not {slot}")
        number, rest = divmod(slot, BLOCK)
        if not rest:
            return self._before(slot)
        block = self._block(number)
        within = np.bincount(block.source[:rest], minlength=len(self.quotas)).tolist()
        return [before + more for before, more in zip(block.before, within, strict=True)]

    def _block(self, number: int) -> _Block:
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = self._laid_out(number * BLOCK)
            if len(self._blocks) > CACHED:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return block

    def _laid_out(self, first: int) -> _Block:
        before = self._before(first)
        after = self._before(min(first + BLOCK, self.slots))
        counts = [end - start for start, end in zip(before, after, strict=True)]
        source = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(source.size) - np.repeat(np.cumsum([0, *counts[:-1]]), counts)
        line = np.empty_like(source)
        line[self._places(before, source, nth)] = source
        line = line[self._shuffle(first, source.size)]
        ordinal = np.empty_like(line)
        # Items go to the slots of their source from left to right: a stable sort by source finds those slots.
        ordinal[np.argsort(line, kind="stable")] = np.asarray(before, np.int64)[source] + nth
        return _Block(before, line, ordinal)

    def _places(self, before: list[int], source: NDArray[np.int64], nth: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index of items in their block: for each, how many items of all sources come earlier.

        With both counted from the block's start, item b of source k is earlier than item a of source i where
        ``2 b q_i < 2 a q_k + lead[i, k]``; ties go to the lower source. All products fit into 64 bits.
        """
        quotas = self.quotas
        pairs = [(2 * count + 1, quota) for count, quota in zip(before, quotas, strict=True)]
        lead = np.array([[time * q - t * quota for t, q in pairs] for time, quota in pairs], np.int64)
        each = np.arange(len(quotas))
        ahead = 2 * nth[:, None] * np.asarray(quotas, np.int64)[None, :] + lead[source]
        ahead += each[None, :] < source[:, None]  # "at most" instead of "less" for the lower sources
        span = 2 * np.asarray(quotas, np.int64)[source][:, None]
        earlier = np.maximum(-(-ahead // span), 0)
        places: NDArray[np.int64] = earlier.sum(axis=1)
        return places

    def _shuffle(self, first: int, count: int) -> NDArray[np.int64]:
        slots = np.arange(first, first + count, dtype=np.uint64)
        # Sorted by group of 64 slots, then by a keyed word: a permutation inside every group.
        return np.lexsort((mix64(mix64(slots) ^ self._key), slots // np.uint64(SHUFFLED)))

    def _rank(self, source: int, ordinal: int) -> int:
        """The slot of an item before shuffling: exact, and in the right block."""
        time, quota = 2 * ordinal + 1, self.quotas[source]
        earlier = [max(-((quota - time * q - (k < source)) // (2 * quota)), 0) for k, q in enumerate(self.quotas)]
        return sum(earlier)

    def _before(self, slot: int) -> list[int]:
        """How many items of each source come before a slot, before shuffling, by exact bisection."""
        low, high = 0, self._ticks
        while low < high:
            middle = (low + high + 1) // 2
            if sum(self._earlier(middle)) <= slot:
                low = middle
            else:
                high = middle - 1
        counts, missing = self._earlier(low), slot
        missing -= sum(counts)
        # The missing items all have the same time: lower sources come first.
        for source, (now, then) in enumerate(zip(counts, self._earlier(low + 1), strict=True)):
            if missing and then > now:
                counts[source] += 1
                missing -= 1
        return counts

    def _earlier(self, tick: int) -> list[int]:
        """How many items of each source come before a tick of time."""
        ticks = self._ticks
        return [max(-((ticks - 2 * quota * tick) // (2 * ticks)), 0) for quota in self.quotas]
