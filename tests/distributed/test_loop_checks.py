"""LoopChecks of loops on several ranks: left early by all or by one, finished by one, one step per micro-batch."""

import json
from pathlib import Path

import pytest

from tests.distributed.loop_checks_world import accumulate, finish_on_one, leave
from unbroken.testing.worlds import logs, spawn


def values(ended: list) -> list:  # type: ignore[type-arg]
    assert all(each.is_good for each in ended), logs(ended)
    return [each.value for each in ended]


@pytest.mark.promise("U1")
def test_all_ranks_leave_the_loop_and_the_completed_step_is_saved(tmp_path: Path) -> None:
    assert values(spawn(2, leave, str(tmp_path / "run"), (0, 1))) == [("left", 5), ("left", 5)]
    state = json.loads((tmp_path / "run" / "checkpoints" / "final" / "trainer_state.json").read_text())
    assert state["step"] == 5


@pytest.mark.promise("U1")
def test_one_rank_that_leaves_alone_is_reported_to_all_and_no_rank_hangs(tmp_path: Path) -> None:
    ended = values(spawn(2, leave, str(tmp_path / "run"), (1,)))
    assert [kind for kind, _ in ended] == ["loops-disagree", "loops-disagree"]
    assert not (tmp_path / "run" / "checkpoints" / "final").exists()


@pytest.mark.promise("U1")
def test_one_rank_finishes_the_run_and_all_end_at_the_same_step(tmp_path: Path) -> None:
    assert values(spawn(2, finish_on_one, str(tmp_path / "run"))) == [6, 6]
    assert (tmp_path / "run" / "checkpoints" / "final").exists()


@pytest.mark.promise("U3")
@pytest.mark.parametrize("stop_at", [6, 7])
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_stop_between_two_optimizer_steps_keeps_the_bits(tmp_path: Path, how: str, stop_at: int) -> None:
    whole = values(spawn(2, accumulate, str(tmp_path / "whole"), how, None))
    values(spawn(2, accumulate, str(tmp_path / "run"), how, stop_at))
    assert values(spawn(2, accumulate, str(tmp_path / "run"), how, None)) == whole
