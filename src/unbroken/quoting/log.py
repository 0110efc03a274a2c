"""Loggers whose messages cannot steer a terminal, whoever's handler they go to."""

import logging
from typing import Final

from unbroken.quoting.terminal import for_terminal


class _SafeMessages(logging.Filter):
    """Makes every message fit for a terminal, whoever's handler it goes to."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = for_terminal(record.getMessage()), None
        return True


_SAFE_MESSAGES: Final = _SafeMessages()


def logger(name: str) -> logging.Logger:
    """The logger of a module; what is logged through it cannot steer a terminal."""
    found = logging.getLogger(name)
    found.addFilter(_SAFE_MESSAGES)
    return found
