"""Errors of the config: a file with mistakes, a config that differs from the run's, names that do not exist."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors.tree import (
    CheckpointError,
    ConfigError,
    Each,
    ExactnessError,
    Help,
    UsageError,
    quoted,
)
from unbroken.quoting.amounts import plural

_SHOWN: Final = 4


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake in a config, with its place."""

    source: str
    line: int | None
    field: str
    complaint: str
    nearest: str | None = None
    topic: str | None = None  # a topic of `unbroken explain`

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        hint = f"; did you mean {self.nearest}?" if self.nearest else ""
        return f"{place}  {self.field}: {self.complaint}{hint}"


@dataclass(frozen=True)
class FieldChange:
    """One field: its value when the run was started, and its value in this job."""

    field: str
    started_with: str
    now: str
    is_fixed: bool

    def __str__(self) -> str:
        rule = "fixed" if self.is_fixed else f"needs --accept {self.field}"
        return f"{self.field}: {self.started_with} at the start, {self.now} now ({rule})"


class ConfigUnreadable(ConfigError):
    """A config that is not a readable YAML or JSON mapping."""

    kind = "config-unreadable"
    path: Path
    complaint: str
    line: int | None = None
    HEADLINE = "the config cannot be read: {complaint}"
    HELP = (Help("unbroken init --preset tiny", "print a config to start from"),)

    def at(self) -> str | None:
        return str(self.path) if self.line is None else f"{self.path}:{self.line}"


class ConfigInvalid(ConfigError):
    """A config with invalid values: every problem at once."""

    kind = "config-invalid"
    problems: tuple[Problem, ...]
    HEADLINE = "the config has {problems:n problem}"
    DETAILS = Each("problems")

    def help(self) -> tuple[Help, ...]:
        topics = [problem.topic for problem in self.problems if problem.topic]
        return (Help(f"unbroken explain {topics[0] if topics else 'config'}", "what it means and takes"),)


class ConfigDiffers(ExactnessError):
    """A job with another config than the run was started with: every field at once."""

    kind = "config-differs"
    run: Path
    changes: tuple[FieldChange, ...]
    AT = "{run}/config.json"
    SO = "it would not be the same run; nothing was started"

    def headline(self) -> str:
        differ = "differs" if len(self.changes) == 1 else "differ"
        return f"{plural(len(self.changes), 'config field')} {differ} from what the run was started with"

    def details(self) -> Iterator[str]:
        yield from map(str, self.changes[:_SHOWN])
        if len(self.changes) > _SHOWN:
            # By name at least: accepting them needs every name.
            yield f"and {len(self.changes) - _SHOWN} more: {', '.join(each.field for each in self.changes[_SHOWN:])}"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.changes[0].field}", "what it means, and what a resume may change"),)


class ConfigMissing(ExactnessError):
    """A run that has checkpoints and no ``config.json``: the config they were computed with is unknown."""

    kind = "config-missing"
    run: Path
    HEADLINE = "the run has checkpoints, but its config.json is missing"
    AT = "{run}/config.json"
    SO = "this job's config cannot be compared with the one the run was started with; nothing was started"
    HELP = (Help("unbroken explain {kind}", "how to restore it, and what --accept config.json does"),)

    def details(self) -> Iterator[str]:
        yield "restore the file, or add --accept config.json to continue with the config of this job"


class RunRecordDamaged(CheckpointError):
    """``config.json`` or ``accepted.json`` of a run cannot be read, or was changed after it was written."""

    kind = "run-record-damaged"
    path: Path
    complaint: str
    HEADLINE = "the run's {path.name} is damaged: {complaint}"
    SO = "it sets the values the run continues with, so nothing was started; restore it if you have a copy"

    def help(self) -> tuple[Help, ...]:
        aside = self.path.with_name(f"{self.path.name}.bad")
        effect = "then --accept config.json starts a new record"
        if self.path.name == "accepted.json":
            effect = "the next job rebuilds it from the journal"
        return Help(f"mv {quoted(self.path)} {quoted(aside)}", effect), self.explained("what each record is for")


class AcceptUnknown(UsageError):
    """Names in ``--accept`` that do not exist; for each the nearest ones that do."""

    kind = "accept-unknown"
    names: tuple[tuple[str, tuple[str, ...]], ...]
    SO = "nothing was started; use the name exactly as the error printed it"
    HELP = (Help("unbroken explain {kind}", "list the valid names"),)

    def headline(self) -> str:
        said = " ".join(f"--accept {quoted(name)}" for name, _ in self.names)
        return f"{said}: no field or item has {'this name' if len(self.names) == 1 else 'these names'}"

    def details(self) -> Iterator[str]:
        for name, nearest in self.names:
            if nearest:
                yield f"{name}: did you mean {' or '.join(nearest)}?"


class GptSimpleRun(UsageError):
    """The run directory of a job holds a run of GPT-Simple; ``checkpoints`` are the names of its checkpoints."""

    kind = "gpt-simple-run"
    run: Path
    checkpoints: tuple[str, ...] = ()
    HEADLINE = "training.output_dir contains a run of GPT-Simple"
    AT = "{run}"

    def so(self) -> str | None:
        held = ", ".join(self.checkpoints[-_SHOWN:]) or "no checkpoint yet"
        return f"its state ({held}) cannot be resumed in place; nothing was changed"

    def help(self) -> tuple[Help, ...]:
        explained = self.explained("what can be imported from it, and what cannot")
        if not self.checkpoints:
            return (explained,)
        new = self.run.with_name(f"{self.run.name}-imported")
        command = f"unbroken import {quoted(self.run)} {quoted(new)}"
        return Help(command, "import its newest checkpoint into a new run"), explained


class BadPlan(UsageError):
    """The numbers given for a plan are missing or do not fit together."""

    kind = "bad-plan"
    problems: tuple[str, ...]
    HEADLINE = "cannot make a plan: {problems:n problem}"
    DETAILS = Each("problems")
    HELP = (
        Help(
            "unbroken plan --steps 100000 --step-time 0.8 --save-time 12 --mtbf 86400 --max-runtime 14400",
            "a plan from numbers alone",
        ),
    )
