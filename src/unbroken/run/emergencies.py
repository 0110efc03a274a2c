"""What the ranks of a run have dumped and no job has used yet, as ``status`` and ``ls`` show it: by pointers alone."""

from collections.abc import Iterable
from dataclasses import dataclass

from unbroken import amounts
from unbroken.store.emergency import Moment, Pointer


@dataclass(frozen=True)
class Dumps:
    """The dumps of one step by one job: how many ranks point at theirs, where, and of how many there is a copy."""

    step: int
    world: int
    ranks: int
    hosts: tuple[str, ...]
    copies: int

    @property
    def name(self) -> str:
        """What resuming calls it."""
        return str(Moment(self.step, "", self.world))

    def sentence(self) -> str:
        """One line for people; whether the dumps are whole is for the next job to find out."""
        where = ", ".join(self.hosts)
        copied = f", {self.copies} copied" if self.copies else ""
        told = f"{self.ranks} of {amounts.plural(self.world, 'rank')} dumped on {where}{copied}"
        return told if self.ranks == self.world else f"{told}; no checkpoint without the others"


def emergencies(pointers: Iterable[Pointer], *, after_step: int) -> list[Dumps]:
    """The dumps that are ahead of a step, newest first."""
    found: dict[Moment, list[Pointer]] = {}
    for pointer in pointers:
        if pointer.step > after_step:
            found.setdefault(pointer.moment, []).append(pointer)
    return [
        Dumps(
            moment.step,
            moment.world,
            len(theirs),
            tuple(sorted({pointer.host.partition("/")[0] for pointer in theirs})),
            sum(pointer.copy is not None for pointer in theirs),
        )
        for moment, theirs in sorted(found.items(), reverse=True)
    ]
