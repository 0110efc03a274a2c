"""Errors of ``unbroken demo``: what keeps it from showing what it is to show."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors.tree import Help, InternalError, UsageError, quoted


@dataclass(eq=False, kw_only=True)
class SourcesMissing(UsageError):
    """This Python came without the sources of its standard library, of which the demo makes its corpus."""

    kind = "sources-missing"
    folder: Path

    def headline(self) -> str:
        return "this Python came without the sources of its standard library, and the demo makes its corpus of them"

    def at(self) -> str | None:
        return str(self.folder)

    def so(self) -> str | None:
        return "nothing was trained; an ordinary Python has them, as a virtual environment made from one"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"ls {quoted(self.folder)}", "see what is there"),)


@dataclass(eq=False, kw_only=True)
class DemoFailed(InternalError):
    """A command of the demo ended otherwise than it was to; ``said`` is the end of its log."""

    kind = "demo-failed"
    what: str
    was_to: str
    ended: str
    log: Path
    said: tuple[str, ...] = ()

    def headline(self) -> str:
        return f"{self.what} was to {self.was_to}, but {self.ended}"

    def at(self) -> str | None:
        return str(self.log)

    def so(self) -> str | None:
        return "the demo ends here, and has proven nothing; the log ends so:" if self.said else "its log is empty"

    def details(self) -> Iterator[str]:
        yield from self.said

    def help(self) -> tuple[Help, ...]:
        return (
            Help(f"less {quoted(self.log)}", "read all that it said"),
            Help("unbroken demo", "try again, in a fresh folder"),
        )
