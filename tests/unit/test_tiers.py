"""Which tests a tier takes, and what a run says of directories that cost too much."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import hypothesis
import pytest
from hypothesis import strategies as st

from tests import conftest
from tests.tiers import (
    CI_CPU_S,
    FAILS_OVER,
    QUICK_CPU_S,
    SERVERS,
    Tiers,
    directory,
    over_budget,
    quick,
    read_tiers,
    spread,
)

ROOT = Path(__file__).resolve().parents[2]

# Ten tests of which one burns half a CPU second in a process that it starts, and one in a process that stays.
COSTLY = """
import multiprocessing
import subprocess
import sys
import time

import pytest

BURN = "import time\\nwhile time.process_time() < 0.5: pass"


def burn():
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass


@pytest.mark.parametrize("number", range(8))
def test_cheap(number):
    pass


def test_in_a_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)


def test_in_a_child_of_the_fork_server():
    child = multiprocessing.get_context("forkserver").Process(target=burn)
    child.start()
    child.join()
"""
PLUGIN = """
from tests.spent import Account, Meter
from tests.tiers import Tiers


def pytest_configure(config):
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Meter())
    if not is_worker:
        budgets = {{"part": {budget_s}, "fork servers": 60}}
        config.pluginmanager.register(Account(Tiers({{}}, {{"deep": budgets}}), "deep"))
"""


@pytest.mark.parametrize("workers", [("-p", "no:xdist"), ("-n", "2")], ids=["one process", "workers"])
@pytest.mark.parametrize(("budget_s", "code"), [(0.5, 1), (60, 0)])
def test_a_directory_far_over_its_budget_fails_a_green_run(
    workers: tuple[str, ...], budget_s: float, code: int, tmp_path: Path
) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "test_costly.py").write_text(COSTLY)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "costing.py").write_text(PLUGIN.format(budget_s=budget_s))
    command = [sys.executable, "-m", "pytest", *workers, "-p", "costing", "-p", "no:cacheprovider"]
    environment = {**conftest.without_pytest(), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert "10 passed" in ended.stdout
    assert ("FAR OVER budget: tests/part took" in ended.stdout) == bool(code)
    for unit in ("CPU seconds", "seconds on the wall clock"):
        slowest = ended.stdout.partition(f"the 10 slowest, in {unit}")[2].splitlines()[1:3]
        tests = {line.rpartition("::")[2] for line in slowest}
        assert tests == {"test_in_a_child", "test_in_a_child_of_the_fork_server"}, ended.stdout


def test_a_little_over_a_budget_is_reported_and_fails_no_run() -> None:
    tiers = Tiers({}, {"quick": {"crash": 10.0}, "deep": {}})
    spent_s = {"crash": 10.0, "new": 0.1}
    assert [(each.said, each.fails) for each in over_budget(tiers, "quick", spent_s.items())] == [
        ("tests/new took 0 CPU seconds and has no budget in tests/tiers.toml", True)
    ]
    found = [
        over_budget(tiers, "quick", [("crash", seconds)]) for seconds in (10.1, 10 * FAILS_OVER, 10 * FAILS_OVER + 0.1)
    ]
    assert [each.fails for [each] in found] == [False, False, True]


TABLE = Tiers({"*/test_long.py": 0, "crash/*": 2, "crash/test_b.py::test_whole": 0}, {"quick": {}, "deep": {}})


@pytest.mark.parametrize(
    ("file", "test", "kept"),
    [
        ("unit/test_a.py", "test_it", None),
        ("crash/test_a.py", "test_it", 2),
        ("crash/test_b.py", "test_it", 2),
        ("crash/test_b.py", "test_whole", 0),
        ("exact/test_long.py", "TestIt::test_it", 0),
        ("crash/test_long.py", "test_it", 2),
    ],
)
def test_the_last_pattern_that_matches_counts(file: str, test: str, kept: int | None) -> None:
    assert TABLE.kept(file, test) == kept


def test_parametrizations_that_stay_are_spread_evenly() -> None:
    tests = [("crash/test_a.py", "test_it")] * 9 + [("unit/test_a.py", "test_it")] * 2
    assert [place for place, is_quick in enumerate(quick(TABLE, tests)) if is_quick] == [0, 4, 9, 10]
    assert spread(3, 5) == {0, 1, 2}
    assert spread(3, 0) == set()


def test_a_test_has_the_budget_of_its_directory() -> None:
    assert directory("unit/store/test_a.py") == directory("unit/store/deeper/test_a.py") == "unit/store"
    assert directory("e2e/slurm/test_a.py") == "e2e"
    assert directory("unit/test_a.py") == "unit"


def test_every_directory_has_a_budget() -> None:
    found = {directory(path.relative_to(ROOT / "tests").as_posix()) for path in (ROOT / "tests").rglob("test_*.py")}
    tiers = read_tiers()
    assert found | {SERVERS} == set(tiers.budget_s["quick"]) | set(tiers.budget_s["deep"])


def test_a_run_in_which_no_directory_fails_takes_no_more_than_ci_may() -> None:
    quick_s, deep_s = (sum(read_tiers().budget_s[tier].values()) for tier in ("quick", "deep"))
    assert (quick_s + deep_s) * FAILS_OVER <= CI_CPU_S, f"{quick_s:.0f} + {deep_s:.0f} CPU seconds"
    assert quick_s <= QUICK_CPU_S


@pytest.mark.parametrize(("examples", "fewer"), [(100, 20), (30, 10), (8, 8)])
def test_the_quick_tier_takes_a_fifth_of_the_examples(examples: int, fewer: int) -> None:
    seen: list[int] = []

    @hypothesis.settings(max_examples=examples, database=None, phases=[hypothesis.Phase.generate])
    @hypothesis.given(st.integers())
    def test_it(number: int) -> None:
        seen.append(number)

    conftest.take_fewer_examples(cast(Any, SimpleNamespace(obj=test_it)))
    test_it()
    assert len(seen) == fewer
