"""The root of the error tree, its second level, and the one renderer.

The second level says what you do about an error: fix the command, the config or the data, retry the storage, choose
another checkpoint, decide about exactness, wait for another job, look at the training or at another rank, or report a
bug. Its class sets the exit code and the builtin exception that handlers can catch.

An error is a declaration: ``kind``, typed fields, and one template per line of the message. ``HEADLINE`` says what is
wrong, ``AT`` where (the field ``path`` where there is no template), ``SO`` what it means for the run, ``DETAILS`` one
line per problem, ``HELP`` commands to paste. Only a text that depends on logic is a method of that name. Nothing is
formatted at a raise site, so text, JSON and docs agree. ``TABLE`` has every kind with its class; ``kind`` is stable
and append-only: scripts match on it, and ``unbroken explain KIND`` has a page for each.

Templates are those of ``str.format``, with these formats besides:

    {path:sh}            quoted for a shell
    {parts:n part}       a number, or the length of a tuple, with its noun: 1 part, 3 parts
    {names:list}         comma-separated
    {size_bytes:size}    6.1 GB
    {waited_s:duration}  4 min
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, ClassVar, Final, dataclass_transform

from unbroken.quoting import amounts
from unbroken.quoting.shell import for_shell
from unbroken.quoting.terminal import printable

TABLE: Final[dict[str, type["UnbrokenError"]]] = {}


@dataclass(frozen=True)
class Help:
    """One command that helps, ready to be pasted, and what it does."""

    command: str
    effect: str = ""


@dataclass(frozen=True)
class Each:
    """One line for each entry of a field, up to ``most``; a template numbers the parts of an entry: ``{0}: {1}``."""

    field: str
    line: str = "{0}"
    most: int | None = None


@dataclass_transform(kw_only_default=True, eq_default=False)
class UnbrokenError(Exception):
    """The root. Every annotation of a subclass is a field, given by keyword.

    Subclasses are dataclasses that share one ``__init__``: generating a hundred takes longer than most commands.
    """

    kind: ClassVar[str]
    exit_code: ClassVar[int]
    HEADLINE: ClassVar[str]
    AT: ClassVar[str | None] = None
    SO: ClassVar[str | None] = None
    DETAILS: ClassVar[Each | None] = None
    HELP: ClassVar[tuple[Help, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
        kind = cls.__dict__.get("kind")
        if kind is not None and TABLE.setdefault(kind, cls) is not cls:
            raise TypeError(f"two errors have the kind {kind!r}")

    def __init__(self, **values: Any) -> None:  # noqa: ANN401 -- type checkers see the fields of each class
        names = type(self).__annotations__
        missing = [name for name in names if name not in values and not hasattr(type(self), name)]
        if missing or not names.keys() >= values.keys():
            raise TypeError(f"{type(self).__name__} takes {', '.join(names)}, not {', '.join(values) or 'nothing'}")
        for name in names:
            setattr(self, name, values[name] if name in values else getattr(type(self), name))

    def headline(self) -> str:
        """What is wrong, in one line."""
        return self.filled(self.HEADLINE)

    def at(self) -> str | None:
        """Where: a path, a line, a rank."""
        if self.AT is not None:
            return self.filled(self.AT)
        path = getattr(self, "path", None)
        return None if path is None else str(path)

    def so(self) -> str | None:
        """What it means for the run."""
        return None if self.SO is None else self.filled(self.SO)

    def details(self) -> Iterator[str]:
        """Further lines, one per problem."""
        if self.DETAILS is not None:
            yield from each_line(getattr(self, self.DETAILS.field), self.DETAILS.line, self.DETAILS.most)

    def help(self) -> tuple[Help, ...]:
        """Commands that work when pasted."""
        return tuple(Help(self.filled(each.command), self.filled(each.effect)) for each in self.HELP)

    def filled(self, template: str) -> str:
        """A template with the fields of this error."""
        return _TEMPLATE.vformat(template, (), {"error": self})

    def explained(self, effect: str) -> Help:
        """The help line that leads to the page of this kind."""
        return Help(f"unbroken explain {self.kind}", effect)

    @property
    def message(self) -> str:
        """The headline for a log line or a record: one line, whatever names and messages of others are in it."""
        return printable(self.headline())

    def __str__(self) -> str:
        # What a traceback shows, and a notebook that catches it: all that a command would print, in plain text.
        return "\n".join([self.message, *_below(self)])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.values().items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception pickles positional args only; ranks send their errors to rank 0, with all fields.
        return _rebuild, (type(self), self.values())

    def values(self) -> dict[str, Any]:
        """The fields by name."""
        return {name: getattr(self, name) for name in type(self).__annotations__}


def _rebuild(cls: type[UnbrokenError], values: dict[str, Any]) -> UnbrokenError:
    return cls(**values)


def each_line(entries: tuple[Any, ...], line: str = "{0}", most: int | None = None) -> Iterator[str]:
    """One line per entry; beyond ``most`` they are counted."""
    for entry in entries[:most]:
        yield _TEMPLATE.vformat(line, entry if isinstance(entry, tuple) else (entry,), {})
    if most is not None and len(entries) > most:
        yield f"and {len(entries) - most:,} more"


_FORMATS: Final[dict[str, Callable[[Any], str]]] = {
    "sh": for_shell,
    "list": ", ".join,
    "size": amounts.size,
    "duration": amounts.duration,
}


class _Template(Formatter):
    """Fills names with attributes of the error, numbers with the parts of an entry."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        return args[key] if isinstance(key, int) else getattr(kwargs["error"], key)

    def format_field(self, value: Any, format_spec: str) -> str:  # noqa: ANN401 -- as its base
        if format_spec in _FORMATS:
            return _FORMATS[format_spec](value)
        if format_spec.startswith("n "):
            return amounts.plural(value if isinstance(value, int) else len(value), format_spec.removeprefix("n "))
        return str(super().format_field(value, format_spec))


