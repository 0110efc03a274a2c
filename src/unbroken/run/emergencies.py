"""What the ranks of a run have dumped and no job has used yet, as ``status`` and ``ls`` show it: by pointers alone."""

from collections.abc import Iterable
from dataclasses import dataclass

from unbroken import amounts
from unbroken.store.emergency import Moment, Pointer
from unbroken.store.hosts import machine_of


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
        return f"{self.ranks} of {amounts.plural(self.world, 'rank')} dumped on {where}{copied}; {self._then()}"

    @property
    def is_complete(self) -> bool:
        """Whether every rank points at a dump, so that together they may be a checkpoint."""
        return self.ranks == self.world

    def _then(self) -> str:
        """What the next job makes of them."""
        if not self.is_complete:
            return "no checkpoint without the others"
        if self.copies == self.world:
            return "the next job makes a checkpoint of the copies, on any host"
        where = f"if it runs on {self.hosts[0]}" if len(self.hosts) == 1 else "if it runs on these hosts"
        return f"the next job makes a checkpoint of it, {where}"


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
            tuple(sorted({machine_of(pointer.host) for pointer in theirs})),
            sum(pointer.copy is not None for pointer in theirs),
        )
        for moment, theirs in sorted(found.items(), reverse=True)
    ]
