"""Restarts and verdicts: who starts again, and with which code the launcher leaves."""

import signal

import pytest

from unbroken.launch.exit_code import JobExit, exit_report
from unbroken.launch.job_files import JobOutcome
from unbroken.launch.restarts import LONGEST_DELAY_S, Attempt, NoRestart, Restart, RestartPolicy, decide

STORAGE = JobOutcome("runs/a", "error", 74, "again", "storage failed")


def crash(step: int | None, code: int = 1, outcome: JobOutcome | None = None, *, reached: int | None = None) -> Attempt:
    return Attempt(code, outcome, was_asked=False, resumable_step=step, is_run_known=True, reached=reached)


def after(*attempts: Attempt, max_restarts: int = 9) -> Restart | NoRestart:
    return decide(attempts, RestartPolicy(max_restarts))


def stopped(by: str | None, step: int = 5) -> Attempt:
    """A clean stop, for a reason of this kind."""
    outcome = JobOutcome("r", "stopped", 0, "again", "")
    return Attempt(0, outcome, was_asked=False, resumable_step=step, is_run_known=True, stopped_by=by)


def until_done(*attempts: Attempt, max_restarts: int | None = None, in_allocation: bool = False) -> Restart | NoRestart:
    return decide(attempts, RestartPolicy(max_restarts, until_done=True, is_in_allocation=in_allocation))


