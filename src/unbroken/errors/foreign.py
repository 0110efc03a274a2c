"""Errors of importing what another tool wrote: not recognised, ambiguous, of the wrong kind, damaged, not fitting."""

from dataclasses import dataclass
from pathlib import Path

from unbroken.errors.tree import CheckpointError, Each, Help, UsageError, quoted


@dataclass(frozen=True)
class ImportCall:
    """The rest of the command line of an import, so that its help lines repeat what was given.

    ``options`` are all but those that name a source or a step.
    """

    run: Path = Path("runs/imported")
    options: tuple[str, ...] = ()

    def again(self, source: Path | str, *options: str) -> str:
        """The same import of another source, or with more options."""
        return " ".join(["unbroken import", *map(quoted, (source, self.run, *self.options, *options))])


class ForeignUnknown(UsageError):
    """A path at which there is no checkpoint of a known tool; ``reason`` says what is missing or in the way."""

    kind = "foreign-unknown"
    path: Path
    reason: str = "no file or folder in it has the names of a known tool"
    # Whether it is known what it is.
    is_recognised: bool = False
    HEADLINE = "this is not a checkpoint that can be imported: {reason}"
    SO = "nothing was written"
    HELP = (
        Help("ls -A {path:sh}", "list what is there"),
        Help("unbroken explain {kind}", "list the tools and names that are recognised"),
    )


class ForeignAmbiguous(UsageError):
    """A folder with several checkpoints, of which none is clearly the newest."""

    kind = "foreign-ambiguous"
    path: Path
    candidates: tuple[Path, ...]
    reason: str
    call: ImportCall = ImportCall()
    HEADLINE = "this directory contains {candidates:n checkpoint}, and {reason}"
    SO = "none was chosen and nothing was written; name one of them"
    DETAILS = Each("candidates", most=8)

    def help(self) -> tuple[Help, ...]:
        return (Help(self.call.again(self.candidates[-1]), "import this one"),)


class ForeignKind(UsageError):
    """Only a checkpoint of another kind than the required one is there; it is never taken instead."""

    kind = "foreign-kind"
    path: Path
    required: str
    # The path, step and kind of each checkpoint that is there.
    found: tuple[tuple[str, str, str], ...]
    call: ImportCall = ImportCall()
    HEADLINE = "--require-kind {required}: the checkpoint is of another kind"
    SO = "no other kind and no other step is used instead; nothing was written"
    DETAILS = Each("found", "{0}: step {1}, kind {2}", most=8)

    def help(self) -> tuple[Help, ...]:
        usable = [each for each in self.found if each[2] == self.required]
        if usable:
            return (Help(self.call.again(usable[-1][0]), f"import step {usable[-1][1]}"),)
        return (Help(self.call.again(self.found[-1][0]), f"import the kind {self.found[-1][2]}"),)


class ForeignDamaged(CheckpointError):
    """Files of another tool that are incomplete, cannot be read, or changed while they were read."""

    kind = "foreign-damaged"
    path: Path
    problems: tuple[str, ...]
    HEADLINE = "this checkpoint cannot be read: {problems:n problem}"
    SO = "nothing was written, and no file of it was changed"
    DETAILS = Each("problems")
    HELP = (Help("ls -lA {path:sh}", "list its files and their sizes"),)


class NeedsClass(UsageError):
    """Pickles with objects of classes that are not read by default; ``classes`` are pairs of file and class."""

    kind = "foreign-needs-class"
    path: Path
    classes: tuple[tuple[str, str], ...]
    call: ImportCall = ImportCall()
    HEADLINE = "the pickles in this checkpoint contain {classes:n object} of classes that are not read by default"
    SO = "nothing was executed and nothing was written; an allowed class is read as plain data and never imported"
    DETAILS = Each("classes", "{0}: {1}")

    def help(self) -> tuple[Help, ...]:
        names = dict.fromkeys(name for _, name in self.classes)
        allowed = [word for name in names for word in ("--allow-class", name)]
        return (
            Help(self.call.again(self.path, *allowed), "read these objects as plain data"),
            self.explained("what is read from a pickle, and what is not"),
        )


class CannotImport(UsageError):
    """A checkpoint that was read and does not fit what was requested; it lists every problem."""

    kind = "cannot-import"
    path: Path
    problems: tuple[str, ...]
    remedy: Help | None = None
    HEADLINE = "this checkpoint cannot be imported: {problems:n problem}"
    SO = "nothing was written"
    DETAILS = Each("problems", most=16)

    def help(self) -> tuple[Help, ...]:
        return (self.remedy or self.explained("what can be imported, and how"),)
