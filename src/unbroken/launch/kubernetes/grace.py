"""How long a pod is given between the request to end and its kill: what a save was measured to take, and a margin."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from unbroken import amounts
from unbroken.run.deadline import UNMEASURED_S, learned_reserve
from unbroken.run.journal import Fact

# Between the launcher's own limit and the kubelet's: what it takes to say how it ended.
MARGIN_S: Final = 15
_ROUNDED_TO_S: Final = 10
_LEAST_S: Final = 30


@dataclass(frozen=True)
class Grace:
    """Seconds from SIGTERM to SIGKILL, how many a save needs of them, and how that is known."""

    seconds: int
    needed_s: float
    because: str

    @property
    def shutdown_timeout_s(self) -> int:
        """How long the launcher waits, so that it ends before it is killed."""
        return max(self.seconds - MARGIN_S, 1)


def grace_of(facts: Iterable[Fact], asked_s: int | None = None) -> Grace:
    """The grace period that a run's journal asks for, or the one a person does; a run without saves gets a guess."""
    reserve = learned_reserve(facts)
    is_measured = bool(reserve.saves_s)
    needed_s = reserve.seconds() if is_measured else 0.0
    learned_s = max(_LEAST_S, _rounded_up((needed_s if is_measured else UNMEASURED_S) + MARGIN_S))
    if is_measured:
        slowest = amounts.duration(max(reserve.saves_s))
        because = f"the slowest of the last {amounts.plural(len(reserve.saves_s), 'save')} took {slowest}"
    else:
        because = "no save was measured yet; make the manifest again when one was"
    return Grace(learned_s if asked_s is None else asked_s, needed_s, because)


def _rounded_up(seconds: float) -> int:
    return math.ceil(seconds / _ROUNDED_TO_S) * _ROUNDED_TO_S
