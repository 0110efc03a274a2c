"""The one way commands speak.

Owns the choice between text and JSON, what ``--quiet`` silences, where colour goes and when a progress bar is drawn.
Promises that ``--json`` puts exactly one document on standard output and nothing on standard error, and that text
which nobody will see is never made; ``--verbose`` adds the library's log lines on standard error. ``as_command`` gives
every command the same three options.
"""

import contextlib
import json as json_format
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from unbroken.errors import BadUsage, StorageFailed, UnbrokenError, as_json
from unbroken.quoting.terminal import for_terminal
from unbroken.report.error import print_error
from unbroken.report.style import Style, wants_color

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Output:
    """What a command says things through; made once per call and handed to it as ``output``."""

    json: bool
    quiet: bool
    stdout: TextIO
    stderr: TextIO
    environ: Mapping[str, str]
    verbose: bool = False

    @property
    def style(self) -> Style:
        """Styles for text on standard output."""
        return Style(not self.json and wants_color(self.stdout, self.environ))

    def document(self, schema: str, facts: Mapping[str, Any], text: Callable[[], str]) -> None:
        """Say the command's result: ``facts`` as one JSON document, or what ``text`` makes of them.

        ``schema`` is a name and a version, ``unbroken.status/2``. A result is said even with ``--quiet``.

        Raises:
            StorageFailed: standard output took no more.
            ValueError: a fact is NaN or infinite; those are no JSON, so the command decides how to say them.
        """
        self._say(self.stdout, encoded(schema, facts) if self.json else text())

    def line(self, schema: str, facts: Mapping[str, Any]) -> None:
        """Say one of many documents: a single line of JSON.

        Raises:
            StorageFailed: standard output took no more.
            ValueError: a fact is NaN or infinite.
        """
        self._say(self.stdout, encoded(schema, facts, indent=None))

    def note(self, message: str) -> None:
        """Say something by the way, on standard error; silent with ``--quiet`` and ``--json``."""
        if not (self.json or self.quiet):
            self._say(self.stderr, message)

    def error(self, error: UnbrokenError, *, is_event: bool = False) -> None:
        """Print an error: on standard error, or with ``--json`` as a document on standard output.

        ``is_event`` is for commands whose output is one JSON object per line.
        """
        if not self.json:
            with self._writing(self.stderr):
                print_error(error, self.stderr, self.environ)
            return
        facts = as_json(error)
        schema = facts.pop("schema")
        if is_event:
            self.line(schema, {"event": "error", **facts})
        else:
            self._say(self.stdout, encoded(schema, facts))

    @contextlib.contextmanager
    def progress(self, title: str, total: int, *, is_bytes: bool = False) -> Iterator[Advance]:
        """A progress bar while the block runs; yields what advances it, which any thread may call.

        Drawn on standard error, only on a terminal, never with ``--quiet`` or ``--json``.
        """
        if self.json or self.quiet or not self.stderr.isatty() or self.environ.get("TERM") == "dumb":
            yield _unseen
            return
        # Imported here: rich takes longer to load than most commands take to run.
        from unbroken.cli.progress import bar

        with bar(title, total, is_bytes=is_bytes, stream=self.stderr) as advance:
            yield advance

    def _say(self, stream: TextIO, text: str) -> None:
        with self._writing(stream):
            shown = for_terminal(text)
            stream.write(shown if shown.endswith("\n") else shown + "\n")
            # Flushed at once: a full disk behind a redirect is met here, where it can still be reported.
            stream.flush()

    @contextlib.contextmanager
    def _writing(self, stream: TextIO) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as refusal:
            name = Path(f"standard {'output' if stream is self.stdout else 'error'}")
            cause = refusal.strerror or str(refusal)
            raise StorageFailed(operation="write", path=name, cause=cause) from refusal


def _unseen(amount: int) -> None:
    """Nobody is looking."""


def encoded(schema: str, facts: Mapping[str, Any], *, indent: int | None = 2) -> str:
    """One JSON document: the schema first, then every key in order, ASCII only, so that any pipe carries it.

    Raises:
        ValueError: a fact is NaN or infinite.
    """
    ordered = {"schema": schema, **_in_order(facts)}
    return json_format.dumps(ordered, indent=indent, allow_nan=False, default=_plain)


def _in_order(value: Any) -> Any:  # noqa: ANN401 -- JSON is any
    if isinstance(value, Mapping):
        return {key: _in_order(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_in_order(item) for item in value]
    return value


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no place in a JSON document")


@dataclass(frozen=True)
class Flags:
    """What was asked for before the command's name."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def joined(self, *, json: bool, quiet: bool, verbose: bool) -> "Flags":
        """These and what was asked for after the command's name.

        Raises:
            BadUsage: less and more were asked for at once.
        """
        flags = Flags(json or self.json, quiet or self.quiet, verbose or self.verbose)
        if flags.quiet and flags.verbose:
            raise BadUsage(command="unbroken", complaint="--quiet and --verbose contradict each other; give one")
        return flags


def speaking_options() -> list[click.Parameter]:
    """The options that the tool and each of its commands take."""
    return [
        click.Option(["--json"], is_flag=True, help="Print one JSON document instead of text."),
        click.Option(["-q", "--quiet"], is_flag=True, help="Print the result alone: no notes, no progress."),
        click.Option(["-v", "--verbose"], is_flag=True, help="Print log messages too, on standard error."),
    ]


class Command(click.Command):
    """A command with ``--json``, ``--quiet`` and ``--verbose``; its function gets them as one ``output``."""

    def __init__(self, name: str, **settings: Any) -> None:  # noqa: ANN401 -- click's own settings, handed through
        settings["params"] = [*(settings.get("params") or []), *speaking_options()]
        super().__init__(name, **settings)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 -- click's signature
        """Run the command; what its function returns is the exit code, and None is 0."""
        asked = ctx.obj if isinstance(ctx.obj, Flags) else Flags()
        flags = asked.joined(**{name: ctx.params.pop(name) for name in ("json", "quiet", "verbose")})
        ctx.params["output"] = Output(
            json=flags.json,
            quiet=flags.quiet,
            stdout=sys.stdout,
            stderr=sys.stderr,
            environ=os.environ,
            verbose=flags.verbose,
        )
        if flags.verbose:
            _show_log()
        return super().invoke(ctx)


def _show_log() -> None:
    """Let what the library logs reach standard error."""
    # Imported here: few calls ask for it.
    import logging

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("unbroken")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)


def as_command(name: str, **settings: Any) -> Callable[[Callable[..., int | None]], Command]:  # noqa: ANN401
    """Make a function a command: it takes ``output: Output`` beside its own parameters and returns its exit code.

    The first line of its docstring is its line in ``unbroken --help``. Further ``settings`` are click's.
    """

    def decorate(function: Callable[..., int | None]) -> Command:
        return click.command(name, cls=Command, **settings)(function)

    return decorate
