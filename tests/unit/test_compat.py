"""The tables of versions say what the recorded results say, and no more."""

import dataclasses
from typing import Any

import pytest

from tests.compat_plugin import PARTS as SORTED
from tests.compat_plugin import part_of
from tools.compat import COLUMNS, PARTS, RESULTS, Result, cell, complaints, page, read_results, with_table
from unbroken.tested_versions import TESTED_PYTHON, TESTED_TORCH

GOOD = Result("2.13.0+cpu", "3.11.7", "CPU", ("tests",), {part: {"passed": 30} for part in PARTS}, ())


def columns(result: Result) -> dict[str, str]:
    return {name: cell(result, parts, needs) for name, parts, needs in COLUMNS}


def with_part(name: str, **counts: Any) -> Result:  # noqa: ANN401
    return dataclasses.replace(GOOD, parts={**GOOD.parts, name: counts})


def test_passed_checks_are_reported_as_working() -> None:
    assert set(columns(GOOD).values()) == {"yes"}


def test_what_failed_was_not_run_or_is_lacking_is_not() -> None:
    assert columns(with_part("ranks", passed=30, failed=2))["`Run`, DDP"] == "2 failed"
    assert columns(with_part("trainer", passed=1, skipped=3))["trainer"] == "not tested"
    assert columns(dataclasses.replace(GOOD, parts={"run": {"passed": 1}}))["`Run`, DDP"] == "not tested"
    found = columns(dataclasses.replace(GOOD, torch="2.8.0"))
    assert (found["`exact`"], found["`exact` with FSDP2"], found["trainer"]) == ("yes", "no", "yes")


def test_every_promised_version_needs_a_result_and_every_failure_is_a_complaint() -> None:
    results = [dataclasses.replace(GOOD, torch=f"{torch}.0") for torch in TESTED_TORCH]
    results += [dataclasses.replace(GOOD, python=f"{python}.0") for python in TESTED_PYTHON]
    assert not list(complaints(results))
    assert any("2.99 was tested and is not named" in each for each in complaints([*results, other("2.99.0")]))
    assert any(f"{TESTED_TORCH[0]} has no recorded" in each for each in complaints(results[1 : len(TESTED_TORCH)]))
    broken = dataclasses.replace(GOOD, failures=("tests/unit/x.py::test_y",))
    assert any("1 tests failed" in each for each in complaints([*results, broken]))


def other(torch: str) -> Result:
    return dataclasses.replace(GOOD, torch=torch)


def test_the_oldest_torch_comes_first_and_the_page_names_every_result(tmp_path: Any) -> None:  # noqa: ANN401
    results = read_results(RESULTS)
    assert [each.order for each in results] == sorted(each.order for each in results)
    text = page(results, "## Notes")
    assert all(each.torch in text for each in results) and text.endswith("## Notes\n")
    assert not read_results(tmp_path)


def test_the_table_replaces_what_is_between_its_marks_alone() -> None:
    readme = "a\n<!-- versions: made by tools/compat.py -->\nold\n<!-- /versions -->\nb\n"
    once = with_table(readme, "new")
    assert "old" not in once and once.startswith("a\n") and once.endswith("\nb\n")
    assert with_table(once, "new") == once


@pytest.mark.parametrize(
    ("node", "part"),
    [
        ("tests/unit/state/test_x.py::test_y", "run"),
        ("tests/distributed/test_run.py::test_y", "ranks"),
        ("tests/distributed/test_gpt.py::test_y", "trainer"),
        ("tests/exact/test_world_size.py::test_y", "exact"),
        ("tests/exact/test_kills.py::test_y", "run"),
    ],
)
def test_each_test_counts_for_the_part_that_it_is_about(node: str, part: str) -> None:
    assert part_of(node) == part
    assert {name for _, name in SORTED} == set(PARTS)
