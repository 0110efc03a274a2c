"""Errors of the trainer: another config than the run's, names that mean nothing, gradients that are no numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors.tree import CheckpointError, ExactnessError, Help, TrainingError, UsageError, quoted
from unbroken.quoting.amounts import plural

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
class GptSimpleRun(UsageError):
    """The run directory of a job holds a run of GPT-Simple; ``checkpoints`` are the names of its checkpoints."""

    kind = "gpt-simple-run"
    run: Path
    checkpoints: tuple[str, ...] = ()

    def headline(self) -> str:
        return "training.output_dir holds a run of GPT-Simple"

    def at(self) -> str | None:
        return str(self.run)

    def so(self) -> str | None:
        held = ", ".join(self.checkpoints[-_SHOWN:]) or "no checkpoint yet"
        return f"its state ({held}) cannot be resumed here; nothing was changed. Set another training.output_dir"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain gpt-simple-run", "what can be taken over from it, and what cannot"),)


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


@dataclass(eq=False, kw_only=True)
class ConfigMissing(ExactnessError):
    """A run that has checkpoints and no ``config.json``: nothing says with which config they were computed."""

    kind = "config-missing"
    run: Path

    def headline(self) -> str:
        return "the run has checkpoints, but its config.json is missing"

    def at(self) -> str | None:
        return str(self.run / "config.json")

    def so(self) -> str | None:
        return "this job's config cannot be compared with the one the run was started with; nothing was started"

    def details(self) -> Iterator[str]:
        yield "restore the file, or add --accept config.json to continue with the config of this job"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "how to restore it, and what --accept config.json does"),)


@dataclass(eq=False, kw_only=True)
class RunRecordDamaged(CheckpointError):
    """``config.json`` or ``accepted.json`` of a run cannot be read, or was changed after it was written."""

    kind = "run-record-damaged"
    path: Path
    complaint: str

    def headline(self) -> str:
        return f"the run's {self.path.name} is damaged: {self.complaint}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "it says with which values the run continues, so nothing was started; restore it if you have a copy"

    def help(self) -> tuple[Help, ...]:
        aside = self.path.with_name(f"{self.path.name}.bad")
        effect = "then --accept config.json starts a new record"
        if self.path.name == "accepted.json":
            effect = "the next job rebuilds it from the journal"
        return (
            Help(f"mv {quoted(self.path)} {quoted(aside)}", effect),
            Help(f"unbroken explain {self.kind}", "what each record is for"),
        )


@dataclass(eq=False, kw_only=True)
class AcceptUnknown(UsageError):
    """Names that were accepted and name nothing that could differ; for each the nearest that do."""

    kind = "accept-unknown"
    names: tuple[tuple[str, tuple[str, ...]], ...]

    def headline(self) -> str:
        said = " ".join(f"--accept {quoted(name)}" for name, _ in self.names)
        return f"{said}: there is no field or item of {'that name' if len(self.names) == 1 else 'these names'}"

    def so(self) -> str | None:
        return "nothing was started; use the name exactly as the refusal printed it"

    def details(self) -> Iterator[str]:
        for name, nearest in self.names:
            if nearest:
                yield f"{name}: did you mean {' or '.join(nearest)}?"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "which names there are"),)


@dataclass(eq=False, kw_only=True)
class GradientNotFinite(TrainingError):
    """In fp16, a gradient that overflows at the lowest scale, though the loss is a number."""

    kind = "gradient-not-finite"
    step: int
    loss: float
    scale: float
    overflowed: int

    def headline(self) -> str:
        return f"the gradient of step {self.step:,} is not finite at the lowest loss scale, {self.scale:g}"

    def so(self) -> str | None:
        return "no scale makes it a number; this step is not saved, the last checkpoint is intact"

    def details(self) -> Iterator[str]:
        yield f"the loss is {self.loss:.4g}; {plural(self.overflowed, 'step')} of the run overflowed before"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "what to look at, and how to go on"),)
