"""Errors of a replay: a recomputation that did not come as far as the checkpoint it was to be compared with."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors.tree import CheckpointError, Help, quoted


@dataclass(eq=False, kw_only=True)
class ReplayUnfinished(CheckpointError):
    """The recomputation of a history ended before its last step; the exit code is that of its job."""

    kind = "replay-unfinished"
    run: Path
    checkpoint: str
    step: int
    reason: str
    log: Path
    said: tuple[str, ...] = ()
    exit_code: int = 3  # type: ignore[misc]  # each job ends with its own

    def headline(self) -> str:
        return f"the recomputation never reached step {self.step:,}"

    def at(self) -> str | None:
        return str(self.log)

    def so(self) -> str | None:
        return f"nothing is proven about {self.checkpoint}, and nothing of {self.run} was touched"

    def details(self) -> Iterator[str]:
        yield self.reason
        yield from (f"| {line}".rstrip() for line in self.said)

    def help(self) -> tuple[Help, ...]:
        return (
            Help(f"unbroken show {quoted(self.run)}@{self.checkpoint}", "what it was saved with"),
            Help("unbroken explain replay-unfinished", "what to look at"),
        )
