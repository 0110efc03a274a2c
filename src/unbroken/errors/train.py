"""Errors of the trainer: a config that is not the one its run was started with."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unbroken.amounts import plural
from unbroken.errors.tree import ExactnessError, Help

_SHOWN = 4


@dataclass(frozen=True)
class FieldChange:
    """One field: what the run was started with, and what this job says."""

    field: str
    started_with: str
    now: str
    is_fixed: bool

    def __str__(self) -> str:
        rule = "fixed" if self.is_fixed else f"needs --accept {self.field}"
        return f"{self.field}: {self.started_with} at the start, {self.now} now ({rule})"


@dataclass(eq=False, kw_only=True)
class ConfigDiffers(ExactnessError):
    """A job that would go on with another config than the run was started with: every field at once."""

    kind = "config-differs"
    run: Path
    changes: tuple[FieldChange, ...]

    def headline(self) -> str:
        differ = "differs" if len(self.changes) == 1 else "differ"
        return f"{plural(len(self.changes), 'field')} of the config {differ} from what the run was started with"

    def at(self) -> str | None:
        return str(self.run / "config.json")

    def so(self) -> str | None:
        return "it would not be the same run; nothing was started"

    def details(self) -> Iterator[str]:
        yield from map(str, self.changes[:_SHOWN])
        if len(self.changes) > _SHOWN:
            yield f"and {len(self.changes) - _SHOWN} more: {', '.join(each.field for each in self.changes[_SHOWN:])}"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.changes[0].field}", "what it means, and what a resume may change"),)
