"""Restarts and verdicts: who starts again, and with which code the launcher leaves."""

import signal

import pytest

from unbroken.launch.outcome_file import JobOutcome
from unbroken.launch.restarts import LONGEST_DELAY_S, Again, Attempt, Enough, decide
from unbroken.launch.verdict import Ended, judge

STORAGE = JobOutcome("runs/a", "error", 74, "again", "storage failed")


def crash(step: int | None, code: int = 1, outcome: JobOutcome | None = None) -> Attempt:
    return Attempt(code, outcome, was_asked=False, resumable_step=step, is_run_known=True)


def after(*attempts: Attempt, max_restarts: int = 9) -> Again | Enough:
    return decide(attempts, max_restarts=max_restarts, first_delay_s=1.0)


@pytest.mark.parametrize(
    ("outcome", "code", "restarts"),
    [
        (None, 1, True),
        (None, 137, True),
        (None, 0, False),
        (None, 2, False),
        (JobOutcome("r", "running", 1, "again", ""), 137, True),
        (STORAGE, 74, True),
        (JobOutcome("r", "error", 1, "look", "RuntimeError: connection reset by peer"), 1, True),
        (JobOutcome("r", "error", 3, "look", "damaged"), 3, False),
        (JobOutcome("r", "stopped", 130, "again", "interrupted"), 130, False),
        (JobOutcome("r", "stopped", 0, "again", "walltime"), 0, False),
        (JobOutcome("r", "completed", 0, "done", ""), 0, False),
        (JobOutcome("r", "halted", 4, "look", ""), 4, False),
        (JobOutcome("r", "error", 7, "held", ""), 7, False),
    ],
)
def test_only_what_another_start_may_mend_is_started_again(
    outcome: JobOutcome | None, code: int, restarts: bool
) -> None:
    assert isinstance(after(crash(3, code, outcome)), Again) == restarts


def test_a_job_that_was_asked_to_stop_is_not_started_again() -> None:
    assert after(Attempt(143, None, was_asked=True, resumable_step=3, is_run_known=True)) == Enough()


def test_restarts_are_bounded() -> None:
    assert after(crash(1), max_restarts=0) == Enough()
    assert after(crash(1), crash(2), max_restarts=2) == Again(1.0)
    assert after(crash(1), crash(2), crash(3), max_restarts=2) == Enough("2 of 2 restarts are spent")


def test_a_run_that_gets_no_further_is_given_up_after_three_restarts() -> None:
    assert after(crash(5), crash(7), crash(7), crash(7)) == Again(4.0)
    stuck = after(crash(5), crash(7), crash(7), crash(7), crash(7))
    assert stuck == Enough("no progress in 3 restarts: the run still resumes from step 7")
    empty = after(*[crash(None)] * 4)
    assert empty == Enough("no progress in 3 restarts: the run still has no usable checkpoint")


def test_a_run_that_falls_back_makes_no_progress() -> None:
    assert isinstance(after(crash(9), crash(8), crash(8), crash(8)), Enough)


def test_of_an_unknown_run_nobody_says_that_it_is_stuck() -> None:
    unknown = Attempt(1, None, was_asked=False, resumable_step=None, is_run_known=False)
    assert isinstance(after(*[unknown] * 9), Again)


def test_the_delay_doubles_while_nothing_is_gained_and_starts_anew_with_progress() -> None:
    unknown = Attempt(1, None, was_asked=False, resumable_step=None, is_run_known=False)
    delays = [after(*[unknown] * n, max_restarts=20) for n in range(1, 10)]
    assert delays[:4] == [Again(1.0), Again(2.0), Again(4.0), Again(8.0)] and delays[-1] == Again(LONGEST_DELAY_S)
    assert after(crash(5), crash(5), crash(6)) == Again(1.0)


def code_of(ended: Ended, outcome: JobOutcome | None = None, *, torchrun: bool = False, stopped: int = 0) -> int:
    return judge(ended, outcome, through_torchrun=torchrun, stopped_exit_code=stopped).exit_code


def test_the_outcome_decides_whatever_the_process_says() -> None:
    assert code_of(Ended(1), STORAGE, torchrun=True) == 74
    assert code_of(Ended(-9), JobOutcome("r", "completed", 0, "done", "")) == 0


def test_what_broke_after_a_run_was_complete_is_said() -> None:
    completed = JobOutcome("r", "completed", 0, "done", "")
    for returncode, said in ((3, "exit code 3"), (-11, "SIGSEGV")):
        verdict = judge(Ended(returncode), completed, through_torchrun=False, stopped_exit_code=0)
        assert verdict.line == f"completed; what came after it ended badly: {said}"
    assert judge(Ended(0), completed, through_torchrun=False, stopped_exit_code=0).line == "completed"


def test_a_clean_stop_and_nothing_else_gets_the_code_asked_for() -> None:
    assert code_of(Ended(0), JobOutcome("r", "stopped", 0, "again", ""), stopped=75) == 75
    assert code_of(Ended(0), JobOutcome("r", "completed", 0, "done", ""), stopped=75) == 0
    assert code_of(Ended(1), STORAGE, stopped=75) == 74
    assert code_of(Ended(0), stopped=75) == 0


def test_without_an_outcome_the_process_decides() -> None:
    begun = JobOutcome("runs/a", "running", 0, "again", "")
    for outcome in (None, begun):
        assert code_of(Ended(5), outcome) == 5
        assert code_of(Ended(-9), outcome) == 137
        assert code_of(Ended(-64), outcome) == 192
    assert judge(Ended(5), begun, through_torchrun=False, stopped_exit_code=0).run == "runs/a"


def test_a_rank_that_ended_without_a_word_under_torchrun_counts_as_killed() -> None:
    begun = JobOutcome("runs/a", "running", 0, "held", "")
    assert code_of(Ended(1), begun, torchrun=True) == 137
    assert code_of(Ended(1), begun) == 1
    assert code_of(Ended(1), None, torchrun=True) == 1


def test_torchruns_one_after_a_signal_is_that_signals_code() -> None:
    assert code_of(Ended(1, signal.SIGUSR1), torchrun=True) == 128 + signal.SIGUSR1
    assert code_of(Ended(1, signal.SIGUSR1)) == 1
    assert code_of(Ended(1), torchrun=True) == 1


def test_two_interrupts_are_130_whatever_was_told() -> None:
    ended = Ended(-9, signal.SIGINT, was_interrupted_twice=True)
    assert code_of(ended, JobOutcome("r", "stopped", 0, "again", "")) == 130
