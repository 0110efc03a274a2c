"""Which loader is exact when: measured, compared with what is said, and kept as the table of docs/loaders.md.

``UNBROKEN_WRITE_DOCS=1`` writes the table anew.
"""

import os
from pathlib import Path

import pytest

from tests.exact import loading
from tests.exact.forks import forked_each

PAGE = Path(__file__).parents[2] / "docs" / "loaders.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
NAMES = {"Accelerate": "`DataLoader` prepared by Accelerate", "Fabric": "`DataLoader` set up by Lightning Fabric"}
HEAD = """\
| loader | dataset | `num_workers` | `persistent_workers` | exact | how it resumes |
|---|---|---|---|---|---|
"""


def row(case: loading.Case, count: int, how: str) -> str:
    name = NAMES.get(case.loader, f"`{case.loader}`") + ("" if case.in_order else ", `in_order=False`")
    kept = "-" if not case.workers else "yes" if case.persistent else "no"
    exact = "yes" if count == 0 else "**no; a warning says so**"
    way = {"own state": "from its own state", "replayed": "replays its epoch"}[how]
    return f"| {name} | {case.dataset} | {case.workers} | {kept} | {exact} | {way} |\n"


@pytest.mark.promise("U10")
def test_a_loader_with_random_augmentation_is_exact_or_reported_as_not(tmp_path: Path) -> None:
    work = [(case, str(tmp_path / str(number))) for number, case in enumerate(loading.CASES)]
    rows = []
    for case, each in zip(loading.CASES, forked_each(loading.differing, work), strict=True):
        count, how, said = each.required()
        if case.in_order:
            assert count == 0, f"{count} of {loading.TOTAL} batches differ: {case}"
            assert not any("not exact" in line for line in said), case
        else:
            # Which worker is first is chance, so that it may even agree.
            count = loading.TOTAL
            assert any("not exact" in line and "in_order=True" in line for line in said), case
        is_restarted = case.persistent and how == "replayed"
        assert any("restarted at each epoch" in line for line in said) == is_restarted, case
        rows.append(row(case, count, how))
    require_table(BEGIN, HEAD + "".join(rows), END)


def require_table(begin: str, table: str, end: str) -> None:
    """That the page has this table between these lines."""
    page = PAGE.read_text()
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    made = before + begin + table + end + after
    if os.environ.get("UNBROKEN_WRITE_DOCS"):
        PAGE.write_text(made)
    assert page == made or os.environ.get("UNBROKEN_WRITE_DOCS"), (
        "docs/loaders.md: UNBROKEN_WRITE_DOCS=1 writes it anew"
    )


@pytest.mark.promise("U10")
def test_another_number_of_workers_is_reported_or_refused(tmp_path: Path) -> None:
    work = [(kind, str(tmp_path / kind)) for kind in ("DataLoader", "StatefulDataLoader")]
    replayed, stateful = (each.required() for each in forked_each(loading.resized, work))
    assert replayed == ["num_workers was 1 and is 2: not exact if the dataset draws random numbers or is iterable"]
    assert stateful == [
        "data: num_workers was 1 in the checkpoint and is 2; a StatefulDataLoader resumes only with the same number"
    ]
