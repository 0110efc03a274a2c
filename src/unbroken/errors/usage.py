"""Errors whose remedy is another command line."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from unbroken.errors.tree import Help, UsageError, quoted

_MOST_SHOWN: Final = 200


@dataclass(eq=False, kw_only=True)
class UnknownCommand(UsageError):
    """A command that does not exist."""

    kind = "unknown-command"
    name: str
    nearest: tuple[str, ...] = ()
    group: str = "unbroken"

    def headline(self) -> str:
        return f"there is no command '{self.name}'"

    def so(self) -> str | None:
        return f"did you mean {' or '.join(self.nearest)}?" if self.nearest else None

    def help(self) -> tuple[Help, ...]:
        return (Help(f"{self.group} --help", "list the commands"),)


@dataclass(eq=False, kw_only=True)
class BadUsage(UsageError):
    """An option or argument that does not fit the command; ``complaint`` is the parser's."""

    kind = "bad-usage"
    command: str
    complaint: str

    def headline(self) -> str:
        return self.complaint

    def at(self) -> str | None:
        return self.command

    def help(self) -> tuple[Help, ...]:
        return (Help(f"{self.command} --help", "show what it takes"),)


@dataclass(eq=False, kw_only=True)
class UnknownTopic(UsageError):
    """``explain`` was asked about something that has no page and is no config field."""

    kind = "unknown-topic"
    topic: str
    nearest: tuple[str, ...] = ()

    def headline(self) -> str:
        return f"there is no error kind, config field or section called '{self.topic}'"

    def so(self) -> str | None:
        return f"did you mean {' or '.join(self.nearest)}?" if self.nearest else None

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain", "list all topics"),)


@dataclass(eq=False, kw_only=True)
class PathMissing(UsageError):
    """A path that was named does not exist."""

    kind = "path-missing"
    path: Path
    purpose: str

    def headline(self) -> str:
        return f"there is no {self.purpose} at this path"

    def at(self) -> str | None:
        return str(self.path)

    def help(self) -> tuple[Help, ...]:
        above = (self.path.parent, *self.path.parent.parents)
        nearest = next((each for each in above if os.access(each, os.F_OK)), Path())
        return (Help(f"ls {quoted(nearest)}", "see what is there"),)


@dataclass(eq=False, kw_only=True)
class BadRunPath(UsageError):
    """A path at which no run can be, or behind which nobody can look; ``obstacle`` is the part of it that is wrong."""

    kind = "bad-run-path"
    path: str
    problem: Literal["empty", "nul", "long-name", "too-long", "dangling", "circular", "forbidden"]
    obstacle: str = ""

    def headline(self) -> str:
        size_bytes = len(os.fsencode(self.obstacle))
        return {
            "empty": "the path of the run is empty",
            "nul": "the path of the run has a NUL character in it",
            "long-name": f"the path of the run is too long: a name in it has {size_bytes:,} bytes",
            "too-long": f"the path of the run is too long: it has {size_bytes:,} bytes",
            "dangling": f"the path of the run is a symlink that leads nowhere: its target is {self.obstacle}",
            "circular": "the symlinks in the path of the run lead in a circle",
            "forbidden": f"the path of the run cannot be looked into: permission denied in {self.obstacle}",
        }[self.problem]

    def at(self) -> str | None:
        return printable_path(self.path) if self.path else None

    def so(self) -> str | None:
        if self.problem == "empty":
            return "it would be the working directory; give the run a directory of its own, such as runs/a"
        if self.problem == "dangling":
            return "nothing is created behind it: its disk may just not be mounted"
        return "nothing was written"

    def help(self) -> tuple[Help, ...]:
        if self.problem == "forbidden":
            return (Help(f"ls -ld {quoted(self.obstacle)}", "see who may look there"),)
        if self.problem in ("dangling", "circular"):
            return (Help(f"ls -l {quoted(self.path)}", "see where it leads"),)
        return ()


def printable_path(path: str) -> str:
    """A path as far as a line can show it."""
    shown = path.replace("\0", "\\0")
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"


@dataclass(eq=False, kw_only=True)
class NotAStore(UsageError):
    """A directory that holds no checkpoints and no run, or a file where such a directory is meant."""

    kind = "not-a-store"
    path: Path
    is_directory: bool = True
    # The command that seals what is there, where that can be done.
    sealing: str | None = None

    def headline(self) -> str:
        if not self.is_directory:
            return "this is a file, not the directory of a run or of a checkpoint"
        return "this directory holds no run and no sealed checkpoint"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        if not self.is_directory:
            return None
        return "there is nothing to list, verify or prune; a folder written by another tool must be sealed first"

    def help(self) -> tuple[Help, ...]:
        if not self.is_directory:
            return (Help(f"ls {quoted(self.path.parent)}", "see what is there"),)
        if self.sealing is None:
            return (Help(f"ls {quoted(self.path)}", "see what is there"),)
        many = self.sealing.endswith(" --all")
        return (Help(self.sealing, "if the folders in it are checkpoints" if many else "if this is one checkpoint"),)


@dataclass(eq=False, kw_only=True)
class CheckpointUnknown(UsageError):
    """A reference that matches no checkpoint."""

    kind = "checkpoint-unknown"
    reference: str
    store: Path
    known: tuple[str, ...] = ()
    # A folder that fits the reference and has no manifest, and the command that seals it.
    unsealed: str | None = None
    sealing: str | None = None

    def headline(self) -> str:
        if self.unsealed is not None:
            return f"{self.unsealed} is not sealed, so it is not a checkpoint yet"
        return f"no checkpoint here is called '{self.reference}'"

    def at(self) -> str | None:
        return str(self.store)

    def so(self) -> str | None:
        if self.unsealed is not None:
            return "a folder written by another tool must be sealed before it can be used"
        if not self.known:
            return "the store holds no checkpoint at all"
        return f"it holds {', '.join(self.known[:4])}" + (" and more" if len(self.known) > 4 else "")

    def help(self) -> tuple[Help, ...]:
        if self.sealing is not None:
            return (Help(self.sealing, "add a manifest to it"),)
        return (Help(f"unbroken ls {quoted(self.store)}", "list what is there"),)


@dataclass(eq=False, kw_only=True)
class WouldOverwrite(UsageError):
    """A command would replace what stands at a path; ``found`` says what that is, where it is no plain file."""

    kind = "would-overwrite"
    path: Path
    remedy: Help | None = None
    found: str | None = None
    is_replaceable: bool = True

    def headline(self) -> str:
        return f"{self.found or 'a file with this name'} already exists"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        if not self.is_replaceable:
            return "nothing was touched; this is never replaced, also not with --force"
        return "nothing was written; what is already there is never replaced unasked"

    def help(self) -> tuple[Help, ...]:
        return (self.remedy,) if self.remedy else ()


@dataclass(eq=False, kw_only=True)
class CannotSeal(UsageError):
    """A folder that cannot become a checkpoint as it stands."""

    kind = "cannot-seal"
    path: Path
    reason: str
    remedy: Help | None = None

    def headline(self) -> str:
        return f"this folder cannot be sealed: {self.reason}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "nothing was written"

    def help(self) -> tuple[Help, ...]:
        return (self.remedy,) if self.remedy else ()
