"""Errors of reading the data stream: lanes that do not fit, another stream than the recorded one, damage at a read."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors.tree import DataError, ExactnessError, Help, UsageError, quoted

_SHOWN: Final = 8


@dataclass(eq=False, kw_only=True)
class LanesUnfit(UsageError):
    """A step cannot be cut into lanes, or the lanes cannot be shared among the ranks."""

    kind = "lanes-unfit"
    global_batch: int
    lane: int | None
    world: int
    complaint: str

    def headline(self) -> str:
        return f"the lanes do not fit: {self.complaint}"

    def at(self) -> str | None:
        lane = "one lane a rank" if self.lane is None else f"lanes of {self.lane}"
        return f"global batch of {self.global_batch}, {lane}, world of {self.world}"

    def so(self) -> str | None:
        return "every rank needs at least one lane of every step; smaller lanes serve larger worlds"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain lanes-unfit", "which sizes go together"),)


@dataclass(eq=False, kw_only=True)
class StreamDiffers(ExactnessError):
    """The stream is not the one the state was taken from: other samples would come under the same numbers."""

    kind = "stream-differs"
    differences: tuple[tuple[str, str, str], ...]

    def headline(self) -> str:
        names = ", ".join(name for name, _, _ in self.differences)
        return f"the data stream is not the recorded one: {names}"

    def so(self) -> str | None:
        return "the samples would not be those of one long job; nothing was loaded"

    def details(self) -> Iterator[str]:
        yield from (f"{name}: recorded {before}, now {now}" for name, before, now in self.differences)

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain stream-differs", "what must stay as it was"),)


@dataclass(eq=False, kw_only=True)
class SequenceDamaged(DataError):
    """The bytes of a sequence are not those it had when its digest was taken."""

    kind = "sequence-damaged"
    root: Path
    sample: int
    shards: tuple[str, ...]

    def headline(self) -> str:
        return f"the bytes of sample {self.sample:,} have changed since they were first checked"

    def at(self) -> str | None:
        return str(self.root)

    def so(self) -> str | None:
        return "the sample is not used; one of the shards it is read from is damaged"

    def details(self) -> Iterator[str]:
        yield from self.shards[:_SHOWN]
        if len(self.shards) > _SHOWN:
            yield f"and {len(self.shards) - _SHOWN:,} more"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken data verify {quoted(self.root)}", "find which shard it is"),)
