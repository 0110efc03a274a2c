"""What to do with the seconds between a request to end and the kill: pure functions of what was measured.

An ordinary save needs every rank and the run's own storage; an emergency dump needs neither; and where there is time
for none of them it is better to let the run go cleanly, so that the next job need not wait for a lease to expire.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from unbroken import amounts
from unbroken.run.deadline import UNMEASURED_S
from unbroken.run.journal import Fact

# A save may take half as long again as the slowest so far; and an outcome has to be written after it.
_LONGER: Final = 1.5
_OUTCOME_S: Final = 1.0
_SAVES_REMEMBERED: Final = 4


class Answer(Enum):
    """What to do with a grace window."""

    SAVE = "save"
    DUMP = "dump"
    LET_GO = "let go"


@dataclass(frozen=True)
class Costs:
    """What was measured of this run, the slowest of the recent ones; None where nothing was.

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


def answer(left_s: float | None, costs: Costs, *, edges: int, has_area: bool) -> Answer:
    """What fits into the seconds that are left.

    An ordinary save is preferred where it fits with room to spare. Else a dump, if there is somewhere to put it and
    nothing says that it does not fit: one that is cut short costs nothing. Else a save that just fits. Else nothing.

    Args:
        left_s: seconds until the kill; None if nobody said.
        costs: what was measured.
        edges: steps that must be completed first: until the ranks have agreed, or none.
        has_area: whether there is a directory for emergency dumps.
    """
    if left_s is None:
        return Answer.SAVE
    left_s -= edges * costs.step_s
    if left_s <= 0:
        return Answer.LET_GO
    if left_s >= (UNMEASURED_S if costs.save_s is None else _LONGER * costs.save_s + _OUTCOME_S):
        return Answer.SAVE
    if has_area and (costs.dump_s is None or left_s >= costs.dump_s):
        return Answer.DUMP
    # Nothing was measured and there is nowhere else: to try is better than not to.
    is_possible = costs.save_s is None or left_s >= costs.save_s
    return Answer.SAVE if is_possible else Answer.LET_GO


def is_patience_over(left_s: float | None, grace_s: float | None, costs: Costs) -> bool:
    """Whether to wait no longer for the other ranks' answer, so that a dump still fits.

    Where no dump was measured yet, half of the window is kept for it, or of what an unmeasured save would be given.
    """
    if left_s is None:
        return False
    unmeasured_s = (UNMEASURED_S if grace_s is None else grace_s) / 2
    return left_s <= (unmeasured_s if costs.dump_s is None else _LONGER * costs.dump_s + _OUTCOME_S)


def learned_costs(facts: Iterable[Fact]) -> Costs:
    """What the commits and dumps of earlier jobs teach."""
    saves = _seconds(facts := list(facts), "commit")
    dumps = _seconds(facts, "emergency-save")
    return Costs(max(saves, default=None), max(dumps, default=None))


def _seconds(facts: Sequence[Fact], kind: str) -> list[float]:
    found = [seconds for fact in facts if fact.kind == kind and (seconds := fact.number("seconds")) is not None]
    return [seconds for seconds in found if seconds >= 0][-_SAVES_REMEMBERED:]


def window_warning(grace_s: float | None, costs: Costs, *, has_area: bool) -> str | None:
    """What to say at the start about a grace window that no save fits into; None where there is nothing to say."""
    if grace_s is None:
        return None
    told = f"the grace window of {amounts.duration(grace_s)}"
    if grace_s == 0:
        return f"{told} leaves time for no save at all: what counts is the last checkpoint before the kill"
    if costs.save_s is None:
        follows = "a signal makes a dump in emergency_dir" if has_area else "with emergency_dir a dump is made instead"
        return f"{told} may be too small, no save of this run was measured yet; until one is, {follows}"
    if grace_s >= costs.step_s + _LONGER * costs.save_s + _OUTCOME_S:
        return None
    need = f"a save takes {amounts.duration(costs.save_s)}"
    if not has_area:
        return (
            f"{told} is too small: {need}; set emergency_dir to a fast local disk and a dump is written there instead"
        )
    if costs.dump_s is not None and grace_s < costs.dump_s:
        return f"{told} is too small: {need} and a dump {amounts.duration(costs.dump_s)}; the last checkpoint counts"
    return f"{told} is too small for a save ({need}): a signal makes a dump in emergency_dir instead"


def deadline_warning(left_s: float | None, reserve_s: float) -> str | None:
    """What to say at the start about a job whose time is no more than what is kept for its last save."""
    if left_s is None or left_s > reserve_s:
        return None
    return (
        f"the job has {amounts.duration(left_s)} and {amounts.duration(reserve_s)} of it are kept for a last save: "
        "it will stop after its first step"
    )