_TEMPLATE: Final = _Template()


def render(error: UnbrokenError, mark: Callable[[str], str] = str) -> str:
    """The printed form: headline, at, so, details, help; every label in the same column.

    Each text takes one line: file names and messages of others can neither break it nor steer a terminal. ``mark``
    colours ``error[kind]``.
    """
    return f"{mark(f'error[{error.kind}]')}: {error}"


def _below(error: UnbrokenError) -> Iterator[str]:
    for label, text in (("at", error.at()), ("so", error.so())):
        if text:
            yield f"  {label:<4} {printable(text)}"
    yield from (f"       {printable(detail)}" for detail in error.details())
    helps = [(printable(each.command), printable(each.effect)) for each in error.help()]
    width = max((len(command) for command, _ in helps), default=0)
    yield from (f"  help {command:<{width}}   {effect}".rstrip() for command, effect in helps)


def as_json(error: UnbrokenError) -> dict[str, Any]:
    """The same values for ``--json``."""
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
    """Retry the storage: the last commit is intact."""

    exit_code = 74


class CheckpointError(UnbrokenError, RuntimeError):
    """Choose another checkpoint."""

    exit_code = 3


class ExactnessError(UnbrokenError, RuntimeError):
    """Decide whether to continue without exactness."""

    exit_code = 6


class BusyError(UnbrokenError, RuntimeError):
    """Wait for the other job."""

    exit_code = 7


class TrainingError(UnbrokenError, ArithmeticError):
    """Look at the training itself."""

    exit_code = 8


class PeerError(UnbrokenError, RuntimeError):
    """Look at the rank that is named; the error is that of its cause."""

    exit_code = 1


class InternalError(UnbrokenError, RuntimeError):
    """Report a bug in unbroken."""

    exit_code = 1


# How help lines quote a path; the name says what it does at a call.
quoted = for_shell
