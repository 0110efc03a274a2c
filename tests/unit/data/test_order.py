"""Every sequence once an epoch, every epoch in another order, few groups at a time; growth changes nothing served."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from unbroken.data.order.epoch_order import WINDOW_GROUPS, BucketOrder, GroupProgress, Growth

Drawn = list[tuple[int, int]]
BEGUN = [Growth(0, 0)]


def _counts(*counts: int) -> NDArray[np.int64]:
    return np.array(counts, np.int64)


def _drawn(order: BucketOrder, first: int, last: int) -> Drawn:
    group, sequence = order.locate(np.arange(first, last))
    return list(zip(group.tolist(), sequence.tolist(), strict=True))


def _all(generations: list[NDArray[np.int64]]) -> Drawn:
    every = np.concatenate(generations).tolist()
    return [(group, sequence) for group, count in enumerate(every) for sequence in range(count)]


MANY = np.random.default_rng(1).integers(0, 60, 100)
TOTAL = int(MANY.sum())


@pytest.mark.promise("C13")
@pytest.mark.parametrize(
    "counts", [_counts(1), _counts(5), _counts(0, 3, 0), MANY], ids=["one", "five", "gaps", "many"]
)
def test_every_epoch_has_every_sequence_once(counts: NDArray[np.int64]) -> None:
    order, total = BucketOrder([counts], BEGUN, key=3), int(counts.sum())
    assert order.sequences == total
    for epoch in range(4):
        assert sorted(_drawn(order, epoch * total, (epoch + 1) * total)) == _all([counts])


@pytest.mark.promise("C13")
def test_every_epoch_and_every_key_is_another_order() -> None:
    order = BucketOrder([MANY], BEGUN, key=3)
    epochs = [_drawn(order, epoch * TOTAL, (epoch + 1) * TOTAL) for epoch in range(3)]
    epochs.append(_drawn(BucketOrder([MANY], BEGUN, key=4), 0, TOTAL))
    for number, one in enumerate(epochs):
        for other in epochs[:number]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 20


def test_the_order_never_changes() -> None:
    order = BucketOrder([MANY, _counts(9, 9, 9)], [*BEGUN, Growth(100, 0)], key=3)
    asked = np.array([0, 1, 99, 100, 101, 102, TOTAL, TOTAL + 27, 10**12])
    group, sequence = order.locate(asked)
    assert list(zip(group.tolist(), sequence.tolist(), strict=True)) == GOLDEN


def test_an_ordinal_is_found_without_the_others_and_in_any_order() -> None:
    order = BucketOrder([MANY], BEGUN, key=3)
    whole = _drawn(order, 0, 3 * TOTAL)
    asked = np.random.default_rng(2).permutation(3 * TOTAL)[:500]
    group, sequence = order.locate(asked)
    assert [whole[each] for each in asked.tolist()] == list(zip(group.tolist(), sequence.tolist(), strict=True))
    assert order.locate(np.empty(0, np.int64))[0].size == 0


def test_few_groups_are_touched_at_a_time() -> None:
    counts = np.full(200, 50, np.int64)
    order = BucketOrder([counts], BEGUN, key=3)
    group = order.locate(np.arange(200 * 50))[0]
    for first in range(0, group.size, 400):
        # A stretch of half a window lies in one window, or over the edge of two.
        assert np.unique(group[first : first + 400]).size <= 2 * WINDOW_GROUPS
    # Once left, a group is not met again in the epoch.
    reach = [np.ptp(np.flatnonzero(group == each)) for each in range(200)]
    assert max(reach) < WINDOW_GROUPS * 50


def test_a_small_bucket_is_shuffled_as_a_whole() -> None:
    counts = np.full(WINDOW_GROUPS, 100, np.int64)
    group = BucketOrder([counts], BEGUN, key=3).locate(np.arange(1600))[0]
    for first in range(0, 1600, 100):
        assert np.unique(group[first : first + 100]).size > 12


def test_unshuffled_the_order_is_that_of_the_plan() -> None:
    order = BucketOrder([MANY], BEGUN, key=3, shuffle=False)
    assert _drawn(order, 0, 2 * TOTAL) == _all([MANY]) * 2


@pytest.mark.parametrize(
    "growth",
    [[], [(1, 0)], [(0, 0), (5, 0), (4, 0)], [(0, 0), (3, 1), (3, 0)], [(0, 0)]],
    ids=["none", "late", "back", "epoch back", "too few"],
)
def test_generations_that_do_not_follow_each_other_are_refused(growth: list[tuple[int, int]]) -> None:
    counts = [_counts(3)] * (len(growth) if len(growth) != 1 else 2)
    with pytest.raises(ValueError, match="generations"):
        BucketOrder(counts, [Growth(*each) for each in growth], key=0)


# ---- growth ----

History = tuple[list[NDArray[np.int64]], list[Growth]]


@st.composite
def _histories(draw: st.DrawFn) -> History:
    """Generations of groups, and where they joined: anywhere, at one place, at an epoch's end or its beginning."""
    sizes = st.lists(st.integers(0, 25), min_size=1, max_size=24)
    counts = [np.array([draw(st.integers(1, 25)), *draw(sizes)], np.int64)]
    growth, first = [Growth(0, 0)], 0
    for _ in range(draw(st.integers(0, 4))):
        total, last = sum(int(each.sum()) for each in counts), growth[-1]
        further = draw(st.integers(0, 2))
        within = draw(st.sampled_from([0, total]) | st.integers(0, total))
        epoch, first = last.epoch + further, first + further * total
        growth.append(Growth(max(first + within, last.ordinal), epoch))
        counts.append(np.array(draw(sizes), np.int64))
    return counts, growth


