"""The order in which a bucket's sequences are drawn: each once per epoch, every epoch in another order.

The order is a windowed shuffle. The groups of an epoch are permuted; a bounded number of consecutive groups form a
shuffle window; inside a window all sequences are permuted together. So a run touches few groups at a time, however
large the bucket is, and a small bucket is one window: a full shuffle. Data that joins during an epoch is interleaved
with the rest of that epoch; the sequences already served do not change.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unbroken.data.order.keyed import Permutation, subkey
from unbroken.data.order.mixture import Interleave

# ---- where epochs begin and end ----


@dataclass(frozen=True)
class Growth:
    """When sequences join a bucket: the next ordinal to be drawn, and the first epoch that contains them."""

    ordinal: int
    epoch: int


@dataclass(frozen=True)
class Epoch:
    """The current epoch of a bucket: its number, first ordinal and number of sequences, also of later epochs."""

    number: int = 0
    first: int = 0
    sequences: int = 0

    def number_at(self, served: int) -> int:
        """The epoch in progress, or just ended, after ``served`` draws."""
        return self.number + (max(served - self.first - 1, 0) // self.sequences if self.sequences else 0)

    def grown(self, number: int, sequences: int) -> "Epoch":
        """This or a later epoch, with the bucket grown to ``sequences``."""
        return Epoch(number, self.end_of(number) - self.sequences, sequences)

    def end_of(self, number: int) -> int:
        """The ordinal at which this or a later epoch ends."""
        return self.first + (number - self.number + 1) * self.sequences

    def limit(self, epochs: int | None) -> int | None:
        """The total number of draws with ``epochs`` passes; None: no limit."""
        if not self.sequences:
            return self.first
        return None if epochs is None else self.end_of(epochs - 1)


# ---- the order within an epoch ----

WINDOW_GROUPS: Final = 16
_CACHED_EPOCHS: Final = 4

Located = tuple[NDArray[np.int64], NDArray[np.int64]]


class GroupProgress(IntEnum):
    """How much of a group has been served at least once."""

    NONE = 0
    SOME = 1
    ALL = 2


class _Shuffle:
    """One pass over some groups: ranks 0, 1, 2, ... to (index of the group, sequence in the group)."""

    def __init__(self, counts: NDArray[np.int64], key: int, *, shuffle: bool) -> None:
        self.sequences = int(counts.sum())
        self._key = key
        self._is_shuffled = shuffle
        places = np.arange(counts.size)
        self._order = Permutation(counts.size, subkey(key, "groups"))(places) if shuffle and counts.size else places
        self._begins = np.concatenate([[0], np.cumsum(counts[self._order])])
        windows = -(-counts.size // WINDOW_GROUPS)
        # Cut evenly, so that no window is left with a single group.
        self._bounds = np.arange(windows + 1) * counts.size // max(windows, 1)
        self._window_begins = self._begins[self._bounds]

    def locate(self, ranks: NDArray[np.int64]) -> Located:
        """The index of each rank's group, and its sequence in it."""
        if self._is_shuffled:
            ranks = self._mixed(ranks)
        place = np.searchsorted(self._begins, ranks, side="right") - 1
        return self._order[place], ranks - self._begins[place]

    def _mixed(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        mixed = np.empty_like(ranks)
        numbers = np.searchsorted(self._window_begins, ranks, side="right") - 1
        for number in np.unique(numbers).tolist():
            begin, end = (int(edge) for edge in self._window_begins[number : number + 2])
            here = numbers == number
            inside = Permutation(end - begin, subkey(self._key, "window", number))
            mixed[here] = begin + inside(ranks[here] - begin)
        return mixed

    def progress(self, served: int) -> NDArray[np.int64]:
        """How much of each group the first ``served`` ranks have reached; a window in progress counts as a whole."""
        begins, ends = self._window_begins[:-1], self._window_begins[1:]
        reached = np.where(
            ends <= served, GroupProgress.ALL, np.where(begins < served, GroupProgress.SOME, GroupProgress.NONE)
        )
        found = np.empty(self._order.size, np.int64)
        found[self._order] = np.repeat(reached, np.diff(self._bounds))
        return found


@dataclass(frozen=True)
class _Joined:
    """Groups that joined an epoch at the ordinal ``at``, interleaved with the rest of the epoch."""

    at: int
    groups: NDArray[np.int64]
    shuffle: _Shuffle
    mix: Interleave


@dataclass(frozen=True)
class _Pass:
    """One epoch: the groups it started with, and those that joined during it, in order."""

    first: int
    groups: NDArray[np.int64]
    shuffle: _Shuffle
    joined: tuple[_Joined, ...]

    def locate(self, ordinals: NDArray[np.int64]) -> Located:
        """The group and the sequence of each ordinal of this epoch."""
        group, sequence = np.empty_like(ordinals), np.empty_like(ordinals)
        standing, open_ = ordinals.copy(), np.ones(ordinals.size, np.bool_)
        for event in reversed(self.joined):
            here = np.flatnonzero(open_ & (standing >= event.at))
            if not here.size:
                continue
            source, nth = event.mix.locate(standing[here] - event.at)
            new, old = here[source == 1], here[source == 0]
            place, sequence[new] = event.shuffle.locate(nth[source == 1])
            group[new] = event.groups[place]
            open_[new] = False
            # The old groups keep the order they had before anything joined.
            standing[old] = event.at + nth[source == 0]
        place, sequence[open_] = self.shuffle.locate(standing[open_] - self.first)
        group[open_] = self.groups[place]
        return group, sequence

    def progress(self, ordinal: int, found: NDArray[np.int64]) -> None:
        """Record how much of this epoch's groups has been served before an ordinal."""
        for event in reversed(self.joined):
            old, new = event.mix.taken(max(ordinal - event.at, 0))
            found[event.groups] = event.shuffle.progress(new)
            ordinal = min(ordinal, event.at) + old
        found[self.groups] = self.shuffle.progress(ordinal - self.first)


class BucketOrder:
    """Which sequence of which group the n-th draw from a bucket is, over all epochs and generations.

    Args:
        counts: for each generation the sequences of each group it added; groups are numbered over all generations.
        growth: the ordinal and epoch at which each generation joined; the first at 0.
        key: decides the order.
        shuffle: if False, groups and sequences come in the order of the plan.

    Raises:
        ValueError: the generations are not in order.
    """

    def __init__(
        self, counts: Sequence[NDArray[np.int64]], growth: Sequence[Growth], key: int, *, shuffle: bool = True
    ) -> None:
        _require_in_turn(counts, growth)
        self._counts = [np.asarray(each, np.int64) for each in counts]
        self._growth = tuple(growth)
        self._first_group = np.cumsum([0, *(each.size for each in self._counts)]).tolist()
        self._key = key
        self._is_shuffled = shuffle
        self._passes: OrderedDict[int, _Pass] = OrderedDict()
        self._runs = self._timeline()
        self._run_begins = np.array([run.first for run in self._runs], np.int64)
        self._run_numbers = np.array([run.number for run in self._runs], np.int64)
        self._run_sizes = np.array([run.sequences for run in self._runs], np.int64)

    @property
    def sequences(self) -> int:
        """Sequences per epoch after the last growth."""
        return self._runs[-1].sequences

    def locate(self, ordinals: NDArray[np.int64]) -> Located:
        """The group of each ordinal, counted over all generations, and its sequence in that group."""
        group, sequence = np.empty_like(ordinals), np.empty_like(ordinals)
        numbers = self.epoch_of(ordinals)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            group[here], sequence[here] = self._pass(number).locate(ordinals[here])
        return group, sequence

    def epoch_of(self, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """The epoch that each ordinal belongs to."""
        run = np.searchsorted(self._run_begins, ordinals, side="right") - 1
        return self._run_numbers[run] + (ordinals - self._run_begins[run]) // self._run_sizes[run]

    def start_of(self, epoch: int) -> int:
        """The first ordinal of an epoch."""
        run = self._runs[int(np.searchsorted(self._run_numbers, epoch, side="right")) - 1]
        return run.end_of(epoch) - run.sequences

    def progress(self, ordinal: int) -> NDArray[np.int64]:
        """How much of each group (``GroupProgress``) has been served at least once before an ordinal.

        Every group of the shuffle window in progress counts as ``SOME``.
        """
        found = np.full(self._first_group[-1], GroupProgress.NONE, np.int64)
        if ordinal > 0:
            number = int(self.epoch_of(np.array([ordinal - 1]))[0])
            self._pass(number).progress(ordinal, found)
            passed = [each for each, joined in enumerate(self._growth) if joined.epoch < number]
            found[self._groups(passed)] = GroupProgress.ALL
        return found

    def _timeline(self) -> list[Epoch]:
        """The epochs at which the size changes."""
        runs = [Epoch()]
        for counts, joined in zip(self._counts, self._growth, strict=True):
            epoch = runs[-1].grown(joined.epoch, runs[-1].sequences + int(counts.sum()))
            if runs[-1].number == epoch.number:
                runs.pop()
            runs.append(epoch)
        return runs

    def _pass(self, number: int) -> _Pass:
        found = self._passes.get(number)
        if found is None:
            found = self._passes[number] = self._made(number)
            if len(self._passes) > _CACHED_EPOCHS:
                self._passes.popitem(last=False)
        self._passes.move_to_end(number)
        return found

    def _made(self, number: int) -> _Pass:
        first = self.start_of(number)
        known = [each for each, joined in enumerate(self._growth) if joined.epoch <= number]
        began = [each for each in known if self._growth[each].ordinal <= first]
        groups, key = self._groups(began), subkey(self._key, "epoch", number)
        shuffle = _Shuffle(self._counts_of(began), key, shuffle=self._is_shuffled)
        late = [each for each in known if each not in began]
        return _Pass(first, groups, shuffle, tuple(self._events(first + shuffle.sequences, late, key)))

    def _events(self, end: int, generations: list[int], key: int) -> Iterator[_Joined]:
        for each in generations:
            at = self._growth[each].ordinal
            counts = self._counts_of([each])
            shuffle = _Shuffle(counts, subkey(key, "joined", each), shuffle=self._is_shuffled)
            if shuffle.sequences:
                mix = Interleave([end - at, shuffle.sequences], subkey(key, "mix", each))
                yield _Joined(at, self._groups([each]), shuffle, mix)
            end += shuffle.sequences

    def _groups(self, generations: Sequence[int]) -> NDArray[np.int64]:
        ranges = [np.arange(self._first_group[each], self._first_group[each + 1]) for each in generations]
        return np.concatenate([np.empty(0, np.int64), *ranges])

    def _counts_of(self, generations: Sequence[int]) -> NDArray[np.int64]:
        return np.concatenate([np.empty(0, np.int64), *(self._counts[each] for each in generations)])


def _require_in_turn(counts: Sequence[NDArray[np.int64]], growth: Sequence[Growth]) -> None:
    ordinals, epochs = [each.ordinal for each in growth], [each.epoch for each in growth]
    is_in_turn = ordinals == sorted(ordinals) and epochs == sorted(epochs)
    if len(counts) != len(growth) or not growth or ordinals[0] != 0 or not is_in_turn:
        raise ValueError(f"generations must join in order, the first at 0; got {list(growth)}")
