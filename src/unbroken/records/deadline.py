"""How long a job has, how much of it is kept for a last save, and what to do when less is left.

Pure: clock, environment and measurements are arguments.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from unbroken.errors import BadDeadline
from unbroken.quoting import amounts
from unbroken.records.journal import Event
from unbroken.store.fields import MOST_NUMBER

SLURM: Final = "SLURM_JOB_END_TIME"
OURS: Final = "UNBROKEN_MAX_RUNTIME"
# The variable of GPT-Simple, which job scripts that move to us set.
SEED_TOOL: Final = "GPT_SIMPLE_MAX_RUNTIME"
# Before any save was measured: what a large model needs, but never more than a tenth of a short job.
UNMEASURED_S: Final = 120.0
_UNMEASURED_SHARE: Final = 0.1
_MARGIN_S: Final = 5.0
REMEMBERED: Final = 8


@dataclass(frozen=True)
class Deadline:
    """A job's walltime limit in seconds since 1970, where it comes from, and how long the job has in all."""

    at_s: float
    source: str
    runtime_s: float


def find_deadline(
    max_runtime_s: float | None, environ: Mapping[str, str], *, started_s: float, now_s: float
) -> Deadline | None:
    """The first that is given: the run's own limit, the scheduler's end time, an environment variable; or None.

    Raises:
        BadDeadline: it is not a number, not positive, or past.
    """
    if max_runtime_s is not None:
        return _checked("max_runtime_seconds", str(max_runtime_s), max_runtime_s, started_s, started_s, now_s)
    # An empty variable is how shells unset one.
    if text := environ.get(SLURM, "").strip():
        return _checked(SLURM, text, _number(SLURM, text), 0.0, started_s, now_s)
    if name := runtime_variable(environ):
        text = environ[name].strip()
        return _checked(name, text, _number(name, text), started_s, started_s, now_s)
    return None


def runtime_variable(environ: Mapping[str, str]) -> str | None:
    """The environment variable that says how long the job may run; None if none is set."""
    return next((name for name in (OURS, SEED_TOOL) if environ.get(name, "").strip()), None)


