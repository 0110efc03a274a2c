"""Whether a job that ended is started again here, and after how long: pure decisions."""

from dataclasses import dataclass
from typing import Final

from unbroken.launch.outcome_file import JobOutcome

NO_PROGRESS_RESTARTS: Final = 3
LONGEST_DELAY_S: Final = 60.0
_EXIT_UNKNOWN: Final = 1
_EXIT_USAGE: Final = 2


@dataclass(frozen=True)
class Attempt:
    """One job of this launcher that has ended; ``resumable_step`` is what its run can resume from, if anything.

    Of a job that was killed before it named its run nothing is known; then nobody can tell whether it got further.
    """

    code: int
    outcome: JobOutcome | None
    was_asked: bool
    resumable_step: int | None
    is_run_known: bool


@dataclass(frozen=True)
class Again:
    """Start once more after a while."""

    delay_s: float


@dataclass(frozen=True)
class Enough:
    """Do not; ``reason`` is None where nobody would expect a restart."""

    reason: str | None = None


def decide(attempts: tuple[Attempt, ...], *, max_restarts: int, first_delay_s: float) -> Again | Enough:
    """What follows the last of these attempts.

    A job that was asked to stop, or stopped cleanly for a reason of its own, is never started again here: its deadline
    or a person's word would be undone.
    """
    last = attempts[-1]
    if max_restarts == 0 or last.was_asked or not _may_help(last):
        return Enough()
    if len(attempts) > max_restarts:
        return Enough(f"{max_restarts} of {max_restarts} restarts are spent")
    stalled = stalled_restarts(attempts)
    if last.is_run_known and stalled >= NO_PROGRESS_RESTARTS:
        step = last.resumable_step
        where = "has no usable checkpoint" if step is None else f"resumes from step {step:,}"
        return Enough(f"no progress in {stalled} restarts: the run still {where}")
    return Again(min(first_delay_s * 2**stalled, LONGEST_DELAY_S))


def _may_help(attempt: Attempt) -> bool:
    outcome = attempt.outcome
    if outcome is None or not outcome.has_ended:
        # Nothing was told: a crash, unless it ended well or does not take its command line.
        return attempt.code not in (0, _EXIT_USAGE)
    # An exception that nobody diagnosed may be the death of another rank, seen from here.
    is_undiagnosed = outcome.status == "error" and outcome.exit_code == _EXIT_UNKNOWN
    return outcome.status != "stopped" and (outcome.outcome_class == "again" or is_undiagnosed)


def stalled_restarts(attempts: tuple[Attempt, ...]) -> int:
    """How many restarts in a row brought the run no further, counted from the last."""
    count = 0
    for before, after in zip(attempts[-2::-1], attempts[:0:-1], strict=True):
        if _is_further(before, after):
            break
        count += 1
    return count


def _is_further(before: Attempt, after: Attempt) -> bool:
    if after.resumable_step is None:
        return False
    return before.resumable_step is None or after.resumable_step > before.resumable_step
