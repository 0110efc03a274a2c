"""The one printer of errors: of every command, and of the ranks that a command starts."""

from collections.abc import Mapping
from typing import TextIO

from unbroken.errors import UnbrokenError, render
from unbroken.quoting.terminal import for_terminal
from unbroken.report.style import Style, wants_color


def print_error(error: UnbrokenError, stream: TextIO, environ: Mapping[str, str]) -> None:
    """Write an error's lines to a stream, in colour where the stream shows it.

    Raises:
        OSError: the stream cannot be written to.
    """
    stream.write(f"{for_terminal(render(error, Style(wants_color(stream, environ)).bad))}\n")
    stream.flush()
