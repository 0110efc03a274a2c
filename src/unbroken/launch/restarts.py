"""Whether a job is restarted by the launcher, and after what delay: pure decisions."""

from dataclasses import dataclass
from typing import Final

from unbroken.launch.job_files import JobOutcome

NO_PROGRESS_RESTARTS: Final = 3
LONGEST_DELAY_S: Final = 60.0
# With --until-done, a clean stop for these reasons is followed by another job: the walltime limit, or `run.stop()`. A
# signal, `unbroken stop` and a spot notice are requests to stop, which a restart would undo.
FOLLOWED: Final = frozenset({"walltime", "asked"})
_WALLTIME: Final = "walltime"
_EXIT_USAGE: Final = 2


@dataclass(frozen=True)
class RestartPolicy:
    """The restart policy of a launch.

    Attributes:
        max_restarts: None for unlimited while the run makes progress.
        until_done: also restart after a clean stop; the class of the outcome decides.
        is_in_allocation: inside a SLURM job, where the scheduler starts the next job after the walltime limit.
    """

    max_restarts: int | None = 0
    first_delay_s: float = 1.0
    until_done: bool = False
    is_in_allocation: bool = False


@dataclass(frozen=True)
class Attempt:
    """One job of this launcher that has ended.

    Attributes:
        resumable_step: the step its run can resume from now, if any.
        is_run_known: whether the job reported its run directory; a job killed before that shows no progress.
        reached: the last step it completed, if known.
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
    """Restart after a delay."""

    delay_s: float


@dataclass(frozen=True)
class NoRestart:
    """Do not restart; ``reason`` is None if no restart was to be expected."""

    reason: str | None = None


def decide(attempts: tuple[Attempt, ...], policy: RestartPolicy) -> Restart | NoRestart:
    """Whether the last of these attempts is followed by a restart; never after a signal or a request to stop."""
    last, most = attempts[-1], policy.max_restarts
    may_help = _is_followed(last, policy) if policy.until_done else _may_help(last)
    if most == 0 or last.was_asked or not may_help:
        return NoRestart()
    if most is not None and len(attempts) > most:
        return NoRestart(f"all {most} restarts used")
    stalled = stalled_restarts(attempts)
    # Without a limit, a script that dies before it opens its run would be restarted for ever.
    if stalled >= NO_PROGRESS_RESTARTS and (last.is_run_known or most is None):
        return NoRestart(_stuck(attempts[-1 - stalled :]))
    return Restart(min(policy.first_delay_s * 2**stalled, LONGEST_DELAY_S))


def _may_help(attempt: Attempt) -> bool:
    outcome = attempt.outcome
    if outcome is None or not outcome.has_ended:
        # No outcome: a crash, unless the exit code is that of success or of a wrong command line.
        return attempt.code not in (0, _EXIT_USAGE)
    return outcome.status != "stopped" and outcome.outcome_class == "again"


def _is_followed(attempt: Attempt, policy: RestartPolicy) -> bool:
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
    """The number of restarts in a row without progress, counted from the last."""
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
    """Why there are no more restarts; names the step in which all these jobs died, if it is the same."""
    last, restarts = attempts[-1], len(attempts) - 1
    if not last.is_run_known:
        return f"no progress after {restarts} restarts: no job opened its run"
    step = last.resumable_step
    state = "has no usable checkpoint" if step is None else f"resumes from step {step:,}"
    reached = [each.reached for each in attempts if each.reached is not None and each.stopped_by is None]
    if len(reached) == len(attempts) and len(set(reached)) == 1:
        return f"{restarts} restarts in a row failed at step {reached[0] + 1:,}; the run {state}"
    ended = f"; last completed steps: {_listed(reached)}" if reached else ""
    return f"no progress after {restarts} restarts: the run still {state}{ended}"


def _listed(steps: list[int]) -> str:
    words = [f"{step:,}" for step in steps]
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
