"""Sources share a line of slots exactly, evenly, and the same way from wherever one looks."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.data.order.mixture import BLOCK, LARGEST, SHUFFLED, Interleave, apportion

GOLDEN_SOURCE = [2, 0, 1, 0, 1, 1, 1, 2, 1, 0, 2, 0, 0, 2, 0, 0]
GOLDEN_ORDINAL = [0, 0, 0, 1, 1, 2, 3, 1, 4, 2, 2, 3, 4, 3, 5, 6]
quotas_lists = st.lists(st.integers(0, 700), min_size=1, max_size=6).filter(any)


def unshuffled(quotas: list[int]) -> list[int]:
    """The plain definition: all items by time, then by source."""
    items = [(Fraction(2 * j + 1, 2 * quota), i) for i, quota in enumerate(quotas) for j in range(quota)]
    return [source for _, source in sorted(items)]


def everything(line: Interleave) -> tuple[list[int], list[int]]:
    source, ordinal = line.locate(np.arange(line.slots))
    return source.tolist(), ordinal.tolist()


@given(quotas_lists)
@settings(deadline=None, max_examples=60)
def test_every_sixty_four_slots_hold_what_the_plain_definition_says(quotas: list[int]) -> None:
    source, _ = everything(Interleave(quotas, 5))
    plain = unshuffled(quotas)
    for first in range(0, len(plain), SHUFFLED):
        assert sorted(source[first : first + SHUFFLED]) == sorted(plain[first : first + SHUFFLED])


@pytest.mark.parametrize("quotas", [[9000, 1, 4096], [1, 1, 1], [5000, 5000, 5000], [4096], [0, 12_289, 0, 3]])
def test_lines_longer_than_a_block_hold_what_the_plain_definition_says(quotas: list[int]) -> None:
    source = np.array(everything(Interleave(quotas, 11))[0])
    plain = np.array(unshuffled(quotas))
    groups = np.arange(plain.size) // SHUFFLED
    assert np.array_equal(source[np.lexsort((source, groups))], plain[np.lexsort((plain, groups))])


@given(quotas_lists)
@settings(deadline=None, max_examples=60)
def test_each_source_gives_each_of_its_items_once_and_in_order(quotas: list[int]) -> None:
    source, ordinal = everything(Interleave(quotas, 5))
    for number, quota in enumerate(quotas):
        assert [o for s, o in zip(source, ordinal, strict=True) if s == number] == list(range(quota))


@given(quotas_lists, st.data())
@settings(deadline=None, max_examples=60)
def test_slot_of_taken_and_locate_agree(quotas: list[int], data: st.DataObject) -> None:
    line = Interleave(quotas, 3)
    slot = data.draw(st.integers(0, line.slots - 1))
    source, ordinal = (int(each[0]) for each in line.locate(np.array([slot])))
    assert line.slot_of(source, ordinal) == slot
    assert line.taken(slot)[source] == ordinal
    assert sum(line.taken(slot)) == slot
    assert line.taken(line.slots) == quotas


def test_a_line_of_trillions_is_looked_at_anywhere_and_agrees_with_itself() -> None:
    quotas = [10**12 + 7, 3 * 10**11, 1, 123_456_789]
    line = Interleave(quotas, 1)
    for slot in (0, 4095, 4096, 10**9 + 1, line.slots // 3, line.slots - 1):
        source, ordinal = (int(each[0]) for each in line.locate(np.array([slot])))
        assert line.slot_of(source, ordinal) == slot
        assert line.taken(slot)[source] == ordinal
        assert line.taken(slot + 1)[source] == ordinal + 1


def test_blocks_of_the_longest_line_do_not_overflow() -> None:
    line = Interleave([LARGEST - 5, 5], 1)
    slots = np.arange(line.slots // 2, line.slots // 2 + 3 * BLOCK)
    source, ordinal = line.locate(slots)
    assert np.all(np.diff(ordinal[source == 0]) == 1)
    assert int(ordinal[0]) + sum(line.taken(int(slots[0]))[1:]) == int(slots[0])


@given(quotas_lists)
@settings(deadline=None, max_examples=40)
def test_a_prefix_of_whole_groups_is_within_one_item_of_its_share_for_each_source(quotas: list[int]) -> None:
    line = Interleave(quotas, 9)
    for slot in range(0, line.slots, SHUFFLED):
        for got, quota in zip(line.taken(slot), quotas, strict=True):
            # Half an item by its own rounding, and its share of half an item of each other source.
            share = Fraction(quota, line.slots)
            assert abs(got - share * slot) <= Fraction(1, 2) + share * Fraction(len(quotas) + 1, 2)


def test_a_source_does_not_fall_into_step_with_ranks() -> None:
    source, _ = everything(Interleave([4000, 4000], 2))
    for world in (2, 4, 8):
        for rank in range(world):
            share = source[rank::world].count(0) / len(source[rank::world])
            assert 0.4 < share < 0.6


def test_another_key_is_another_line_with_the_same_counts() -> None:
    first, second = (everything(Interleave([300, 200, 100], key))[0] for key in (1, 2))
    assert first != second
    assert sorted(first) == sorted(second)


def test_the_line_never_changes_silently() -> None:
    source, ordinal = everything(Interleave([7, 5, 4], 2026))
    assert source == GOLDEN_SOURCE
    assert ordinal == GOLDEN_ORDINAL


@pytest.mark.parametrize("quotas", [[], [0], [0, 0], [3, -1], [LARGEST, 1]])
def test_quotas_that_are_no_counts_are_refused(quotas: list[int]) -> None:
    with pytest.raises(ValueError, match="quotas must be counts"):
        Interleave(quotas, 1)


def test_slots_and_items_outside_the_line_are_refused() -> None:
    line = Interleave([3, 0], 1)
    for ask in (
        lambda: line.locate(np.array([3])),
        lambda: line.locate(np.array([-1])),
        lambda: line.taken(4),
        lambda: line.slot_of(0, 3),
        lambda: line.slot_of(1, 0),
    ):
        with pytest.raises(ValueError):
            ask()


@given(st.lists(st.fractions(0, 10, max_denominator=1000), min_size=1, max_size=8).filter(any), st.integers(0, 10**6))
def test_shares_add_up_and_each_is_within_one_of_exact(weights: list[Fraction], n: int) -> None:
    shares = apportion(weights, n)
    assert sum(shares) == n
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - weight * n / sum(weights)) < 1
        assert weight or not share


def test_shares_go_to_the_largest_remainders_and_ties_to_the_first() -> None:
    assert apportion([Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)], 7) == [3, 2, 2]
    assert apportion([Fraction(1)] * 3, 4) == [2, 1, 1]
    assert apportion([Fraction("0.1"), Fraction("0.2"), Fraction("0.7")], 10) == [1, 2, 7]


@pytest.mark.parametrize("weights", [[Fraction(0)], [Fraction(2), Fraction(-1)]])
def test_weights_that_are_negative_or_all_zero_are_refused(weights: list[Fraction]) -> None:
    with pytest.raises(ValueError, match="weights must be at least 0"):
        apportion(weights, 5)
