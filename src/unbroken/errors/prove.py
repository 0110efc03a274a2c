"""Errors of the commands that prove exactness: a drill that cannot be followed, a proof that cannot be made."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors.tree import ExactnessError, Help, UsageError


@dataclass(eq=False, kw_only=True)
class DrillUnreadable(UsageError):
    """``UNBROKEN_DRILL`` names a file that is not there, or that is no drill."""

    kind = "drill-unreadable"
    path: Path
    reason: str

    def headline(self) -> str:
        return f"UNBROKEN_DRILL names no drill: {self.reason}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "nothing was started; without the drill the job would write into the real run"

    def help(self) -> tuple[Help, ...]:
        return (Help("unset UNBROKEN_DRILL", "if this is to be a real job"),)


@dataclass(eq=False, kw_only=True)
class NothingToProve(UsageError):
    """A command whose uninterrupted run is nothing that an interruption could be compared with."""

    kind = "nothing-to-prove"
    command: str
    reason: str
    remedy: str
    log: tuple[str, ...] = ()

    def headline(self) -> str:
        return f"there is nothing to prove: {self.reason}"

    def at(self) -> str | None:
        return self.command

    def so(self) -> str | None:
        return self.remedy

    def details(self) -> Iterator[str]:
        yield from _end_of(self.log)

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "what a command must do to be proven"),)


@dataclass(eq=False, kw_only=True)
class BaselineFails(UsageError):
    """A command that fails by itself, before anybody has interrupted it."""

    kind = "baseline-fails"
    command: str
    how: str
    log: tuple[str, ...] = ()

    def headline(self) -> str:
        return f"the command fails by itself, uninterrupted: {self.how}"

    def at(self) -> str | None:
        return self.command

    def so(self) -> str | None:
        return "nothing was interrupted, and nothing is proven" if self.log else "it said nothing before it ended"

    def details(self) -> Iterator[str]:
        yield from _end_of(self.log)

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "how prove starts a command"),)


@dataclass(eq=False, kw_only=True)
class NotDeterministic(ExactnessError):
    """Two uninterrupted runs of one command differ, so that no interrupted one could be told from them."""

    kind = "not-deterministic"
    exit_code = 3
    command: str
    differences: tuple[str, ...]
    causes: tuple[str, ...]

    def headline(self) -> str:
        return "two uninterrupted runs of this command differ, so it is not deterministic"

    def at(self) -> str | None:
        return self.command

    def so(self) -> str | None:
        return "no interruption was tried: what it would change could not be told from this"

    def details(self) -> Iterator[str]:
        yield from self.differences
        yield "likely causes:"
        yield from (f"- {cause}" for cause in self.causes)

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "the switches, one by one"),)


def _end_of(log: tuple[str, ...]) -> Iterator[str]:
    if log:
        yield "the end of its output:"
        yield from (f"| {line}" for line in log)
