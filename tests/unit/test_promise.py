"""The list of promises cannot claim what no test shows."""

from pathlib import Path

import pytest

from tests.tiers import Tiers
from tools.promise import Row, collect, complaints, defined_in, page, read_rows, tier_complaints

ROOT = Path(__file__).resolve().parents[2]
COUNTS = {"G": 24, "K": 7, "C": 18, "M": 28, "X": 12, "U": 17}

TESTS = """
import pytest

pytestmark = pytest.mark.promise("C1")

@pytest.mark.promise("C2", "G3")
def test_one() -> None: ...

class TestMany:
    @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.promise("M26"))])
    def test_two(self, x: int) -> None: ...
"""


def test_every_row_of_the_contract_is_listed_once() -> None:
    rows = read_rows(ROOT / "docs" / "promise" / "rows.toml")
    assert list(rows) == [f"{letter}{number}" for letter, last in COUNTS.items() for number in range(1, last + 1)]
    assert all(row.promise.endswith(".") and len(row.promise) <= 120 for row in rows.values())


def test_ids_are_found_on_tests_on_parameters_and_on_whole_files(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(TESTS)
    assert collect(tmp_path / "tests") == {
        "C1": ["tests/test_a.py"],
        "C2": ["tests/test_a.py::test_one"],
        "G3": ["tests/test_a.py::test_one"],
        "M26": ["tests/test_a.py::TestMany::test_two"],
    }


def test_an_id_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("pytestmark = pytest.mark.promise(NAME)\n")
    with pytest.raises(SystemExit, match="plain string"):
        collect(tmp_path / "tests")


@pytest.mark.parametrize(
    ("state", "tests_of", "words"),
    [
        ("done", {}, "no test carries it"),
        ("begun", {}, "no test carries it"),
        ("open", {"C1": ["tests/a.py::b"]}, "called open"),
        ("perhaps", {}, "'perhaps'"),
        ("open", {"Z9": ["tests/a.py::b"]}, "Z9"),
    ],
)
def test_a_claim_that_does_not_hold_is_named(state: str, tests_of: dict[str, list[str]], words: str) -> None:
    [said] = complaints({"C1": Row("A promise.", state)}, tests_of)
    assert words in said


def test_a_claim_that_holds_is_fine() -> None:
    rows = {"C1": Row("A promise.", "done"), "C2": Row("Another.", "begun"), "C3": Row("A third.", "open")}
    assert list(complaints(rows, {"C1": ["a"], "C2": ["b"]})) == []


def test_the_page_has_a_line_for_each_promise_with_its_tests() -> None:
    made = page({"C1": Row("A promise.", "done"), "C2": Row("Another.", "open")}, {"C1": ["tests/a.py::b"]})
    assert "| C1 | A promise. | done | `tests/a.py::b` |\n| C2 | Another. | open |  |\n" in made
    assert "2 promises: 1 done, 0 begun, 1 open." in made


TIERS = Tiers({"test_a.py::test_one": 0, "test_a.py::TestMany::*": 1, "test_gone.py": 0}, {"quick": {}, "deep": {}})


def test_a_promise_with_deep_tests_alone_and_a_pattern_without_a_test_are_reported(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(TESTS)
    rows = {name: Row("It holds.", state) for name, state in [("C1", "done"), ("C2", "done"), ("G3", "begun")]}
    rows["M26"] = Row("It holds.", "done")
    tests = defined_in(tmp_path / "tests")
    assert tests == {"test_a.py": ["test_one", "TestMany::test_two"]}
    # C1 is carried by the whole file, M26 by a test of which one parametrization is quick.
    assert list(tier_complaints(rows, collect(tmp_path / "tests"), TIERS, tests)) == [
        "tests/tiers.toml: no test matches 'test_gone.py'; was it renamed?",
        "C2 is done, and all its tests are deep; tests/tiers.toml must leave one in the quick tier",
    ]
