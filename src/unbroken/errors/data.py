"""Errors about how data and a config go together: mixes, budgets, buckets that run dry."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors.tree import DataError, Help, quoted
from unbroken.quoting.amounts import plural


@dataclass(eq=False, kw_only=True)
class BadMix(DataError):
    """Phases that cannot be drawn: every problem at once."""

    kind = "bad-mix"
    problems: tuple[str, ...]
    buckets: tuple[str, ...]

    def headline(self) -> str:
        return f"the curriculum cannot be drawn from this data: {plural(len(self.problems), 'problem')}"

    def so(self) -> str | None:
        return f"the buckets are the folders in train/: {', '.join(self.buckets) or 'there are none'}"

    def details(self) -> Iterator[str]:
        yield from self.problems

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain data.curriculum", "what a phase is"),)


@dataclass(eq=False, kw_only=True)
class DataUnfit(DataError):
    """Data that is sound in itself and does not fit the config: every problem at once."""

    kind = "data-unfit"
    path: Path
    problems: tuple[str, ...]
    has_shards: bool = True

    def headline(self) -> str:
        return f"the data does not fit this config: {plural(len(self.problems), 'problem')}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "nothing was started"

    def details(self) -> Iterator[str]:
        yield from self.problems

    def help(self) -> tuple[Help, ...]:
        stats = Help(f"unbroken data stats {quoted(self.path)}", "what each bucket has")
        explained = Help("unbroken explain data-unfit", "what each problem asks for")
        return (stats, explained) if self.has_shards else (explained,)
