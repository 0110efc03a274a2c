"""The ranks of a job say the same at the same place, whoever fails."""

from typing import Any

import pytest

from tests.distributed.world_world import alone, speak, without_group
from unbroken.testing.worlds import logs, spawn


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What three ranks said."""
    ended = spawn(3, speak)
    assert all(each.is_good for each in ended), logs(ended)
    return [each.value for each in ended]


def of(told: list[dict[str, Any]], what: str) -> list[Any]:
    return [each[what] for each in told]


def test_every_rank_knows_its_number_and_receives_all(told: list[dict[str, Any]]) -> None:
    assert of(told, "who") == [(0, 3, True), (1, 3, False), (2, 3, False)]
    assert of(told, "gathered") == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3
    assert of(told, "heard") == ["rank 0"] * 3


def test_only_the_first_rank_receives_what_is_gathered_for_it(told: list[dict[str, Any]]) -> None:
    assert of(told, "to the first") == [["", "x" * 10_000, "x" * 20_000], [], []]
    assert of(told, "told the first") == [[0, 3, 6], [], []]
    others = ("RankFailed", 1, "not-an-item")
    assert of(told, "one fails the first") == [others, ("NotAnItem", None, None), others]


def test_each_rank_receives_what_the_first_has_for_it(told: list[dict[str, Any]]) -> None:
    assert of(told, "scattered") == ["for rank 0", "for rank 1", "for rank 2"]


def test_digests_that_differ_on_any_rank_are_found_by_all(told: list[dict[str, Any]]) -> None:
    assert of(told, "differing") == [[False, True, True]] * 3
    assert of(told, "any") == [(True, False)] * 3


def test_sums_wrap_around_as_integers_do(told: list[dict[str, Any]]) -> None:
    assert of(told, "sum") == [[3, 3 * 2**62 - 2**64]] * 3


def test_what_succeeds_everywhere_gives_each_rank_its_own_result(told: list[dict[str, Any]]) -> None:
    assert of(told, "all") == [0, 2, 4]
    assert of(told, "first") == [7, 7, 7]
    assert of(told, "others do not decide") == [0, 0, 0]


def test_what_fails_on_one_rank_fails_on_all_with_its_name(told: list[dict[str, Any]]) -> None:
    others = ("RankFailed", 1, "not-an-item")
    assert of(told, "one fails") == [others, ("NotAnItem", None, None), others]


def test_an_error_that_is_not_ours_reaches_all_too(told: list[dict[str, Any]]) -> None:
    others = ("RankFailed", 2, "internal-error")
    assert of(told, "one stumbles") == [others, others, ("ZeroDivisionError", None, None)]


def test_an_error_of_the_first_rank_reaches_every_rank(told: list[dict[str, Any]]) -> None:
    others = ("RankFailed", 0, "not-an-item")
    assert of(told, "the first refuses") == [("NotAnItem", None, None), others, others]
    others = ("RankFailed", 0, "internal-error")
    assert of(told, "the first stumbles") == [("ZeroDivisionError", None, None), others, others]


def test_when_all_fail_all_raise_the_same_one(told: list[dict[str, Any]]) -> None:
    others = ("RankFailed", 0, "internal-error")
    assert of(told, "all fail") == [("Bug", None, None), others, others]


def test_a_vote_has_what_any_rank_set_though_there_are_exchanges_in_between(told: list[dict[str, Any]]) -> None:
    assert of(told, "early") == [[True, False, True]] * 3
    assert of(told, "late") == [[False, True, False]] * 3
    assert of(told, "between") == [[0, 1, 2]] * 3


def test_a_thread_exchanges_beside_the_main_one_without_mixing(told: list[dict[str, Any]]) -> None:
    assert of(told, "beside") == [[[(n, 0), (n, 1), (n, 2)] for n in range(20)]] * 3
    assert of(told, "main") == [[[n] * 3 for n in range(20)]] * 3


def test_after_all_that_the_ranks_are_still_in_step(told: list[dict[str, Any]]) -> None:
    assert of(told, "still") == [[0, 1, 2]] * 3


def test_a_world_of_one_needs_no_group() -> None:
    (ended,) = spawn(1, alone)
    assert ended.value == {
        "group": True,
        "gathered": [1],
        "to the first": [2],
        "scattered": 3,
        "differing": [False],
        "vote": [True, False],
        "beside": True,
        "fails": ("NotAnItem", None, None),
    }, logs([ended])


def test_ranks_without_a_group_are_reported_before_each_takes_the_run_for_itself() -> None:
    ended = spawn(2, without_group)
    assert [each.value for each in ended] == ["2", "2"], logs(ended)
