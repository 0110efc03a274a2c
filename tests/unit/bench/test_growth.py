"""The fit of growth and its picture: what is linear passes, what is quadratic or has a cliff is named."""

import itertools
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest

from bench.growth import COLUMNS, Growth, linearithmic, rows_of
from bench.plot import Line, Panel, svg

SIZES = (100, 1_000, 10_000)


def _growth(cost: Callable[[int], float]) -> Growth:
    return Growth("ranks", "save", {n: cost(n) for n in SIZES})


@pytest.mark.parametrize(
    ("cost", "worse_at"),
    [
        (lambda n: 0.001 * n, []),
        (lambda n: 0.001 * n * math.log(n), []),
        (lambda n: 0.001 * n**1.4, [1_000, 10_000]),
        (lambda n: 1e-8 * n * n, [10_000]),
        (lambda n: 0.001 * n if n < 10_000 else 0.02 * n, [10_000]),
        (lambda _: 5.0, []),
        (lambda n: 1e-7 * n, []),
    ],
    ids=["linear", "n log n", "n^1.4", "n^2, at first below the noise", "cliff", "constant", "no time at all"],
)
def test_what_grows_faster_than_n_log_n_is_named(cost: Callable[[int], float], worse_at: list[int]) -> None:
    assert _growth(cost).worse_at == worse_at


def test_the_exponent_is_that_of_the_last_decade() -> None:
    assert _growth(lambda n: 0.01 * n**0.5).last == pytest.approx(0.5)
    assert linearithmic(1_000, 10_000) == pytest.approx(math.log10(10 * 4 / 3))


def test_an_operation_that_is_not_measured_at_every_size_has_a_row_of_its_sizes() -> None:
    axes = {
        "steps": {
            "1000": {"cpu_s": {"read": 1.0, "status": 0.1}, "peak_bytes": 5},
            "10000": {"cpu_s": {"status": 1.0}, "peak_bytes": 9e9},
        }
    }
    rows = rows_of(axes)
    assert [row[:4] for row in rows] == [("steps", "1,000", "read", "1"), ("steps", "10,000", "status", "0.1 / 1")]
    assert all(len(row) == len(COLUMNS) and row[-1] == "9.00" for row in rows)


def test_the_picture_is_well_formed_and_no_name_covers_another() -> None:
    lines = [Line(f"a <b> & {number}", {10: 0.001, 100: 0.01 + number * 1e-6}) for number in range(8)]
    found = ElementTree.fromstring(svg([Panel("ranks", lines), Panel("steps", lines[:1])]))
    texts = [each for each in found.iter() if each.tag.endswith("text")]
    named = [each for each in texts if (each.text or "").startswith("a <b> &")]
    assert len(named) == 9
    places = sorted(float(each.get("y", "0")) for each in named[:8])
    assert all(after - before >= 13.9 for before, after in itertools.pairwise(places))
