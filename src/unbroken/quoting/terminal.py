"""Text on its way to a screen: what would move the cursor, repaint, retitle or reorder is spelled out.

File names, exception messages and records of others reach the terminal in tables, errors and log lines, and each may
hold escape sequences or bidirectional controls. ``for_terminal`` is the last thing that happens to a text before a
stream gets it; the only escape sequences that pass are those made by ``styled`` in this process.
"""

import os
import re
from typing import Final

# Nobody outside this process knows the mark, so no text from outside can carry a style.
_MARK: Final = f"\x1b<{os.urandom(8).hex()}>"
_STYLE: Final = re.compile(re.escape(_MARK) + r"([0-9;]*)m")
# Controls but for tab and line feed, line separators, bidirectional and invisible formatting, tags, lone surrogates.
# Joiners stay: emoji and several scripts need them.
_STEERING: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def styled(code: str, text: str) -> str:
    """A text with a style of ours, ``1`` for bold; it becomes an escape sequence in ``for_terminal``."""
    return f"{_MARK}{code}m{text}{_MARK}0m"


def unstyled(text: str) -> str:
    """A text without its styles: what a person sees of it."""
    return _STYLE.sub("", text)


def for_terminal(text: str) -> str:
    """A text of several lines as a stream may get it: styles of ours applied, all else that steers spelled out."""
    if _STEERING.search(text) is None:
        return text
    # What was split by takes every second place.
    pieces = enumerate(_STYLE.split(text))
    return "".join(f"\x1b[{piece}m" if at % 2 else _STEERING.sub(_spelled, piece) for at, piece in pieces)


def printable(text: str) -> str:
    """One value on one line: a name or message whose line breaks and controls are spelled out; styles of ours stay."""
    if text.isprintable():
        return text
    pieces = enumerate(_STYLE.split(text))
    return "".join(f"{_MARK}{piece}m" if at % 2 else "".join(map(_one_line, piece)) for at, piece in pieces)


def _one_line(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _spelled(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
