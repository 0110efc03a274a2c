"""A leg in terms of one script: the step, the save, the pace."""

from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.prove.baseline import Baseline
from unbroken.prove.chain import drill_for, in_words, step_of
from unbroken.prove.fault_schedule import FAULTS, plan_chain
from unbroken.records.drill import Fault

QUICK = Baseline(Path("run"), steps=100, seconds=0.1, step_s=0.001, ranks=2, checkpoint_bytes=1000)
SLOW = replace(QUICK, seconds=500.0, step_s=5.0)
LEG = replace(
    plan_chain(1, 1, ("kill",), ())[0], at=0.5, pause=0.5, phase="manifest", rank=3, trouble=None, damage=None
)


def test_a_run_is_saved_about_a_dozen_times() -> None:
    assert QUICK.save_steps == 8
    assert replace(QUICK, steps=4).save_steps == 1


@pytest.mark.parametrize(("at", "begin", "step"), [(0.5, 0, 50), (0.5, 60, 61), (0.0, 0, 1), (0.99, 99, 99)])
def test_a_leg_ends_behind_where_it_began_and_before_the_last_step(at: float, begin: int, step: int) -> None:
    assert step_of(replace(LEG, at=at), QUICK, begin) == step


def test_a_kill_in_a_save_strikes_the_save_next_to_its_step_and_never_lets_the_job_reach_the_end() -> None:
    drill = drill_for(replace(LEG, ending="save"), QUICK, begin=16, ranks=2)
    assert drill.faults == (Fault("manifest", "kill", when=4, rank=0),)
    assert drill.stop_at == 50 + 4 * 8
    last = drill_for(replace(LEG, ending="save", at=0.79), QUICK, begin=72, ranks=2)
    assert last.stop_at == 99


def test_parts_are_written_by_every_rank_so_any_of_them_is_killed() -> None:
    drill = drill_for(replace(LEG, ending="save", phase="parts"), QUICK, begin=0, ranks=2)
    assert [fault.rank for fault in drill.faults] == [1]


def test_a_quick_script_is_held_up_where_it_is_to_end_and_a_slow_one_is_not() -> None:
    held = drill_for(replace(LEG, ending="kill"), QUICK, begin=20, ranks=1)
    assert [(fault.at, fault.do, fault.when, fault.rank) for fault in held.faults] == [("edge", "delay", 30, None)]
    assert drill_for(replace(LEG, ending="kill"), SLOW, begin=20, ranks=1).faults == ()


def test_a_rank_is_killed_in_the_middle_of_a_step() -> None:
    drill = drill_for(replace(LEG, ending="rank"), SLOW, begin=20, ranks=2)
    assert drill.faults[0] == Fault("edge", "kill", when=30, rank=1, seconds=2.5)


def test_a_write_is_refused_in_an_earlier_save_than_the_one_that_is_killed() -> None:
    planned = replace(LEG, ending="save", trouble="error", refused_at="rename", refusal="eio")
    refused, killed = drill_for(planned, QUICK, begin=0, ranks=1).faults
    assert (refused.do, refused.at, refused.when) == ("eio", "rename", 5)
    assert (killed.do, killed.when) == ("kill", 6)
    assert (in_words(refused), in_words(killed)) == ("EIO at rename", "killed in a save, at manifest")


def test_a_delay_is_not_reported_as_a_fault() -> None:
    held, slow = Fault("edge", "delay", seconds=1.0), Fault("parts", "delay", seconds=1.0)
    assert (in_words(held), in_words(slow), in_words(Fault("edge", "kill"))) == (
        None,
        "slow storage",
        "one rank killed",
    )


@pytest.mark.parametrize("seed", range(30))
def test_every_leg_of_every_schedule_makes_a_drill(seed: int) -> None:
    for planned in plan_chain(seed, 1 + seed, tuple(FAULTS), (1, 2, 3)):
        for begin in (0, 1, 50, 98, 99):
            drill = drill_for(planned, QUICK, begin=begin, ranks=planned.ranks or 1)
            assert drill.stop_at is None or begin < drill.stop_at < QUICK.steps
            assert all(fault.rank is None or 0 <= fault.rank < (planned.ranks or 1) for fault in drill.faults)
