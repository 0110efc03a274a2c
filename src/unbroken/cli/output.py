"""How all commands print: text or JSON, notes, errors, progress, help.

``--json`` prints exactly one document on standard output and nothing on standard error; text that is not printed is
not built either. ``--quiet`` drops notes and progress, ``--verbose`` adds the library's log on standard error.
``as_command`` gives every command these three options and a help with examples and exit codes.
"""

import contextlib
import json as json_format
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from unbroken.errors import BadUsage, StorageFailed, UnbrokenError, as_json
from unbroken.quoting.terminal import for_terminal, printable
from unbroken.report.error import print_error
from unbroken.report.style import Style, wants_color

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Output:
    """Where a command prints; created once per call and passed to it as ``output``."""

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

    def document(
        self, schema: str, fields: Mapping[str, Any], text: Callable[[], str], *, is_verbatim: bool = False
    ) -> None:
        """Print the result of the command: ``fields`` as one JSON document, or ``text``, even with ``--quiet``.

        Args:
            schema: name and version of the document, ``unbroken.status/2``.
            fields: the document.
            text: builds the text; not called with ``--json``.
            is_verbatim: the text is a product (generated text, a script): a pipe or a file gets it unchanged. On a
                terminal control characters are escaped all the same.

        Raises:
            StorageFailed: standard output could not be written.
            ValueError: a field is NaN or infinite, which JSON cannot express; the command replaces it before.
        """
        self._write(self.stdout, encoded(schema, fields) if self.json else text(), is_verbatim=is_verbatim)

    def line(self, schema: str, fields: Mapping[str, Any]) -> None:
        """Print one of many documents: a single line of JSON.

        Raises:
            StorageFailed: standard output could not be written.
            ValueError: a field is NaN or infinite.
        """
        self._write(self.stdout, encoded(schema, fields, indent=None))

    def note(self, message: str) -> None:
        """Print a note on standard error; nothing with ``--quiet`` or ``--json``."""
        if not (self.json or self.quiet):
            self._write(self.stderr, message)

    def error(self, error: UnbrokenError, *, is_event: bool = False) -> None:
        """Print an error: on standard error, or with ``--json`` as a document on standard output.

        ``is_event`` is for commands whose output is one JSON object per line.
        """
        if not self.json:
            with self._writing(self.stderr):
                print_error(error, self.stderr, self.environ)
            return
        fields = as_json(error)
        schema = fields.pop("schema")
        if is_event:
            self.line(schema, {"event": "error", **fields})
        else:
            self._write(self.stdout, encoded(schema, fields))

    @contextlib.contextmanager
    def progress(self, title: str, total: int, *, is_bytes: bool = False) -> Iterator[Advance]:
        """Show a progress bar while the block runs; yields the function that advances it, from any thread.

        Drawn on standard error, only on a terminal, never with ``--quiet`` or ``--json``.
        """
        if self.json or self.quiet or not self.stderr.isatty() or self.environ.get("TERM") == "dumb":
            yield _unseen
            return
        # Imported here: rich takes longer to load than most commands take to run.
        from rich import progress as shown
        from rich.console import Console

        sizes: list[shown.ProgressColumn] = [shown.DownloadColumn(), shown.TransferSpeedColumn()]
        amounts = sizes if is_bytes else [shown.MofNCompleteColumn()]
        columns = [shown.TextColumn("{task.description}", markup=False), shown.BarColumn(), *amounts]
        console = Console(file=self.stderr)
        # Erased when the block ends.
        with shown.Progress(*columns, shown.TimeRemainingColumn(), console=console, transient=True) as bar:
            task = bar.add_task(printable(title), total=total)
            yield lambda amount: bar.advance(task, amount)

    def _write(self, stream: TextIO, text: str, *, is_verbatim: bool = False) -> None:
        with self._writing(stream):
            shown = text if is_verbatim and not stream.isatty() else for_terminal(text)
            stream.write(shown if shown.endswith("\n") else shown + "\n")
            # Flushed at once: a full disk behind a redirect must fail here, where it can still be reported.
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
    """Advance a bar that is not drawn."""