def _number(source: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadDeadline(source=source, value=text, complaint="it is not a number of seconds") from None


def _checked(source: str, text: str, number: float, since_s: float, started_s: float, now_s: float) -> Deadline:
    if not 0 < number <= MOST_NUMBER:
        complaint = f"it must be a number of seconds above 0, at most {MOST_NUMBER:g}"
        raise BadDeadline(source=source, value=text, complaint=complaint)
    at_s = since_s + number
    if at_s <= now_s:
        raise BadDeadline(source=source, value=text, complaint=f"it passed {now_s - at_s:.0f} s ago")
    return Deadline(at_s, source, at_s - started_s)


@dataclass(frozen=True)
class Reserve:
    """How long before the deadline a last save must start, learned from measured saves and steps.

    A configured number wins. Otherwise twice the slowest of the recent saves, the slowest recent step for each edge a
    stop waits for (several ranks agree at one and follow at the next), and a margin for what happens after the save.
    """

    configured_s: float | None = None
    saves_s: tuple[float, ...] = ()
    steps_s: tuple[float, ...] = ()
    edges: int = 1

    def after_save(self, duration_s: float) -> "Reserve":
        """The reserve once a save took this long, from its first copy to its commit."""
        return replace(self, saves_s=(*self.saves_s, duration_s)[-REMEMBERED:])

    def after_step(self, duration_s: float) -> "Reserve":
        """The reserve once a step took this long."""
        return replace(self, steps_s=(*self.steps_s, duration_s)[-REMEMBERED:])

    def seconds(self, runtime_s: float | None = None) -> float:
        """How long before the deadline to start; ``runtime_s`` is how long the job has in all."""
        if self.configured_s is not None:
            return self.configured_s
        step_s = self.edges * max(self.steps_s, default=0.0)
        if self.saves_s:
            return 2 * max(self.saves_s) + step_s + _MARGIN_S
        unmeasured = UNMEASURED_S if runtime_s is None else min(UNMEASURED_S, runtime_s * _UNMEASURED_SHARE)
        return unmeasured + step_s


def learned_reserve(events: Iterable[Event], configured_s: float | None = None, *, edges: int = 1) -> Reserve:
    """Learned from the commits of earlier jobs: their ``seconds``, from the first copy to the commit."""
    measured = (event.number("seconds") for event in events if event.kind == "commit")
    reserve = Reserve(configured_s, edges=edges)
    for seconds in measured:
        if seconds is not None and seconds >= 0:
            reserve = reserve.after_save(seconds)
    return reserve


# ---- the seconds between a stop request and the kill ----

# A save may take half as long again as the slowest so far; and an outcome has to be written after it.
_LONGER: Final = 1.5
_OUTCOME_S: Final = 1.0
_SAVES_REMEMBERED: Final = 4


class GraceAnswer(Enum):
    """What to do with a grace window."""

    SAVE = "save"
    DUMP = "dump"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Costs:
    """What was measured in this run, the slowest of the recent ones; None where nothing was.

    Attributes:
        save_s: a save from its first copy to its commit.
        dump_s: an emergency dump, until it is durable.
        step_s: a step: before it is complete the state is not whole.
    """

    save_s: float | None = None
    dump_s: float | None = None
    step_s: float = 0.0

    def after_dump(self, seconds: float) -> "Costs":
        """The costs once a dump took this long."""
        return replace(self, dump_s=max(seconds, self.dump_s or 0.0))


def answer(left_s: float | None, costs: Costs, *, edges: int, has_area: bool) -> GraceAnswer:
    """What fits into the seconds that are left.

    An ordinary save is preferred where it fits with room to spare. Else a dump, if there is somewhere to put it and
    nothing says that it does not fit: one that is cut short costs nothing. Else a save that just fits. Else nothing.

    Args:
        left_s: seconds until the kill; None if unknown.
        costs: what was measured.
        edges: steps that must be completed first: until the ranks have agreed, or none.
        has_area: whether there is a directory for emergency dumps.
    """
    if left_s is None:
        return GraceAnswer.SAVE
    left_s -= edges * costs.step_s
    if left_s <= 0:
        return GraceAnswer.NOTHING
    if left_s >= (UNMEASURED_S if costs.save_s is None else _LONGER * costs.save_s + _OUTCOME_S):
        return GraceAnswer.SAVE
    if has_area and (costs.dump_s is None or left_s >= costs.dump_s):
        return GraceAnswer.DUMP
    # Nothing was measured and there is no directory for a dump: trying is better than not.
    is_possible = costs.save_s is None or left_s >= costs.save_s
    return GraceAnswer.SAVE if is_possible else GraceAnswer.NOTHING


def is_patience_over(left_s: float | None, grace_s: float | None, costs: Costs) -> bool:
    """Whether to wait no longer for the other ranks' answer, so that a dump still fits.

    Where no dump was measured yet, half of the window is kept for it, or of what an unmeasured save would be given.
    """
    if left_s is None:
        return False
    unmeasured_s = (UNMEASURED_S if grace_s is None else grace_s) / 2
    return left_s <= (unmeasured_s if costs.dump_s is None else _LONGER * costs.dump_s + _OUTCOME_S)


def learned_costs(events: Iterable[Event]) -> Costs:
    """Learned from the commits and dumps of earlier jobs."""
    saves = _seconds(events := list(events), "commit")
    dumps = _seconds(events, "emergency-save")
    return Costs(max(saves, default=None), max(dumps, default=None))


def _seconds(events: Sequence[Event], kind: str) -> list[float]:
    found = [seconds for event in events if event.kind == kind and (seconds := event.number("seconds")) is not None]
    return [seconds for seconds in found if seconds >= 0][-_SAVES_REMEMBERED:]


def window_warning(grace_s: float | None, costs: Costs, *, has_area: bool) -> str | None:
    """The warning at the start about a grace window that no save fits into; None where there is none."""
    if grace_s is None:
        return None
    grace = f"the grace window of {amounts.duration(grace_s)}"
    if grace_s == 0:
        return f"{grace} leaves no time for a save: the next job resumes from the last checkpoint before the kill"
    if costs.save_s is None:
        follows = "a signal makes a dump in emergency_dir" if has_area else "with emergency_dir a dump is made instead"
        return f"{grace} may be too short: no save of this run was measured yet; until then {follows}"
    if grace_s >= costs.step_s + _LONGER * costs.save_s + _OUTCOME_S:
        return None
    need = f"a save takes {amounts.duration(costs.save_s)}"
    if not has_area:
        return (
            f"{grace} is too short: {need}; set emergency_dir to a fast local disk and a dump is written there instead"
        )
    if costs.dump_s is not None and grace_s < costs.dump_s:
        return f"{grace} is too short: {need} and a dump {amounts.duration(costs.dump_s)}; neither will be made"
    return f"{grace} is too short for a save ({need}): a signal makes a dump in emergency_dir instead"


def deadline_warning(left_s: float | None, reserve_s: float) -> str | None:
    """The warning at the start about a job whose time is no more than what is kept for its last save."""
    if left_s is None or left_s > reserve_s:
        return None
    return (
        f"the job has {amounts.duration(left_s)} and {amounts.duration(reserve_s)} of it are kept for a last save: "
        "it will stop after its first step"
    )


# ---- clocks that disagree ----

# A barrier lets ranks go within a second.
TOLERATED_S: Final = 5.0


def skew_sentence(now_s: Sequence[float], hosts: Sequence[str]) -> str | None:
    """The warning about the rank whose clock is farthest from that of rank 0; None where all agree.

    ``now_s`` is what each rank's clock showed at the same moment, ``hosts`` where it runs.
    """
    rank = max(range(len(now_s)), key=lambda each: abs(now_s[each] - now_s[0]))
    ahead_s = now_s[rank] - now_s[0]
    if abs(ahead_s) < TOLERATED_S:
        return None
    way = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"clocks differ: that of rank {rank} on {hosts[rank]} is {amounts.duration(abs(ahead_s))} {way} that of rank 0"
        f" on {hosts[0]}; deadlines follow the clock of rank 0"
    )
