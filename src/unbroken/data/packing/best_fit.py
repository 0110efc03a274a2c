"""Windows packed into sequences: best-fit-decreasing, exactly, on the histogram of lengths.

Bins with the same free space are interchangeable, and windows of the same length are too. So whole piles of bins are
filled at once, and the cost depends on how many lengths there are, never on how many windows. The outcome has as many
bins as best-fit-decreasing window by window. Integers only.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# (length, count) pairs, longest first, as a linked list: the rest of the list, then its last pair.
_Filling = tuple[Any, int, int]


@dataclass(frozen=True)
class Strategy:
    """One way to fill a sequence, and the number of such sequences; ``runs`` are (length, count), longest first."""

    runs: tuple[tuple[int, int], ...]
    sequences: int


@dataclass(frozen=True)
class BinLayout:
    """All strategies as flat tables over windows that are sorted by length, longest first.

    Sequence q belongs to the strategy t with ``cumulative[t] <= q < cumulative[t + 1]``. Its slots are ``first[t]`` to
    ``first[t + 1]``; slot s holds the window ``base[s] + q - cumulative[t]``, of ``length[s]`` tokens.
    """

    base: NDArray[np.int64]
    length: NDArray[np.int64]
    first: NDArray[np.int64]
    cumulative: NDArray[np.int64]


def best_fit(histogram: NDArray[np.int64], capacity: int) -> list[Strategy]:
    """Pack ``histogram[n]`` windows of each length n into sequences of ``capacity`` tokens, the longest first."""
    piles = _Piles(capacity)
    for length in reversed(np.flatnonzero(histogram).tolist()):
        left = int(histogram[length])
        while left:
            left -= piles.place(length, left)
    return list(piles.strategies())


def one_each(histogram: NDArray[np.int64]) -> list[Strategy]:
    """One window in every sequence."""
    return [Strategy(((length, 1),), int(histogram[length])) for length in reversed(np.flatnonzero(histogram).tolist())]


class _Piles:
    """Bins by free space: equal bins are stored as one filling and a count."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._piles: defaultdict[int, list[tuple[_Filling, int]]] = defaultdict(list)
        # Bit r says whether some bin has r tokens free: the best fit is the lowest bit that is high enough.
        self._free = 0

    def place(self, length: int, count: int) -> int:
        """Place windows of one length as best-fit would; returns how many were placed, at least one.

        A bin that best-fit chose stays the best fit as long as another window fits.
        """
        fits = self._free >> length
        if not fits:
            return self._fill((), self._capacity, length, count, bins=count)
        room = length + (fits & -fits).bit_length() - 1
        filling, bins = self._take(room)
        return self._fill(filling, room, length, count, bins=bins)

    def _fill(self, filling: _Filling | tuple[()], room: int, length: int, count: int, *, bins: int) -> int:
        each = room // length
        filled = min(bins, count // each)
        times = each if filled else count
        touched = max(filled, 1)
        self._put(room - times * length, (filling, length, times), touched)
        if filling and bins > touched:
            self._put(room, filling, bins - touched)
        return touched * times

    def _put(self, room: int, filling: _Filling, bins: int) -> None:
        self._piles[room].append((filling, bins))
        self._free |= 1 << room

    def _take(self, room: int) -> tuple[_Filling, int]:
        taken = self._piles[room].pop()
        if not self._piles[room]:
            self._free &= ~(1 << room)
        return taken

    def strategies(self) -> Iterator[Strategy]:
        """Every pile, the fullest bins first."""
        for room in sorted(self._piles):
            for filling, bins in self._piles[room]:
                yield Strategy(tuple(_unchained(filling)), bins)


def _unchained(filling: _Filling | tuple[()]) -> list[tuple[int, int]]:
    runs = []
    while filling:
        filling, length, times = filling
        runs.append((length, times))
    return runs[::-1]


def lay_out(strategies: list[Strategy], histogram: NDArray[np.int64]) -> BinLayout:
    """Give every slot of every strategy its windows: each window of the histogram once."""
    longer = histogram[::-1].cumsum()[::-1] - histogram
    unused = longer.tolist()
    bases: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    lengths: list[int] = []
    times: list[int] = []
    slots = [0]
    for strategy in strategies:
        for length, count in strategy.runs:
            bases.append(unused[length] + strategy.sequences * np.arange(count))
            unused[length] += strategy.sequences * count
            lengths.append(length)
            times.append(count)
        slots.append(sum(count for _, count in strategy.runs))
    return BinLayout(
        base=np.concatenate(bases),
        length=np.repeat(np.array(lengths, np.int64), np.array(times, np.int64)),
        first=np.cumsum(slots),
        cumulative=np.cumsum([0, *(strategy.sequences for strategy in strategies)]),
    )
