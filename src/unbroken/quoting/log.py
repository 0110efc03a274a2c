"""Loggers that escape control characters in their messages, and the variable that silences them."""

import logging
import os
from typing import Final

from unbroken.quoting.terminal import for_terminal

QUIET: Final = "UNBROKEN_QUIET"


class _SafeMessages(logging.Filter):
    """Makes every message one line without control characters, for any handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = for_terminal(record.getMessage()).replace("\n", "\\n"), None
        return True


_SAFE_MESSAGES: Final = _SafeMessages()


def logger(name: str) -> logging.Logger:
    """The logger of a module, with control characters escaped."""
    found = logging.getLogger(name)
    found.addFilter(_SAFE_MESSAGES)
    return found


def is_quiet_by_environment() -> bool:
    """Whether ``UNBROKEN_QUIET`` asks for warnings and errors only."""
    return os.environ.get(QUIET, "0") not in ("", "0")
