"""The root of the error tree, its second level, and the printed form.

The second level says what the one who handles it does: fix the command, fix the config, fix the data, try the
storage again, choose another checkpoint, decide about exactness, wait for somebody else, look at the training or
at another rank, or report our bug.
A leaf has typed fields; its message is made from them here and nowhere else, so that text, JSON and docs agree.
``kind`` is stable and append-only: scripts match on it, and ``unbroken explain KIND`` has a page for each.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from unbroken.quoting.shell import for_shell
from unbroken.quoting.terminal import printable


@dataclass(frozen=True)
class Help:
    """One command that helps, ready to be pasted, and what it does."""

    command: str
    effect: str = ""


@dataclass(eq=False, kw_only=True)
class UnbrokenError(Exception):
    """The root. ``headline`` is what is true, ``at`` where, ``so`` what it means, ``help`` what to do."""

    kind: ClassVar[str]
    exit_code: ClassVar[int]

    def headline(self) -> str:
        """What is true, in one line."""
        raise NotImplementedError

    def at(self) -> str | None:
        """Where: a path, a line, a rank."""
        return None

    def so(self) -> str | None:
        """What it means for the run."""
        return None

    def details(self) -> Iterator[str]:
        """Further lines, one per problem, when there is more than one thing to say."""
        yield from ()

    def help(self) -> tuple[Help, ...]:
        """Commands that work when pasted."""
        return ()

    def __str__(self) -> str:
        # Python prints this in the traceback of a script that does not catch it.
        return printable(self.headline())

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception pickles positional args only; ranks hand their errors to rank 0, fields and all.
        return _rebuild, (type(self), {f.name: getattr(self, f.name) for f in fields(self)})


def _rebuild(cls: type[UnbrokenError], values: dict[str, Any]) -> UnbrokenError:
    return cls(**values)


def render(error: UnbrokenError) -> str:
    """The printed form: headline, at, so, details, help; every label in the same column.

    Each text takes one line: file names and messages of others can neither break it nor steer a terminal.
    """
    lines = [f"error[{error.kind}]: {printable(error.headline())}"]
    for label, text in (("at", error.at()), ("so", error.so())):
        if text:
            lines.append(f"  {label:<4} {printable(text)}")
    lines += [f"       {printable(detail)}" for detail in error.details()]
    helps = [(printable(each.command), printable(each.effect)) for each in error.help()]
    width = max((len(command) for command, _ in helps), default=0)
    lines += [f"  help {command:<{width}}   {effect}".rstrip() for command, effect in helps]
    return "\n".join(lines)


def explain_in_traceback(error: UnbrokenError) -> None:
    """Let the traceback of a script that does not catch it say all that a command would: where, so what, what helps."""
    note = "\n".join(render(error).splitlines()[1:])
    # Said once, though every layer on its way may ask for it; notes of others stay beside it.
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def as_json(error: UnbrokenError) -> dict[str, Any]:
    """The same facts for ``--json``."""
    return {
        "schema": "unbroken.error/1",
        "kind": error.kind,
        "exit_code": error.exit_code,
        "message": error.headline(),
        "at": error.at(),
        "so": error.so(),
        "details": list(error.details()),
        "help": [{"command": h.command, "effect": h.effect} for h in error.help()],
    }


class UsageError(UnbrokenError, ValueError):
    """Fix the command."""

    exit_code = 2


class ConfigError(UnbrokenError, ValueError):
    """Fix the config file."""

    exit_code = 2


class DataError(UnbrokenError, ValueError):
    """Fix the data."""

    exit_code = 4


class StorageError(UnbrokenError, OSError):
    """Try the storage again: the last commit is intact."""

    exit_code = 74


class CheckpointError(UnbrokenError, RuntimeError):
    """Choose another checkpoint."""

    exit_code = 3


class ExactnessError(UnbrokenError, RuntimeError):
    """A person decides whether to go on without exactness."""

    exit_code = 6


class BusyError(UnbrokenError, RuntimeError):
    """Somebody else is running."""

    exit_code = 7


class TrainingError(UnbrokenError, ArithmeticError):
    """Look at the training itself."""

    exit_code = 8


class PeerError(UnbrokenError, RuntimeError):
    """Look at the rank that is named; the error is that of its cause."""

    exit_code = 1


class InternalError(UnbrokenError, RuntimeError):
    """Our bug."""

    exit_code = 1


# How help lines quote a path; the name says what it does at a call.
quoted = for_shell
