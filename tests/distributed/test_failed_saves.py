"""A state that cannot be taken at one step is a save that failed: reported with its rank, and training continues."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_faults import good, history, steps_kept, told_by
from tests.distributed.training_world import Job, exact, train
from unbroken import errors
from unbroken.records.layout import Layout
from unbroken.testing.worlds import logs, spawn

CAUSES = {
    "no memory": "no-memory",
    "pickle": "needs-pickle",
    "sparse": "tensor-unsupported",
    "counter": "needs-pickle",
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Worlds of one and of three ranks whose saves all succeed."""
    root = tmp_path_factory.mktemp("undisturbed")
    return {size: good(spawn(size, train, Job(f"{root}/{size}"))) for size in (1, 3)}


# The first rank, which writes the records, fails in one way; another rank and one that is alone in all ways.
@pytest.mark.parametrize(
    ("size", "victim", "what"), [(3, 0, "pickle"), *((size, size - 1, what) for size in (1, 3) for what in CAUSES)]
)
def test_a_state_that_one_rank_cannot_take_is_reported_and_the_next_save_commits(
    tmp_path: Path, undisturbed: dict[int, list[dict[str, Any]]], size: int, victim: int, what: str
) -> None:
    run = tmp_path / "run"
    results = good(spawn(size, train, Job(str(run), victims=(victim,), at_step=4, what=what)))
    assert [exact(each) for each in results] == [exact(each) for each in undisturbed[size]]
    (failed,) = history(run).of_kind("save-failed")
    assert (failed.values["step"], failed.values["rank"], failed.values["cause"]) == (4, victim, CAUSES[what])
    assert [fact.values["step"] for fact in history(run).of_kind("commit")] == [2, 6, 8]
    assert steps_kept(run) == {2, 6, 8}
    went_on = good(spawn(size, train, Job(str(run), total=10)))
    whole = good(spawn(size, train, Job(str(tmp_path / "whole"), total=10)))
    assert [exact(each) for each in went_on] == [exact(each) for each in whole]


@pytest.mark.parametrize("what", ["no memory", "pickle"])
def test_the_hint_stays_where_it_was_while_saves_fail(tmp_path: Path, what: str) -> None:
    run = tmp_path / "run"
    ended = spawn(3, train, Job(str(run), victims=(1,), at_step=4, what=what, total=4))
    told_by(ended, CAUSES[what], rank=1)
    assert (Layout(run).checkpoints / "latest").readlink() == Path("checkpoint-2")
    assert steps_kept(run) == {2}


def test_an_error_of_an_objects_own_in_a_save_ends_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = spawn(3, train, Job(str(run), victims=(1,), at_step=4, what="raise in a save"))
    assert not any(each.is_late or each.is_good for each in ended), logs(ended)
    assert isinstance(ended[1].error, ZeroDivisionError)
    assert all(isinstance(ended[rank].error, errors.RankFailed) for rank in (0, 2)), logs(ended)
    assert steps_kept(run) == {2}


def test_a_first_save_that_one_rank_cannot_copy_is_given_up_by_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    good(spawn(2, train, Job(str(run), victims=(1,), at_step=2, what="no memory", total=6)))
    assert [fact.values["step"] for fact in history(run).of_kind("commit")] == [4, 6]