@pytest.mark.parametrize(
    ("outcome", "code", "restarts"),
    [
        (None, 1, True),
        (None, 137, True),
        (None, 0, False),
        (None, 2, False),
        (JobOutcome("r", "running", 1, "again", ""), 137, True),
        (STORAGE, 74, True),
        (JobOutcome("r", "error", 1, "look", "rank-raised: ValueError: the label is 1001 of 1000"), 1, False),
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
    assert isinstance(after(crash(3, code, outcome)), Restart) == restarts


def test_a_job_that_was_asked_to_stop_is_not_started_again() -> None:
    assert after(Attempt(143, None, was_asked=True, resumable_step=3, is_run_known=True)) == NoRestart()


def test_restarts_are_bounded() -> None:
    assert after(crash(1), max_restarts=0) == NoRestart()
    assert after(crash(1), crash(2), max_restarts=2) == Restart(1.0)
    assert after(crash(1), crash(2), crash(3), max_restarts=2) == NoRestart("all 2 restarts used")


def test_a_run_that_gets_no_further_is_given_up_after_three_restarts() -> None:
    assert after(crash(5), crash(7), crash(7), crash(7)) == Restart(4.0)
    stuck = after(crash(5), crash(7), crash(7), crash(7), crash(7))
    assert stuck == NoRestart("no progress after 3 restarts: the run still resumes from step 7")
    empty = after(*[crash(None)] * 4)
    assert empty == NoRestart("no progress after 3 restarts: the run still has no usable checkpoint")


def test_a_run_that_falls_back_makes_no_progress() -> None:
    assert isinstance(after(crash(9), crash(8), crash(8), crash(8)), NoRestart)


def test_an_unknown_run_is_not_reported_as_stuck() -> None:
    unknown = Attempt(1, None, was_asked=False, resumable_step=None, is_run_known=False)
    assert isinstance(after(*[unknown] * 9), Restart)


def test_the_delay_doubles_while_nothing_is_gained_and_starts_again_with_progress() -> None:
    unknown = Attempt(1, None, was_asked=False, resumable_step=None, is_run_known=False)
    delays = [after(*[unknown] * n, max_restarts=20) for n in range(1, 10)]
    assert delays[:4] == [Restart(1.0), Restart(2.0), Restart(4.0), Restart(8.0)] and delays[-1] == Restart(
        LONGEST_DELAY_S
    )
    assert after(crash(5), crash(5), crash(6)) == Restart(1.0)


@pytest.mark.parametrize("reached", [12, 1_203])
def test_a_step_that_every_job_died_in_is_named(reached: int) -> None:
    stuck = after(*[crash(5, 137, reached=reached)] * 4)
    assert isinstance(stuck, NoRestart) and stuck.reason is not None
    assert stuck.reason.startswith(f"3 restarts in a row failed at step {reached + 1:,};")
    assert stuck.reason.endswith("the run resumes from step 5")


def test_jobs_that_died_in_different_steps_blame_none() -> None:
    stuck = after(*[crash(5, 137, reached=reached) for reached in (9, 8, 9, 6)])
    said = "no progress after 3 restarts: the run still resumes from step 5; last completed steps: 9, 8, 9 and 6"
    assert stuck == NoRestart(said)
    one_unknown = after(crash(5), *[crash(5, 137, reached=9)] * 3)
    assert isinstance(one_unknown, NoRestart) and "failed at" not in str(one_unknown.reason)


@pytest.mark.parametrize(
    ("attempt", "restarts"),
    [
        (stopped("walltime"), True),
        (stopped("asked"), True),
        (stopped("signal"), False),
        (stopped("flag"), False),
        (stopped("spot"), False),
        (stopped(None), False),
        (crash(5, 137), True),
        (crash(5, 2), False),
        (crash(5, 0), False),
        (crash(5, 74, STORAGE), True),
        (crash(5, 1, JobOutcome("r", "error", 1, "again", "peer-lost")), True),
        (crash(5, 1, JobOutcome("r", "error", 1, "look", "ValueError: boom")), False),
        (crash(5, 4, JobOutcome("r", "halted", 4, "look", "")), False),
        (crash(5, 7, JobOutcome("r", "error", 7, "held", "")), False),
        (crash(5, 0, JobOutcome("r", "completed", 0, "done", "")), False),
    ],
)
def test_until_done_the_class_decides_and_a_requested_stop_ends_it(attempt: Attempt, restarts: bool) -> None:
    assert isinstance(until_done(attempt), Restart) == restarts


def test_inside_an_allocation_a_job_whose_time_is_over_is_left_to_the_scheduler() -> None:
    assert until_done(stopped("walltime"), in_allocation=True) == NoRestart()
    assert until_done(crash(5, 137), in_allocation=True) == Restart(1.0)


def test_until_done_there_is_no_limit_while_the_run_gets_further_and_no_endless_loop_while_it_does_not() -> None:
    assert until_done(*[stopped("walltime", step) for step in range(50)]) == Restart(1.0)
    assert isinstance(until_done(*[stopped("walltime", 7)] * 4), NoRestart)
    nameless = Attempt(1, None, was_asked=False, resumable_step=None, is_run_known=False)
    assert until_done(*[nameless] * 4) == NoRestart("no progress after 3 restarts: no job opened its run")
    assert until_done(*[stopped("walltime", step) for step in range(3)], max_restarts=2) == NoRestart(
        "all 2 restarts used"
    )


def code_of(ended: JobExit, outcome: JobOutcome | None = None, *, stopped: int = 0) -> int:
    return exit_report(ended, outcome, stopped_exit_code=stopped).exit_code


def test_the_outcome_decides_whatever_the_process_says() -> None:
    assert code_of(JobExit(1), STORAGE) == 74
    assert code_of(JobExit(-9), JobOutcome("r", "completed", 0, "done", "")) == 0


def test_what_broke_after_a_run_was_complete_is_reported() -> None:
    completed = JobOutcome("r", "completed", 0, "done", "")
    for returncode, said in ((3, "exit code 3"), (-11, "SIGSEGV")):
        report = exit_report(JobExit(returncode), completed, stopped_exit_code=0)
        assert report.line == f"completed; but the script failed afterwards: {said}"
    assert exit_report(JobExit(0), completed, stopped_exit_code=0).line == "completed"


def test_a_clean_stop_and_nothing_else_gets_the_code_requested() -> None:
    assert code_of(JobExit(0), JobOutcome("r", "stopped", 0, "again", ""), stopped=75) == 75
    assert code_of(JobExit(0), JobOutcome("r", "completed", 0, "done", ""), stopped=75) == 0
    assert code_of(JobExit(1), STORAGE, stopped=75) == 74
    assert code_of(JobExit(0), stopped=75) == 0


def test_without_an_outcome_the_process_decides() -> None:
    begun = JobOutcome("runs/a", "running", 0, "again", "")
    for outcome in (None, begun):
        assert code_of(JobExit(5), outcome) == 5
        assert code_of(JobExit(-9), outcome) == 137
        assert code_of(JobExit(-64), outcome) == 192
    assert exit_report(JobExit(5), begun, stopped_exit_code=0).run == "runs/a"


def test_a_code_above_128_is_reported_as_the_signal_it_stands_for() -> None:
    begun = JobOutcome("runs/a", "running", 0, "held", "")
    assert exit_report(JobExit(137), begun, stopped_exit_code=0).line.endswith(
        "was killed by SIGKILL after it opened its run and reported no outcome"
    )
    assert exit_report(JobExit(250), begun, stopped_exit_code=0).line.endswith(
        "exited after it opened its run and reported no outcome"
    )
    assert code_of(JobExit(1), begun) == 1, "nobody guesses what a rank that says 1 died of"
    assert code_of(JobExit(1, signal.SIGUSR1)) == 1


def test_two_interrupts_are_130_whatever_was_reported() -> None:
    ended = JobExit(-9, signal.SIGINT, was_interrupted_twice=True)
    assert code_of(ended, JobOutcome("r", "stopped", 0, "again", "")) == 130
