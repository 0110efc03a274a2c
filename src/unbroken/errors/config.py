"""Errors whose remedy is an edit of the config file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors.tree import ConfigError, Help
from unbroken.quoting import amounts


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong in a config, with the place it stands at."""

    source: str
    line: int | None
    field: str
    complaint: str
    nearest: str | None = None
    topic: str | None = None  # what `unbroken explain` has a page for

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        hint = f"; did you mean {self.nearest}?" if self.nearest else ""
        return f"{place}  {self.field}: {self.complaint}{hint}"


@dataclass(eq=False, kw_only=True)
class ConfigUnreadable(ConfigError):
    """A config that is no readable YAML or JSON mapping."""

    kind = "config-unreadable"
    path: Path
    complaint: str
    line: int | None = None

    def headline(self) -> str:
        return f"the config cannot be read: {self.complaint}"

    def at(self) -> str | None:
        return str(self.path) if self.line is None else f"{self.path}:{self.line}"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken init --preset tiny", "print a config to start from"),)


@dataclass(eq=False, kw_only=True)
class ConfigInvalid(ConfigError):
    """A config with wrong values: every problem at once."""

    kind = "config-invalid"
    problems: tuple[Problem, ...]

    def headline(self) -> str:
        return f"the config has {amounts.plural(len(self.problems), 'problem')}"

    def details(self) -> Iterator[str]:
        yield from map(str, self.problems)

    def help(self) -> tuple[Help, ...]:
        topics = [problem.topic for problem in self.problems if problem.topic]
        return (Help(f"unbroken explain {topics[0] if topics else 'config'}", "what it means and takes"),)
