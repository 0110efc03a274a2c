"""Numbers on a command line are numbers."""

import click
import pytest

from unbroken.cli.numbers import FiniteRange


@pytest.mark.parametrize("word", ["nan", "inf", "-inf", "-1", "soon"])
def test_what_cannot_be_counted_to_is_refused(word: str) -> None:
    with pytest.raises(click.BadParameter):
        FiniteRange(0).convert(word, None, None)


def test_a_number_within_the_bounds_is_taken() -> None:
    assert FiniteRange(0).convert("2.5", None, None) == 2.5
