"""What follows a job under SLURM, and whether one starts at all: the table, case by case."""

import pytest

from unbroken.errors import PeerLost, RankRaised
from unbroken.launch.slurm.decide import (
    NoRequeue,
    Requeue,
    Step,
    after_end,
    before_start,
    stalled_jobs,
    starts_in_vain,
)
from unbroken.records.journal import Event, History
from unbroken.records.outcome import Outcome, Status, Verdict, conclude
from unbroken.records.process import Placement

COMMITTED = History((Event(4, "job-start", 0.0), Event(4, "resume", 0.0, {"step": 10}), Event(4, "commit", 0.0)))
WARNED, ENDED = Step(0, was_warned=True), Step(0, was_warned=False)


def _outcome(status: Status, verdict: Verdict, code: int = 0, job: int = 4) -> Outcome:
    return Outcome(status, code, verdict, "as told", 12, job)


def _after(outcome: Outcome | None, step: Step = ENDED, history: History = COMMITTED) -> Requeue | NoRequeue:
    return after_end(outcome, step, job_before=3, history=history)


@pytest.mark.promise("G10")
@pytest.mark.parametrize(
    ("status", "verdict", "code", "left_with"),
    [
        ("completed", "done", 0, 0),
        ("stopped", "again", 0, None),
        ("crashed", "again", 137, None),
        ("error", "again", 74, None),
        ("halted", "look", 4, 4),
        ("halted", "look", 6, 6),
        ("error", "look", 1, 1),
        ("error", "look", 8, 8),
        ("error", "held", 7, 7),
        ("running", "held", 7, 7),
    ],
)
@pytest.mark.parametrize("step", [WARNED, ENDED], ids=["warned", "by-itself"])
def test_only_again_is_queued_again(
    status: Status, verdict: Verdict, code: int, left_with: int | None, step: Step
) -> None:
    following = _after(_outcome(status, verdict, code), step)
    if left_with is None:
        assert isinstance(following, Requeue)
    else:
        assert isinstance(following, NoRequeue)
        assert following.exit_code == left_with


@pytest.mark.promise("U5")
def test_a_lost_rank_is_queued_again_and_an_exception_on_a_rank_is_not() -> None:
    lost = conclude(PeerLost(rank=0, symptom="Connection closed by peer", lost=1), step=12, job=4)
    assert isinstance(_after(lost, Step(1, was_warned=False)), Requeue)
    raised = RankRaised(
        rank=1, cause="ValueError: 1001", status="error", verdict="look", noticed_by=0, symptom="closed"
    )
    following = _after(conclude(raised, step=12, job=4), Step(1, was_warned=False))
    assert isinstance(following, NoRequeue) and "ValueError: 1001" in following.reason


def test_an_outcome_of_an_earlier_job_says_nothing_of_this_one() -> None:
    before = _outcome("stopped", "again", job=3)
    # A config that is refused before the run is taken would be queued for ever.
    assert _after(before, Step(2, was_warned=False)) == NoRequeue(2, "it exited with code 2 and never opened its run")
    assert _after(None, Step(0, was_warned=False)) == NoRequeue(1, "it exited with code 0 and never opened its run")
    assert isinstance(_after(before, Step(138, was_warned=True)), Requeue)
    assert isinstance(_after(None, Step(138, was_warned=True)), Requeue)


def test_who_asks_a_run_to_stop_finds_it_stopped() -> None:
    asked = History((*COMMITTED.events, Event(4, "stop", 0.0, {"by": "flag"})))
    assert isinstance(_after(_outcome("stopped", "again"), ENDED, asked), NoRequeue)
    assert isinstance(_after(_outcome("stopped", "again"), WARNED, asked), Requeue), "the warning takes the same way"
    due = History((*COMMITTED.events, Event(4, "stop", 0.0, {"by": "walltime"})))
    assert isinstance(_after(_outcome("stopped", "again"), ENDED, due), Requeue)


def test_three_jobs_without_a_commit_are_enough() -> None:
    facts = [*COMMITTED.events]
    for job in (5, 6):
        facts += [Event(job, "job-start", 0.0), Event(job, "resume", 0.0, {"step": 12})]
    crashed = _outcome("crashed", "again", 137, job=7)
    assert stalled_jobs(History(tuple(facts))) == 2
    assert isinstance(_after(crashed, ENDED, History(tuple(facts))), Requeue)
    facts += [Event(7, "job-start", 0.0), Event(7, "resume", 0.0, {"step": 12})]
    following = _after(crashed, ENDED, History(tuple(facts)))
    assert isinstance(following, NoRequeue)
    assert following.exit_code == 137


def test_jobs_that_only_dump_bring_the_run_further_and_are_queued_again() -> None:
    facts = [*COMMITTED.events]
    for job in (5, 6, 7):
        facts += [Event(job, "job-start", 0.0), Event(job, "emergency-resume", 0.0, {"step": job})]
    assert stalled_jobs(History(tuple(facts))) == 0
    assert isinstance(_after(_outcome("stopped", "again", job=7), WARNED, History(tuple(facts))), Requeue)


@pytest.mark.parametrize("outcome", [None, _outcome("stopped", "again", job=3)], ids=["new", "old"])
def test_a_job_whose_time_is_always_over_before_it_takes_its_run_is_not_queued_for_ever(
    outcome: Outcome | None,
) -> None:
    over = Step(138, was_warned=True)
    second = after_end(outcome, over, job_before=3, history=COMMITTED, in_vain=2)
    assert isinstance(second, Requeue) and second.in_vain == 2
    third = after_end(outcome, over, job_before=3, history=COMMITTED, in_vain=3)
    assert isinstance(third, NoRequeue) and third.exit_code == 138


def test_starts_in_vain_are_those_since_the_run_was_last_taken() -> None:
    placed = {"scheduler": "slurm", "id": "7", "requeues": 4, "nodes": None}
    history = History((Event(4, "job-start", 0.0, {"placement": placed}),))
    assert starts_in_vain(history, Placement("slurm", "7", 6), counted=2) == 2, "starts 5 and 6; the fourth took it"
    assert starts_in_vain(history, Placement("slurm", "8", 0), counted=0) == 1, "another job's starts are its own"
    assert starts_in_vain(history, Placement("slurm", "8", 1), counted=0) == 2
    assert starts_in_vain(history, Placement("slurm", "9", 0), counted=2) == 3, "a follower keeps counting"


@pytest.mark.parametrize("verdict", ["done", "again", "look"])
def test_a_user_who_submits_has_looked(verdict: Verdict) -> None:
    assert before_start(_outcome("error", verdict, 1), is_link=False) is None
    assert before_start(None, is_link=False) is None


def test_a_link_starts_only_what_is_to_continue() -> None:
    assert before_start(None, is_link=True) is None
    assert before_start(_outcome("crashed", "again", 137), is_link=True) is None
    assert before_start(_outcome("completed", "done"), is_link=True) == NoRequeue(0, "the run is done")
    looked = before_start(_outcome("halted", "look", 4), is_link=True)
    assert looked is not None and looked.exit_code == 4 and "as told" in looked.reason


@pytest.mark.parametrize("is_link", [True, False])
def test_a_run_that_is_held_is_not_started_by_anybody(is_link: bool) -> None:
    held = before_start(_outcome("running", "held", 7), is_link=is_link)
    assert held is not None and held.exit_code == 7
