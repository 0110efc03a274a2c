"""The lines of a run on stderr, by rank 0, where logging is not set up.

A library prints nothing. But a script that never touched ``logging`` would resume, save and stop silently, so the run
prints its own lines then, and only then: any handler that is installed, before or later, silences this one.
"""

import logging
import sys
from collections.abc import Callable
from typing import Final

from unbroken.quoting.log import is_quiet_by_environment
from unbroken.quoting.terminal import for_terminal

_LOGGER: Final = "unbroken"


class _Console(logging.Handler):
    """Writes to whatever stderr is at the moment, as a notebook replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            # Logging was set up meanwhile: its handlers print the line.
            return
        try:
            sys.stderr.write(f"{for_terminal(self.format(record))}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            # A closed stderr must not end the training.
            return


def show_lines(*, is_wanted: bool, is_first: bool) -> Callable[[], None]:
    """Print the run's lines until the returned function is called."""
    logger = logging.getLogger(_LOGGER)
    if not is_wanted or not is_first or is_quiet_by_environment() or logger.hasHandlers():
        return lambda: None
    console = _Console(logging.INFO)
    console.setFormatter(_Plain())
    level = logger.level
    logger.addHandler(console)
    logger.setLevel(min(level, logging.INFO) if level else logging.INFO)

    def end() -> None:
        logger.removeHandler(console)
        logger.setLevel(level)

    return end


class _Plain(logging.Formatter):
    """The name of the project, the level where it matters, the message."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"unbroken: {level}{record.getMessage()}"