@pytest.mark.promise("C13")
@settings(max_examples=150, deadline=None)
@given(_histories(), st.integers(0, 2**32))
def test_growth_leaves_what_was_served_and_every_epoch_has_every_sequence_once(history: History, key: int) -> None:
    counts, growth = history
    orders = [BucketOrder(counts[:known], growth[:known], key) for known in range(1, len(counts) + 1)]
    for before, after, joined in zip(orders, orders[1:], growth[1:], strict=False):
        assert _drawn(before, 0, joined.ordinal) == _drawn(after, 0, joined.ordinal)
    last = orders[-1]
    end_epoch = growth[-1].epoch + 2
    drawn = _drawn(last, 0, last.start_of(end_epoch))
    assert last.epoch_of(np.arange(len(drawn))).tolist() == sorted(last.epoch_of(np.arange(len(drawn))).tolist())
    for epoch in range(end_epoch):
        first, end = last.start_of(epoch), last.start_of(epoch + 1)
        assert (last.epoch_of(np.arange(first, end)) == epoch).all()
        known = [each for each, joined in zip(counts, growth, strict=True) if joined.epoch <= epoch]
        met = Counter(drawn[first:end])
        assert set(met.values()) <= {1}
        assert sorted(met) == _all(known)


@pytest.mark.promise("C13")
def test_data_that_joins_when_all_was_read_is_read_next() -> None:
    order = BucketOrder([_counts(40, 40), _counts(30)], [*BEGUN, Growth(80, 0)], key=1)
    assert {group for group, _ in _drawn(order, 80, 110)} == {2}
    assert order.start_of(1) == 110
    assert sorted(_drawn(order, 110, 220)) == _all([_counts(40, 40, 30)])


@pytest.mark.promise("C13")
def test_data_that_joins_before_an_epoch_has_begun_is_shuffled_with_the_rest_of_it() -> None:
    order = BucketOrder([_counts(40, 40), _counts(30)], [*BEGUN, Growth(80, 1)], key=1)
    assert (order.start_of(1), order.start_of(2)) == (80, 190)
    assert sorted(_drawn(order, 0, 80)) == _all([_counts(40, 40)])
    assert sorted(_drawn(order, 80, 190)) == _all([_counts(40, 40, 30)])


def test_data_that_joins_is_spread_over_the_rest_of_the_epoch() -> None:
    counts = [np.full(64, 50, np.int64), np.full(16, 50, np.int64)]
    order = BucketOrder(counts, [*BEGUN, Growth(1600, 0)], key=1)
    is_new = np.array([group >= 64 for group, _ in _drawn(order, 1600, 4000)])
    for first in range(0, 2400, 240):
        assert abs(int(is_new[first : first + 240].sum()) - 80) <= 4
    group = order.locate(np.arange(1600, 4000))[0]
    for first in range(0, 2400, 200):
        assert np.unique(group[first : first + 200]).size <= 4 * WINDOW_GROUPS


def test_a_bucket_that_was_empty_can_grow() -> None:
    order = BucketOrder([_counts(), _counts(5, 5)], [*BEGUN, *BEGUN], key=1)
    assert sorted(_drawn(order, 0, 10)) == _all([_counts(5, 5)])


# ---- what has been served ----


@settings(max_examples=60, deadline=None)
@given(_histories(), st.data())
def test_progress_never_overstates(history: History, data: st.DataObject) -> None:
    counts, growth = history
    order = BucketOrder(counts, growth, key=5)
    ordinal = growth[-1].ordinal + data.draw(st.integers(0, 60))
    met: dict[int, set[int]] = {}
    for group, sequence in _drawn(order, 0, ordinal):
        met.setdefault(group, set()).add(sequence)
    every = np.concatenate(counts).tolist()
    for group, found in enumerate(order.progress(ordinal).tolist()):
        served = len(met.get(group, ()))
        if found == GroupProgress.ALL:
            assert served == every[group]
        if found == GroupProgress.NONE:
            assert served == 0


def test_progress_goes_window_by_window() -> None:
    counts = np.full(64, 10, np.int64)
    order = BucketOrder([counts], BEGUN, key=5)
    assert Counter(order.progress(0).tolist()) == {GroupProgress.NONE: 64}
    assert Counter(order.progress(170).tolist()) == {
        GroupProgress.ALL: 16,
        GroupProgress.SOME: 16,
        GroupProgress.NONE: 32,
    }
    assert Counter(order.progress(640).tolist()) == {GroupProgress.ALL: 64}
    assert Counter(order.progress(700).tolist()) == {GroupProgress.ALL: 64}


GOLDEN: Drawn = [(23, 18), (23, 24), (76, 41), (69, 6), (15, 12), (20, 0), (58, 0), (10, 7), (52, 0)]
