"""How long a job has, and how much of it must be kept for a last save. Pure: clock and environment are handed in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from unbroken.errors import BadDeadline
from unbroken.run.journal import Fact
from unbroken.store.fields import MOST_NUMBER

SLURM: Final = "SLURM_JOB_END_TIME"
OURS: Final = "UNBROKEN_MAX_RUNTIME"
# The variable of GPT-Simple, which job scripts that move to us set.
SEED_TOOL: Final = "GPT_SIMPLE_MAX_RUNTIME"
# Before any save was measured: what a large model needs, but never more than a tenth of a short job.
UNMEASURED_S: Final = 120.0
_UNMEASURED_SHARE: Final = 0.1
_MARGIN_S: Final = 5.0
_REMEMBERED: Final = 8


@dataclass(frozen=True)
class Deadline:
    """When a job's time is over, in seconds since 1970, who said so, and how long the job has in all."""

    at_s: float
    source: str
    runtime_s: float


def find_deadline(
    max_runtime_s: float | None, environ: Mapping[str, str], *, started_s: float, now_s: float
) -> Deadline | None:
    """The first that is given: the run's own limit, the scheduler's end time, an environment variable; or None.

    Raises:
        BadDeadline: it is no number, not positive, or over already.
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
        raise BadDeadline(source=source, value=text, complaint="it is no number of seconds") from None


def _checked(source: str, text: str, number: float, since_s: float, started_s: float, now_s: float) -> Deadline:
    if not 0 < number <= MOST_NUMBER:
        complaint = f"it must be a number of seconds above 0, at most {MOST_NUMBER:g}"
        raise BadDeadline(source=source, value=text, complaint=complaint)
    at_s = since_s + number
    if at_s <= now_s:
        raise BadDeadline(source=source, value=text, complaint=f"it was over {now_s - at_s:.0f} s ago")
    return Deadline(at_s, source, at_s - started_s)


@dataclass(frozen=True)
class Reserve:
    """How long before the deadline a last save must begin, learned from saves and steps that were measured.

    A configured number wins. Otherwise twice the slowest of the recent saves, the slowest recent step for each edge a
    stop waits for (several ranks agree at one and follow at the next), and a margin for what happens after the save.
    """

    configured_s: float | None = None
    saves_s: tuple[float, ...] = ()
    steps_s: tuple[float, ...] = ()
    edges: int = 1

    def after_save(self, duration_s: float) -> "Reserve":
        """The reserve once a save took this long, from its first copy to its commit."""
        return replace(self, saves_s=(*self.saves_s, duration_s)[-_REMEMBERED:])

    def after_step(self, duration_s: float) -> "Reserve":
        """The reserve once a step took this long."""
        return replace(self, steps_s=(*self.steps_s, duration_s)[-_REMEMBERED:])

    def seconds(self, runtime_s: float | None = None) -> float:
        """How long before the deadline to begin; ``runtime_s`` is how long the job has in all."""
        if self.configured_s is not None:
            return self.configured_s
        step_s = self.edges * max(self.steps_s, default=0.0)
        if self.saves_s:
            return 2 * max(self.saves_s) + step_s + _MARGIN_S
        unmeasured = UNMEASURED_S if runtime_s is None else min(UNMEASURED_S, runtime_s * _UNMEASURED_SHARE)
        return unmeasured + step_s


def learned_reserve(facts: Iterable[Fact], configured_s: float | None = None, *, edges: int = 1) -> Reserve:
    """What the commits of earlier jobs teach: their ``seconds``, from the first copy to the commit."""
    measured = (fact.number("seconds") for fact in facts if fact.kind == "commit")
    reserve = Reserve(configured_s, edges=edges)
    for seconds in measured:
        if seconds is not None and seconds >= 0:
            reserve = reserve.after_save(seconds)
    return reserve
