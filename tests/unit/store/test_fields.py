"""Typed reading of JSON, where one value may be anything."""

import json
import math

import pytest

from unbroken.store.fields import Malformed, Table, as_instant, as_number, as_whole, parsed


def test_a_number_is_a_number_and_nothing_else() -> None:
    assert as_number(3) == 3.0
    assert as_number(-2.5) == -2.5
    assert as_number(1e15) == 1e15
    assert [as_number(other) for other in (None, True, "3", [3], 10**400, 1e308, math.inf, math.nan)] == [None] * 8


@pytest.mark.promise("U17")
def test_whole_numbers_and_instants_are_bounded() -> None:
    assert as_whole(0) == 0 and as_whole((1 << 63) - 1) == (1 << 63) - 1
    assert [as_whole(other) for other in (None, True, "3", 3.0, -1, 1 << 63)] == [None] * 6
    assert as_instant(1_700_000_000) == 1_700_000_000.0
    assert [as_instant(other) for other in (-1, 253_402_300_800, 1e308, math.nan)] == [None] * 4


@pytest.mark.promise("U17")
def test_json_nested_too_deeply_is_refused() -> None:
    assert parsed(b'{"a": [[1], [2]]}') == {"a": [[1], [2]]}
    assert parsed(json.dumps([[[]]] * 300)) == [[[]]] * 300
    for depth in (300, 10_000, 200_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parsed("[" * depth + "]" * depth)


@pytest.mark.parametrize("value", [None, True, "3", 10**400, math.inf, math.nan])
def test_a_number_that_must_be_there_is_finite(value: object) -> None:
    assert Table({"a": 3}, "it").number("a") == 3.0
    with pytest.raises(Malformed, match="'a' in it is not a number"):
        Table({"a": value}, "it").number("a")
