"""Aligned tables in plain text. Owns columns, widths and alignment; knows nothing of what the cells mean."""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unbroken.quoting.terminal import printable, unstyled
from unbroken.report.style import Style

_GAP = "  "


@dataclass(frozen=True)
class Column:
    """One column: its heading, and whether its cells are numbers, which stand to the right."""

    heading: str
    is_number: bool = False
    paint: Callable[[str], str] | None = None


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, style: Style) -> str:
    """Rows under their headings, every column as wide as its widest cell; no line ends in spaces.

    A cell takes one line, whatever is in it. It may carry styles of its own; they take no room.

    Raises:
        ValueError: a row has more or fewer cells than there are columns.
    """
    widths = [width(column.heading) for column in columns]
    rows = [[printable(cell) for cell in row] for row in rows]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row of {len(row)} cells in a table of {len(columns)} columns")
        widths = [max(wide, width(cell)) for wide, cell in zip(widths, row, strict=True)]
    heading = [_padded(c.heading, wide, c.is_number, style.dim) for c, wide in zip(columns, widths, strict=True)]
    lines = [heading]
    lines += [
        [_padded(cell, wide, c.is_number, c.paint) for cell, wide, c in zip(row, widths, columns, strict=True)]
        for row in rows
    ]
    return "\n".join(_GAP.join(line).rstrip() for line in lines)


def _padded(cell: str, wide: int, is_number: bool, paint: Callable[[str], str] | None) -> str:
    # The room is made outside the paint, so that a painted last column still ends without spaces.
    room = " " * (wide - width(cell))
    painted = paint(cell) if paint else cell
    return room + painted if is_number else painted + room


def width(text: str) -> int:
    """How many terminal columns a text takes: styles none, wide letters two, combining marks none."""
    bare = unstyled(text)
    if bare.isascii():
        return len(bare)
    return sum(_cells(letter) for letter in bare)


def _cells(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
