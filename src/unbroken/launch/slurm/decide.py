"""Whether a SLURM job starts its step, and whether it is requeued: pure decisions from the records of the run."""

from dataclasses import dataclass
from typing import Final

from unbroken.quoting import amounts
from unbroken.records.journal import History
from unbroken.records.outcome import EXIT_HELD, Outcome
from unbroken.records.process import Placement, placements

NO_PROGRESS_JOBS: Final = 3
# A job with too little time commits nothing but dumps; the next job makes a checkpoint of the dumps.
_PROGRESS: Final = ("commit", "emergency-resume")
_EXIT_UNKNOWN: Final = 1


@dataclass(frozen=True)
class Step:
    """How the step of a job ended: its exit code, and whether SLURM had signalled it before."""

    code: int
    was_warned: bool


@dataclass(frozen=True)
class Requeue:
    """Requeue the job; ``in_vain`` counts the starts in a row that never opened their run."""

    reason: str
    in_vain: int = 0


@dataclass(frozen=True)
class NoRequeue:
    """Do not requeue; the job exits with this code."""

    exit_code: int
    reason: str


def before_start(outcome: Outcome | None, *, is_link: bool) -> NoRequeue | None:
    """Whether a job must not start its step, from how the job before it ended; None lets it start.

    Submitting a job by hand means that the user has looked at the run; a link of a chain or a requeued job does not.
    """
    if outcome is None:
        return None
    if outcome.verdict == "held":
        return NoRequeue(EXIT_HELD, f"another job is running: {outcome.reason}")
    if not is_link or outcome.verdict == "again":
        return None
    if outcome.verdict == "done":
        return NoRequeue(0, "the run is done")
    return NoRequeue(_code(outcome), f"the run needs your attention: {outcome.status}: {outcome.reason}")


def after_end(
    outcome: Outcome | None, step: Step, *, job_before: int, history: History, in_vain: int = 1
) -> Requeue | NoRequeue:
    """Whether the job is requeued: only for an outcome of class ``again``.

    ``job_before`` is the last job of the run before this one started: an outcome that is not newer is not that of this
    job. Then ``in_vain`` counts: this many starts in a row, including this one, never opened their run.
    """
    if outcome is None or outcome.job is None or outcome.job <= job_before:
        if step.was_warned and in_vain < NO_PROGRESS_JOBS:
            return Requeue("its walltime limit was reached before it opened its run", in_vain)
        if step.was_warned:
            remedy = "increase --time, or see what it waits for"
            return NoRequeue(step.code or _EXIT_UNKNOWN, f"{in_vain} starts in a row never opened their run; {remedy}")
        return NoRequeue(step.code or _EXIT_UNKNOWN, f"it exited with code {step.code} and never opened its run")
    if outcome.verdict == "done":
        return NoRequeue(0, f"the run is done: {outcome.reason}")
    if outcome.verdict != "again":
        return NoRequeue(_code(outcome), f"it needs your attention: {outcome.status}: {outcome.reason}")
    stop = history.last("stop", job=outcome.job)
    if not step.was_warned and outcome.status == "stopped" and stop is not None and stop.text("by") == "flag":
        return NoRequeue(outcome.exit_code, "stop requested by `unbroken stop`; submit it again to resume")
    if (stalled := stalled_jobs(history)) >= NO_PROGRESS_JOBS:
        return NoRequeue(_code(outcome), _in_vain(history, stalled, outcome))
    return Requeue(f"{outcome.status}: {outcome.reason}")


def starts_in_vain(history: History, placed: Placement | None, counted: int) -> int:
    """The number of starts in a row, including this one, that never opened their run; ``counted`` is the count before.

    A requeued job keeps its id and SLURM counts its starts; a job submitted instead has a new id and gets the count as
    an option.
    """
    requeues = 0 if placed is None else placed.requeues
    taken = [each.requeues for _, each in placements(history.events) if placed is not None and each.id == placed.id]
    return requeues - max(taken) if taken else counted + requeues + 1


def stalled_jobs(history: History) -> int:
    """The number of jobs in a row, up to the last, without a new checkpoint, committed or from dumps."""
    count = 0
    for job in reversed(history.jobs):
        if any(history.last(kind, job=job) is not None for kind in _PROGRESS):
            break
        count += 1
    return count


def _in_vain(history: History, stalled: int, outcome: Outcome) -> str:
    resumed = history.last("resume", job=outcome.job)
    step = resumed.whole("step") if resumed is not None else None
    where = "" if step is None else f"; the run is still at step {amounts.count(step)}"
    return f"{stalled} jobs in a row saved no checkpoint{where}: {outcome.status}: {outcome.reason}"


def _code(outcome: Outcome) -> int:
    return outcome.exit_code or _EXIT_UNKNOWN
