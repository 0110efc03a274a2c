"""Errors of a command line and of the paths it names, and bugs of our own."""

import os
from pathlib import Path

from unbroken.errors.tree import Help, InternalError, UsageError, quoted


class UnknownCommand(UsageError):
    """A command that does not exist."""

    kind = "unknown-command"
    name: str
    nearest: tuple[str, ...] = ()
    group: str = "unbroken"
    HEADLINE = "no command '{name}'"
    HELP = (Help("{group} --help", "list the commands"),)

    def so(self) -> str | None:
        return f"did you mean {' or '.join(self.nearest)}?" if self.nearest else None


class BadUsage(UsageError):
    """An option or argument that does not fit the command; ``complaint`` is the parser's."""

    kind = "bad-usage"
    command: str
    complaint: str
    HEADLINE = "{complaint}"
    AT = "{command}"
    HELP = (Help("{command} --help", "list its options"),)


class UnknownTopic(UsageError):
    """``explain`` was called with a topic that has no page and is no config field."""

    kind = "unknown-topic"
    topic: str
    nearest: tuple[str, ...] = ()
    HEADLINE = "no error kind, config field or section is called '{topic}'"
    HELP = (Help("unbroken explain", "list all topics"),)

    def so(self) -> str | None:
        return f"did you mean {' or '.join(self.nearest)}?" if self.nearest else None


class PathMissing(UsageError):
    """A path that does not exist."""

    kind = "path-missing"
    path: Path
    purpose: str
    HEADLINE = "no {purpose} at this path"

    def help(self) -> tuple[Help, ...]:
        above = (self.path.parent, *self.path.parent.parents)
        nearest = next((each for each in above if os.access(each, os.F_OK)), Path())
        return (Help(f"ls {quoted(nearest)}", "list what is there"),)


class NotAStore(UsageError):
    """A directory without checkpoints or a run, or a file where such a directory is expected."""

    kind = "not-a-store"
    path: Path
    is_directory: bool = True
    # The commands that seal and import what is there, where that can be done.
    sealing: str | None = None
    importing: str | None = None

    def headline(self) -> str:
        if not self.is_directory:
            return "this is a file, not the directory of a run or of a checkpoint"
        return "this directory contains no run and no sealed checkpoint"

    def so(self) -> str | None:
        if not self.is_directory:
            return None
        return "there is nothing to list, verify or prune; a folder written by another tool must be sealed first"

    def help(self) -> tuple[Help, ...]:
        found = []
        if self.sealing is not None:
            many = self.sealing.endswith(" --all")
            found.append(
                Help(self.sealing, "if the folders in it are checkpoints" if many else "if this is one checkpoint")
            )
        if self.importing is not None:
            found.append(Help(self.importing, "make a new run of a checkpoint of another tool"))
        folder = self.path if self.is_directory else self.path.parent
        return tuple(found) or (Help(f"ls {quoted(folder)}", "list what is there"),)


class CheckpointUnknown(UsageError):
    """A reference that matches no checkpoint."""

    kind = "checkpoint-unknown"
    reference: str
    store: Path
    known: tuple[str, ...] = ()
    # A folder that matches the reference and has no manifest, and the command that seals it.
    unsealed: str | None = None
    sealing: str | None = None
    AT = "{store}"

    def headline(self) -> str:
        if self.unsealed is not None:
            return f"{self.unsealed} is not sealed, so it is not a checkpoint yet"
        return f"no checkpoint is called '{self.reference}'"

    def so(self) -> str | None:
        if self.unsealed is not None:
            return "a folder written by another tool must be sealed before it can be used"
        if not self.known:
            return "there are no checkpoints"
        return f"there are {', '.join(self.known[:4])}" + (" and more" if len(self.known) > 4 else "")

    def help(self) -> tuple[Help, ...]:
        if self.sealing is not None:
            return (Help(self.sealing, "add a manifest to it"),)
        return (Help(f"unbroken ls {quoted(self.store)}", "list the checkpoints"),)


class WouldOverwrite(UsageError):
    """A command would replace an existing file; ``found`` says what exists, where it is no plain file."""

    kind = "would-overwrite"
    path: Path
    remedy: Help | None = None
    found: str | None = None
    is_replaceable: bool = True

    def headline(self) -> str:
        return f"{self.found or 'a file with this name'} already exists"

    def so(self) -> str | None:
        if not self.is_replaceable:
            return "nothing was changed; this is never replaced, even with --force"
        return "nothing was written; existing files are not replaced by default"

    def help(self) -> tuple[Help, ...]:
        return (self.remedy,) if self.remedy else ()


class Bug(InternalError):
    """An unexpected exception; its traceback is printed only with UNBROKEN_TRACEBACK=1."""

    kind = "internal-error"
    cause: str
    HEADLINE = "this is a bug in unbroken: {cause}"
    SO = "set UNBROKEN_TRACEBACK=1 and run the command again to see the traceback"
