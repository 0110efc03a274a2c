"""Whether a job that ended is started again here, and after how long: pure decisions."""

from dataclasses import dataclass
from typing import Final

from unbroken.launch.job_files import JobOutcome

NO_PROGRESS_RESTARTS: Final = 3
LONGEST_DELAY_S: Final = 60.0
# A clean stop for these reasons is the end of a job, not of a run: its time was over, or the loop itself stopped it.
# A signal, a request and a machine that goes away are somebody's word, and starting again would undo it.
FOLLOWED: Final = frozenset({"walltime", "asked"})
_WALLTIME: Final = "walltime"
_EXIT_UNKNOWN: Final = 1
_EXIT_USAGE: Final = 2


@dataclass(frozen=True)
class Policy:
    """What a launch was asked for.

    Attributes:
        max_restarts: None for as many as bring the run further.
        until_done: goes on after a clean stop too, and decides by the class of the outcome alone.
        is_in_allocation: a scheduler gave the time, and starts the next job when it is over.
    """

    max_restarts: int | None = 0
    first_delay_s: float = 1.0
    until_done: bool = False
    is_in_allocation: bool = False


@dataclass(frozen=True)
class Attempt:
    """One job of this launcher that has ended.

    Of a job that was killed before it named its run nothing is known; then nobody can tell whether it got further.

    Attributes:
        resumable_step: what its run can resume from now, if anything.
        reached: the last step it completed, as far as it told.
        stopped_by: the kind of the reason of a clean stop.
    """

    code: int
    outcome: JobOutcome | None
    was_asked: bool
    resumable_step: int | None
    is_run_known: bool
    reached: int | None = None
    stopped_by: str | None = None


@dataclass(frozen=True)
class Restart:
    """Start once more after a while."""

    delay_s: float


@dataclass(frozen=True)
class NoRestart:
    """Do not; ``reason`` is None where nobody would expect a restart."""

    reason: str | None = None


def decide(attempts: tuple[Attempt, ...], policy: Policy) -> Restart | NoRestart:
    """What follows the last of these attempts.

    A job that was asked to stop is never started again here: a person's word would be undone.
    """
    last, most = attempts[-1], policy.max_restarts
    may_help = _is_followed(last, policy) if policy.until_done else _may_help(last)
    if most == 0 or last.was_asked or not may_help:
        return NoRestart()
    if most is not None and len(attempts) > most:
        return NoRestart(f"{most} of {most} restarts are spent")
    stalled = stalled_restarts(attempts)
    # Without a limit nothing else would ever end a script that dies before it has named its run.
    if stalled >= NO_PROGRESS_RESTARTS and (last.is_run_known or most is None):
        return NoRestart(_stuck(attempts[-1 - stalled :]))
    return Restart(min(policy.first_delay_s * 2**stalled, LONGEST_DELAY_S))


def _may_help(attempt: Attempt) -> bool:
    outcome = attempt.outcome
    if outcome is None or not outcome.has_ended:
        # Nothing was told: a crash, unless it ended well or does not take its command line.
        return attempt.code not in (0, _EXIT_USAGE)
    # An exception that nobody diagnosed may be the death of another rank, seen from here.
    is_undiagnosed = outcome.status == "error" and outcome.exit_code == _EXIT_UNKNOWN
    return outcome.status != "stopped" and (outcome.outcome_class == "again" or is_undiagnosed)


def _is_followed(attempt: Attempt, policy: Policy) -> bool:
    outcome = attempt.outcome
    if outcome is None or not outcome.has_ended:
        return _may_help(attempt)
    if outcome.outcome_class != "again":
        return False
    if outcome.status != "stopped":
        return True
    is_schedulers = policy.is_in_allocation and attempt.stopped_by == _WALLTIME
    return attempt.stopped_by in FOLLOWED and not is_schedulers


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


def _stuck(attempts: tuple[Attempt, ...]) -> str:
    """Why there are no more restarts; a step that every one of these jobs died in is named."""
    last, restarts = attempts[-1], len(attempts) - 1
    if not last.is_run_known:
        return f"no progress in {restarts} restarts: no job came as far as naming its run"
    step = last.resumable_step
    stands = "has no usable checkpoint" if step is None else f"resumes from step {step:,}"
    reached = [each.reached for each in attempts if each.reached is not None and each.stopped_by is None]
    if len(reached) == len(attempts) and len(set(reached)) == 1:
        return (
            f"{restarts} restarts in a row ended at step {reached[0] + 1:,}, which was never completed; "
            f"the run {stands}"
        )
    ended = f"; the jobs completed step {_listed(reached)}" if reached else ""
    return f"no progress in {restarts} restarts: the run still {stands}{ended}"


def _listed(steps: list[int]) -> str:
    words = [f"{step:,}" for step in steps]
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
