"""Runs that are opened again and again in one process, over all ranks or some of them."""

from pathlib import Path

import pytest

from tests.distributed.many_world import again, many, subset, unsaved
from unbroken.records.layout import Layout
from unbroken.records.outcome import read_outcome
from unbroken.testing.worlds import logs, spawn

RUNS = 50


@pytest.mark.promise("U14")
@pytest.mark.parametrize("size", [1, 2])
def test_fifty_runs_in_one_process_leave_nothing_behind(tmp_path: Path, size: int) -> None:
    ended = spawn(size, many, str(tmp_path), RUNS)
    assert all(each.is_good for each in ended), logs(ended)
    for each in ended:
        first, last = (each.value[when].pop("counts") for when in ("first", "last"))
        # Each of the 44 runs between would have left one more.
        assert last["fd"] <= first["fd"] and last["task"] <= first["task"], (first, last)
        assert each.value["last"] == each.value["first"], logs(ended)
        assert each.value["last"]["handlers"] and each.value["last"]["hooks"] == 0
        assert each.value["last"]["groups"] == 1


@pytest.mark.promise("U14")
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_can_be_entered_again(tmp_path: Path, size: int) -> None:
    ended = spawn(size, again, str(tmp_path / "run"))
    assert all(each.is_good for each in ended), logs(ended)
    for each in ended:
        assert each.value == {"steps": [[0, 1], [], [2, 3, 4], [5]], "equal": True, "step": 5}, logs(ended)


@pytest.mark.promise("U14")
def test_entering_again_without_a_checkpoint_is_refused_once_the_state_has_moved(tmp_path: Path) -> None:
    ended = spawn(2, unsaved, str(tmp_path / "run"))
    assert all("already trained" in str(each.value) for each in ended), logs(ended)


def test_a_run_on_some_of_the_ranks_exchanges_nothing_with_the_others(tmp_path: Path) -> None:
    ended = spawn(3, subset, str(tmp_path / "run"), (1, 2))
    assert all(each.is_good for each in ended), logs(ended)
    assert "rank 0 is not in the process group" in ended[0].value["refused"]
    assert [each.value["steps"] for each in ended[1:]] == [[[0, 1], [2, 3]]] * 2
    outcome = read_outcome(Layout(tmp_path / "run"), now_s=0.0)
    assert outcome is not None and outcome.status == "completed"
