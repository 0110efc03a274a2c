"""Errors of emergency saves and of planning."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors.tree import CheckpointError, Help, UsageError, quoted
from unbroken.quoting import amounts


@dataclass(eq=False, kw_only=True)
class NoEmergencyArea(UsageError):
    """An emergency save was asked for, and nobody said where it is to go."""

    kind = "no-emergency-area"

    def headline(self) -> str:
        return "an emergency save needs a directory, and emergency_dir is not set"

    def so(self) -> str | None:
        return "nothing was saved; the last commit is intact"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain training.emergency_dir", "what it is for, and how to set it"),)


@dataclass(eq=False, kw_only=True)
class NeedsPeers(UsageError):
    """The state of an item cannot be taken without asking the other ranks, as in an emergency it must be."""

    kind = "needs-peers"
    item: str
    type_name: str

    def headline(self) -> str:
        return f"'{self.item}' is a {self.type_name}, which asks every rank before it says its state"

    def so(self) -> str | None:
        return "an emergency save would wait for ranks that may be gone; ordinary saves are not affected"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain needs-peers", "what can be saved without the other ranks"),)


@dataclass(eq=False, kw_only=True)
class MirrorDiffers(CheckpointError):
    """A copy is not what was copied."""

    kind = "mirror-differs"
    path: Path
    findings: tuple[str, ...]

    def headline(self) -> str:
        return f"the copy differs from its original in {amounts.plural(len(self.findings), 'place')}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "it is not called a copy and was removed; the original is untouched"

    def details(self) -> Iterator[str]:
        yield from self.findings[:4]

    def help(self) -> tuple[Help, ...]:
        return (Help(f"df -h {quoted(self.path)}", "see whether that storage is full"),)


@dataclass(eq=False, kw_only=True)
class BadPlan(UsageError):
    """The numbers for a plan make none."""

    kind = "bad-plan"
    problems: tuple[str, ...]

    def headline(self) -> str:
        return f"no plan can be made: {amounts.plural(len(self.problems), 'problem')}"

    def details(self) -> Iterator[str]:
        yield from self.problems

    def help(self) -> tuple[Help, ...]:
        return (
            Help(
                "unbroken plan --steps 100000 --step-seconds 0.8 --save-seconds 12 --mtbf 86400 --walltime 14400",
                "a plan from numbers alone",
            ),
        )
