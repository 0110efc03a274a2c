"""Escaping for a terminal: control characters that would move the cursor, retitle or reorder text are spelled out.

File names, exception messages and records may contain escape sequences or bidirectional controls. ``for_terminal`` is
applied last, before a text is written to a stream; only the escape sequences of ``styled`` pass it.
"""

import os
import re
from typing import Final

# Random per process, so that no text from outside can contain a style.
_MARK: Final = f"\x1b<{os.urandom(8).hex()}>"
_STYLE: Final = re.compile(re.escape(_MARK) + r"([0-9;]*)m")
# Controls except tab and line feed, line separators, bidirectional and invisible formatting, tags, lone surrogates.
# Joiners pass: emoji and several scripts need them.
_STEERING: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def styled(code: str, text: str) -> str:
    """A text with a style, ``1`` for bold; ``for_terminal`` turns it into an escape sequence."""
    return f"{_MARK}{code}m{text}{_MARK}0m"


def unstyled(text: str) -> str:
    """A text without its styles."""
    return _STYLE.sub("", text)


def for_terminal(text: str) -> str:
    """A text of several lines for a terminal: styles applied, other control characters spelled out."""
    if _STEERING.search(text) is None:
        return text
    # re.split puts the matched codes at odd positions.
    pieces = enumerate(_STYLE.split(text))
    return "".join(f"\x1b[{piece}m" if at % 2 else _STEERING.sub(_spelled, piece) for at, piece in pieces)


def printable(text: str) -> str:
    """One value on one line: line breaks and control characters are spelled out, styles stay."""
    if text.isprintable():
        return text
    pieces = enumerate(_STYLE.split(text))
    return "".join(f"{_MARK}{piece}m" if at % 2 else "".join(map(_one_line, piece)) for at, piece in pieces)


def _one_line(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _spelled(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
