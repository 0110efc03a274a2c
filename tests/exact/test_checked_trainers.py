"""The exactness checker on two trainers that are right; with a bug planted in the house each of them must turn red.

The bugs stand in ``tests/mutation/proof_table.py``: moments lost, generators set too early, the position in the data
off by one, the schedule begun anew, dropout that depends on the rank.
"""

from pathlib import Path

import pytest

from tests.exact.chain_world import job as exact_job
from tests.exact.lane_world import Case
from tests.exact.small_gpt import Shape
from tests.unit.testing.trainers import train
from unbroken.testing import assert_exact


def train_on_any_ranks(directory: str) -> None:
    """A trainer whose bits do not depend on the number of ranks, with dropout."""
    exact_job(directory, Case(shape=Shape(dropout=0.1)), 0)


@pytest.mark.promise("G1")
def test_a_trainer_that_is_killed_between_two_saves_is_exact(tmp_path: Path) -> None:
    found = assert_exact(train, tmp_path, kills=[7], save_steps=2)
    # A save is sure to be committed when the next one begins; both are inside an epoch.
    assert found.resumed_steps in ((0, 4), (0, 6))


@pytest.mark.promise("G1", "X1")
def test_a_trainer_with_dropout_that_resumes_with_more_ranks_is_exact(tmp_path: Path) -> None:
    found = assert_exact(train_on_any_ranks, tmp_path, stops=[5], ranks=[1, 2])
    assert found.comparison is not None and found.comparison.state is not None
    assert found.comparison.agreeing == found.comparison.steps == 12
