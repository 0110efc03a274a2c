"""Which of the names that a person accepted met a difference, and which met none.

A name that meets none is no error here: nobody can know all names before a checkpoint is read, and a job that is
started again by the same command accepts what the job before it has already let pass. But it is said, for it may be
mistyped.
"""

from collections.abc import Collection, Iterable
from typing import Protocol, runtime_checkable

from unbroken.state.cold import is_accepted


@runtime_checkable
class Accepting(Protocol):
    """An object that looks at accepted names by itself."""

    def is_accepting(self, name: str) -> bool:
        """Whether it would look at this one."""


def without_difference(accept: Iterable[str], differed: Collection[str], things: Iterable[object]) -> list[str]:
    """The accepted names that neither met a difference nor are the business of one of the things handed over."""
    looking = [thing for thing in things if isinstance(thing, Accepting)]
    return [
        name
        for name in accept
        if not any(is_accepted(each, [name]) for each in differed)
        and not any(thing.is_accepting(name) for thing in looking)
    ]
