"""The ranks of a job say the same at the same place, whoever fails."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.world_world import alone, speak
from unbroken.errors import NoProcessGroup
from unbroken.testing.worlds import logs, spawn
from unbroken.world import World


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What three ranks said."""
    ended = spawn(3, speak)
    assert all(each.is_good for each in ended), logs(ended)
    return [each.value for each in ended]


def of(results: list[dict[str, Any]], what: str) -> list[Any]:
    return [each[what] for each in results]


def test_every_rank_knows_its_number_and_receives_all(results: list[dict[str, Any]]) -> None:
    assert of(results, "who") == [(0, 3, True), (1, 3, False), (2, 3, False)]
    assert of(results, "gathered") == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3
    assert of(results, "heard") == ["rank 0"] * 3


def test_only_the_first_rank_receives_what_is_gathered_for_it(results: list[dict[str, Any]]) -> None:
    assert of(results, "to the first") == [["", "x" * 10_000, "x" * 20_000], [], []]
    assert of(results, "told the first") == [[0, 3, 6], [], []]
    others = ("RankFailed", 1, "not-an-item")
    assert of(results, "one fails the first") == [others, ("NotAnItem", None, None), others]


def test_each_rank_receives_what_the_first_has_for_it(results: list[dict[str, Any]]) -> None:
    assert of(results, "scattered") == ["for rank 0", "for rank 1", "for rank 2"]


def test_digests_that_differ_on_any_rank_are_found_by_all(results: list[dict[str, Any]]) -> None:
    assert of(results, "differing") == [[False, True, True]] * 3
    assert of(results, "any") == [(True, False)] * 3


def test_sums_wrap_around_as_integers_do(results: list[dict[str, Any]]) -> None:
    assert of(results, "sum") == [[3, 3 * 2**62 - 2**64]] * 3


def test_what_succeeds_everywhere_gives_each_rank_its_own_result(results: list[dict[str, Any]]) -> None:
    assert of(results, "all") == [0, 2, 4]
    assert of(results, "first") == [7, 7, 7]
    assert of(results, "others do not decide") == [0, 0, 0]


def test_what_fails_on_one_rank_fails_on_all_with_its_name(results: list[dict[str, Any]]) -> None:
    others = ("RankFailed", 1, "not-an-item")
    assert of(results, "one fails") == [others, ("NotAnItem", None, None), others]


def test_an_error_that_is_not_ours_reaches_all_too(results: list[dict[str, Any]]) -> None:
    others = ("RankFailed", 2, "internal-error")
    assert of(results, "one stumbles") == [others, others, ("ZeroDivisionError", None, None)]


def test_an_error_of_the_first_rank_reaches_every_rank(results: list[dict[str, Any]]) -> None:
    others = ("RankFailed", 0, "not-an-item")
    assert of(results, "the first refuses") == [("NotAnItem", None, None), others, others]
    others = ("RankFailed", 0, "internal-error")
    assert of(results, "the first stumbles") == [("ZeroDivisionError", None, None), others, others]


def test_when_all_fail_all_raise_the_same_one(results: list[dict[str, Any]]) -> None:
    others = ("RankFailed", 0, "internal-error")
    assert of(results, "all fail") == [("Bug", None, None), others, others]


def test_a_vote_has_what_any_rank_set_though_there_are_exchanges_in_between(results: list[dict[str, Any]]) -> None:
    assert of(results, "early") == [[True, False, True]] * 3
    assert of(results, "late") == [[False, True, False]] * 3
    assert of(results, "between") == [[0, 1, 2]] * 3


def test_a_thread_exchanges_beside_the_main_one_without_mixing(results: list[dict[str, Any]]) -> None:
    assert of(results, "beside") == [[[(n, 0), (n, 1), (n, 2)] for n in range(20)]] * 3
    assert of(results, "main") == [[[n] * 3 for n in range(20)]] * 3


def test_after_all_that_the_ranks_are_still_in_step(results: list[dict[str, Any]]) -> None:
    assert of(results, "still") == [[0, 1, 2]] * 3


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


def test_ranks_without_a_group_are_reported_before_each_takes_the_run_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NoProcessGroup) as refused:
        World.current()
    assert refused.value.world_size == 2


def test_a_rank_may_end_before_its_last_vote_is_answered(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.distributed.leaving_world", str(tmp_path)]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen([*command, "0"], stdin=pipe, stdout=pipe) as answers,
        subprocess.Popen([*command, "1"], stdin=pipe, stdout=pipe, stderr=pipe) as leaves,
    ):
        assert leaves.stdout is not None
        ends = leaves.stdout.readline()
        assert answers.communicate(b".")[0] == b"1\n", "the vote of the rank that left counts"
        said = leaves.communicate(b".")[1].decode()
    assert (ends, leaves.returncode, answers.returncode) == (b"ending\n", 0, 0), said