def encoded(schema: str, fields: Mapping[str, Any], *, indent: int | None = 2) -> str:
    """One JSON document: the schema first, then all keys sorted; ASCII, so that any pipe can carry it.

    Raises:
        ValueError: a field is NaN or infinite.
    """
    ordered = {"schema": schema, **_in_order(fields)}
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
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


@dataclass(frozen=True)
class OutputFlags:
    """The output options, before or after the command's name."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def joined(self, *, json: bool, quiet: bool, verbose: bool) -> "OutputFlags":
        """These flags and those after the command's name.

        Raises:
            BadUsage: both ``--quiet`` and ``--verbose`` are set.
        """
        flags = OutputFlags(json or self.json, quiet or self.quiet, verbose or self.verbose)
        if flags.quiet and flags.verbose:
            raise BadUsage(command="unbroken", complaint="--quiet and --verbose exclude each other")
        return flags


def output_options() -> list[click.Parameter]:
    """The options of ``unbroken`` itself and of every command."""
    return [
        click.Option(["--json"], is_flag=True, help="Print JSON instead of text."),
        click.Option(["-q", "--quiet"], is_flag=True, help="Print only the result: no notes, no progress."),
        click.Option(["-v", "--verbose"], is_flag=True, help="Also print log messages, on standard error."),
    ]


class Command(click.Command):
    """A command with ``--json``, ``--quiet`` and ``--verbose``; its function gets them as one ``output``.

    Args:
        name: what it is called.
        examples: command lines and what each does, shown at the end of the help.
        exit_codes: the exit codes that are special to this command, and what each means.
        settings: click's own.
    """

    def __init__(
        self,
        name: str,
        *,
        examples: Sequence[tuple[str, str]] = (),
        exit_codes: Mapping[int, str] | None = None,
        **settings: Any,  # noqa: ANN401 -- click's own settings
    ) -> None:
        settings["params"] = [*(settings.get("params") or []), *output_options()]
        super().__init__(name, **settings)
        self.examples, self.exit_codes = examples, exit_codes or {}

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Examples and exit codes, then what click prints last."""
        write_examples(formatter, self.examples)
        if self.exit_codes:
            with formatter.section("Exit codes"):
                formatter.write_dl([(str(code), meaning) for code, meaning in self.exit_codes.items()])
        super().format_epilog(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 -- click's signature
        """Run the command; its function returns the exit code, None for 0."""
        asked = ctx.obj if isinstance(ctx.obj, OutputFlags) else OutputFlags()
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


def write_examples(formatter: click.HelpFormatter, examples: Sequence[tuple[str, str]]) -> None:
    """Examples as they can be pasted, each with its meaning beside it, or above it where the line gets too long."""
    if not examples:
        return
    wide = max(len(line) for line, _ in examples)
    is_beside = all(wide + len(meaning) + 6 <= formatter.width for _, meaning in examples)
    with formatter.section("Examples"):
        for line, meaning in examples:
            shown = f"  {line:<{wide}}   {meaning}" if is_beside else f"  # {meaning}\n  {line}"
            formatter.write(f"{shown}\n")


def _show_log() -> None:
    """Print the library's log on standard error."""
    # Imported here: only --verbose needs it.
    import logging

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("unbroken")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)


def as_command(name: str, **settings: Any) -> Callable[[Callable[..., int | None]], Command]:  # noqa: ANN401
    """Make a function a command: it takes ``output: Output`` beside its own parameters and returns its exit code.

    The first line of its docstring is its summary in ``unbroken --help``. ``settings`` are those of ``Command``.
    """

    def decorate(function: Callable[..., int | None]) -> Command:
        return click.command(name, cls=Command, **settings)(function)

    return decorate
