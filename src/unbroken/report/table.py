"""Aligned plain-text tables."""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unbroken.quoting.terminal import printable, unstyled
from unbroken.report.style import Style

_GAP = "  "


@dataclass(frozen=True)
class Column:
    """One column: its heading, and whether its cells are numbers, which are right-aligned."""

    heading: str
    is_number: bool = False
    paint: Callable[[str], str] | None = None


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, style: Style) -> str:
    """Rows under their headings, every column as wide as its widest cell; no line ends in spaces.

    A cell is always one line. It may contain styles, which take no width.

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
    # Padding is outside the style, so that a styled last column does not end in spaces.
    room = " " * (wide - width(cell))
    painted = paint(cell) if paint else cell
    return room + painted if is_number else painted + room


def width(text: str) -> int:
    """The width of a text in terminal columns: wide characters two, combining marks and styles none."""
    bare = unstyled(text)
    if bare.isascii():
        return len(bare)
    return sum(_cells(letter) for letter in bare)


def _cells(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
