"""Tables and styles as a terminal shows them."""

import io

import pytest

from unbroken.quoting.terminal import for_terminal
from unbroken.report.style import Style, wants_color
from unbroken.report.table import Column, table, width

PLAIN = Style(color=False)
COLOR = Style(color=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_stands_left_and_numbers_stand_right() -> None:
    columns = [Column("name"), Column("size", is_number=True), Column("state")]
    rows = [("checkpoint-1000", "6.1 GB", "usable"), ("a", "512 bytes", "torn")]
    assert table(columns, rows, style=PLAIN).splitlines() == [
        "name                  size  state",
        "checkpoint-1000     6.1 GB  usable",
        "a                512 bytes  torn",
    ]


def test_a_table_without_rows_is_its_heading() -> None:
    assert table([Column("name"), Column("state")], [], style=PLAIN) == "name  state"


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells in a table of 2 columns"):
        table([Column("name"), Column("state")], [("only",)], style=PLAIN)


def test_styles_and_wide_letters_do_not_shift_a_column() -> None:
    columns = [Column("name", paint=COLOR.bold), Column("state")]
    made = table(columns, [("モデル", COLOR.good("ok")), ("e\u0301", "x")], style=COLOR)
    starts = [width(line.split("  ")[0]) for line in made.splitlines()]
    assert starts == [4, 6, 1]
    lines = for_terminal(made).splitlines()
    assert lines[1] == "\x1b[1mモデル\x1b[0m  \x1b[32mok\x1b[0m"
    assert lines[2] == "\x1b[1me\u0301\x1b[0m       x"


def test_no_line_ends_in_spaces() -> None:
    columns = [Column("a"), Column("b", paint=COLOR.dim)]
    assert all(line == line.rstrip() for line in table(columns, [("x", ""), ("y", "long")], style=PLAIN).splitlines())


def test_color_goes_to_a_terminal_only() -> None:
    assert wants_color(Terminal(), {})
    assert not wants_color(io.StringIO(), {})


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"NO_COLOR": "yes"}, {"TERM": "dumb"}])
def test_color_can_be_refused(environ: dict[str, str]) -> None:
    assert not wants_color(Terminal(), environ)


def test_an_empty_no_color_refuses_nothing() -> None:
    assert wants_color(Terminal(), {"NO_COLOR": ""})


def test_a_style_without_color_changes_nothing() -> None:
    assert [getattr(PLAIN, name)("x") for name in ("bold", "dim", "good", "warn", "bad")] == ["x"] * 5
    assert for_terminal(COLOR.bad("x")) == "\x1b[1;31mx\x1b[0m"
    assert COLOR.bad("") == ""
