"""Typed reading of JSON, where one value may be anything."""

import math

import pytest

from unbroken.store.fields import Malformed, Table, as_number


def test_a_number_is_a_number_and_nothing_else() -> None:
    assert as_number(3) == 3.0
    assert as_number(-2.5) == -2.5
    assert math.isinf(as_number(math.inf) or 0)
    assert [as_number(other) for other in (None, True, "3", [3], 10**400)] == [None] * 5


@pytest.mark.parametrize("value", [None, True, "3", 10**400, math.inf, math.nan])
def test_a_number_that_must_be_there_is_finite(value: object) -> None:
    assert Table({"a": 3}, "it").number("a") == 3.0
    with pytest.raises(Malformed, match="'a' in it is not a number"):
        Table({"a": value}, "it").number("a")
