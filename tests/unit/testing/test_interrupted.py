"""`assert_exact`: what a user's test of a trainer says when it is right, when it is not, and when nothing was tried."""

import inspect
from pathlib import Path

import pytest

from tests.exact.chain_world import TOTAL as CHAIN_TOTAL
from tests.exact.chain_world import job as exact_job
from tests.exact.lane_world import Case
from tests.exact.small_gpt import Shape
from tests.unit.testing.trainers import TOTAL, never_saves, train
from unbroken import testing
from unbroken.testing import assert_exact, check_exact


def exact_training(directory: str) -> None:
    """A trainer whose bits do not depend on the number of ranks."""
    exact_job(directory, Case(shape=Shape(dropout=0.1)), 0)


@pytest.mark.promise("G1")
def test_a_trainer_that_registers_everything_is_exact(tmp_path: Path) -> None:
    found = assert_exact(train, tmp_path)
    assert found.is_exact and found.comparison is not None
    assert found.comparison.agreeing == TOTAL
    assert [job.partition(", ")[0] for job in found.jobs] == ["on 1 rank"] * 4
    assert [job.rpartition(", ")[2] for job in found.jobs] == [
        "killed at step 4",
        "killed in a save's phase manifest",
        "killed at step 8",
        "left alone to the end",
    ]
    assert any(found.resumed_steps[1:])


@pytest.mark.promise("G1")
def test_kills_stops_and_another_number_of_ranks_at_every_job(tmp_path: Path) -> None:
    found = assert_exact(exact_training, tmp_path, kills=[5], stops=[8], ranks=[2, 1, 3])
    assert found.comparison is not None and found.comparison.agreeing == CHAIN_TOTAL
    assert [job[:10] for job in found.jobs] == ["on 2 ranks", "on 1 rank,", "on 3 ranks"]


def test_a_loader_with_workers_can_be_tried(tmp_path: Path) -> None:
    assert assert_exact(train, tmp_path, "workers", kills=[7], save_steps=2).is_exact


def test_what_was_not_registered_is_reported_with_the_first_step_that_differs(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        assert_exact(train, tmp_path / "asserted", "scheduler forgotten", kills=[7], save_steps=2)
    found = check_exact(train, tmp_path / "checked", "scheduler forgotten", kills=[7], save_steps=2)
    assert found.is_deterministic and found.comparison is not None
    assert found.comparison.first is not None and found.comparison.first.metric == "loss"
    assert str(found.comparison.first.bits_b) in str(found), "what the assertion says"


def test_a_trainer_that_never_repeats_itself_is_distinguished_from_one_that_resumes_wrongly(tmp_path: Path) -> None:
    found = check_exact(train, tmp_path, "not deterministic", kills=[7], save_steps=2)
    assert not found.is_exact and not found.is_deterministic


def test_a_chain_in_which_no_job_resumed_proves_nothing(tmp_path: Path) -> None:
    found = check_exact(train, tmp_path, kills=[2], save_steps=100)
    assert found.comparison is not None and found.comparison.is_equal
    assert not found.is_exact


def test_of_the_usual_kills_one_more_comes_behind_the_first_commit_where_the_trainer_outran_it(tmp_path: Path) -> None:
    found = assert_exact(train, tmp_path, "", 2)
    assert [job.partition("from ")[2] for job in found.jobs] == [
        "step 0, killed at step 1",
        "step 0, killed in a save's phase manifest",
        "step 0, killed at step 1",
        "step 0, killed in a save's phase committed",
        "step 1, left alone to the end",
    ]


def test_a_chain_that_resumed_only_at_its_end_proves_nothing(tmp_path: Path) -> None:
    found = check_exact(train, tmp_path, kills=["committed"], save_steps=100)
    assert found.comparison is not None and found.comparison.is_equal
    assert found.resumed_steps[-1] == TOTAL and not found.is_exact


@pytest.mark.parametrize(
    ("bug", "kills", "said"),
    [
        ("fails", None, "the trainer's own error"),
        ("", [TOTAL + 1], str(TOTAL + 1)),
    ],
)
def test_a_job_that_does_not_end_as_planned_is_reported_with_its_log(
    tmp_path: Path, bug: str, kills: list[int | str] | None, said: str
) -> None:
    with pytest.raises(AssertionError) as raised:
        assert_exact(train, tmp_path, bug, kills=kills)
    assert said in str(raised.value) and "--- rank 0" in str(raised.value)


def test_a_trainer_that_leaves_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="saved no checkpoint"):
        assert_exact(never_saves, tmp_path)


def test_what_cannot_be_tried_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot be imported by another process"):
        assert_exact(lambda directory: None, tmp_path)
    with pytest.raises(ValueError, match="a save has no phase 'renmae'; it has edge, begin, parts"):
        assert_exact(train, tmp_path, kills=["renmae"])
    with pytest.raises(ValueError, match="ranks must be 1 or more"):
        assert_exact(train, tmp_path, ranks=0)
    (tmp_path / "undisturbed").mkdir()
    with pytest.raises(ValueError, match="a directory of its own"):
        assert_exact(train, tmp_path)


def test_the_assertion_is_called_like_the_check_and_reports_it() -> None:
    assert inspect.signature(assert_exact) == inspect.signature(check_exact)
    assert "kills" in inspect.signature(assert_exact).parameters
    assert assert_exact.__name__ == "assert_exact"
    assert (assert_exact.__doc__ or "").startswith("Assert that a trainer")


def test_every_public_name_is_there_and_an_unknown_one_is_not() -> None:
    assert {name for name in testing.__all__ if getattr(testing, name) is None} == set()
    assert dir(testing) == sorted(testing.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'assert_exactly'"):
        _ = testing.assert_exactly
