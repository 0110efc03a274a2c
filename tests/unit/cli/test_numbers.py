"""Numbers on a command line are numbers."""

import click
import pytest

from unbroken.cli.arguments import FiniteRange, seconds_in


@pytest.mark.parametrize("word", ["nan", "inf", "-inf", "-1", "soon"])
def test_what_cannot_be_counted_to_is_refused(word: str) -> None:
    with pytest.raises(click.BadParameter):
        FiniteRange(0).convert(word, None, None)


def test_nan_is_reported_as_not_finite() -> None:
    with pytest.raises(click.BadParameter, match="nan"):
        FiniteRange(0).convert("nan", None, None)


def test_a_number_within_the_bounds_is_taken() -> None:
    assert FiniteRange(0).convert("2.5", None, None) == 2.5


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 90.0), ("1.5", 1.5), ("4h", 14_400.0), ("04:00:00", 14_400.0), ("1h30m", 5_400.0), ("2d", 172_800.0)),
        *(("1-12:00:00", 129_600.0), ("90M", 5_400.0), ("0.5h", 1_800.0), ("45s", 45.0), ("1h 5m", 3_900.0)),
    ],
)
def test_a_duration_is_read_as_people_write_it(text: str, seconds: float) -> None:
    assert seconds_in(text) == seconds


@pytest.mark.parametrize("text", ["", " ", "4x", "04:00", "h", "4h4h", "m5", "-4h", "1:2:3"])
def test_a_malformed_duration_is_none(text: str) -> None:
    assert seconds_in(text) is None
