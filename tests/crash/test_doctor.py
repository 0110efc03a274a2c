"""``doctor`` killed at any operation: an hour later the next call leaves nothing, and touches nothing of others."""

import itertools
from pathlib import Path

import pytest

from unbroken.disk import Disk
from unbroken.doctor.file_system import PREFIX, Surroundings, examine
from unbroken.doctor.self_test_process import Combination, SelfTestReport, find_kept, keep
from unbroken.files import Files
from unbroken.testing import ERRORS, Kill, MemoryDisk, crash_points, tree

ROOT = Path("/runs")
CACHE = Path("/home/.cache/unbroken")
KEPT = ROOT / f"{PREFIX}notes"
REPORT = SelfTestReport({"torch": "2.13.0"}, (Combination("sharded", "bfloat16", "exact"),))
_HOUR_NS = 3600 * 10**9


class _Clock:
    def __init__(self) -> None:
        self.now_ns = 10 * _HOUR_NS

    def __call__(self) -> int:
        self.now_ns += 1
        return self.now_ns


CLOCK = _Clock()


def with_leftovers() -> MemoryDisk:
    """A folder in which an earlier call was killed, beside a file of somebody else."""
    disk = MemoryDisk([ROOT, CACHE.parent], now_ns=CLOCK)
    files = Files(disk)
    files.make_directory(ROOT / f"{PREFIX}{'0' * 16}")
    files.write_new(ROOT / f"{PREFIX}{'0' * 16}" / "file", [b"half"])
    files.write_new(KEPT, [b"mine"])
    disk.sync_all()
    CLOCK.now_ns += 2 * _HOUR_NS
    return disk


def examines(disk: Disk, token: str = "a" * 16) -> list[str]:
    ticks = itertools.count()
    around = Surroundings(lambda: CLOCK.now_ns / 1e9, lambda: float(next(ticks)), token, bytes, "", speed_bytes=64)
    return [each.subject for each in examine(ROOT, around, Files(disk, logs_lacking=False))]


def keeps_a_result(disk: Disk) -> bool:
    return keep(REPORT, CACHE, Files(disk))


@pytest.mark.promise("X7")
def test_after_every_crash_a_later_call_leaves_nothing() -> None:
    trials = 0
    for trial in crash_points(with_leftovers, examines, (Kill("before"), Kill("during"), *ERRORS)):
        CLOCK.now_ns += 2 * _HOUR_NS
        examines(trial.disk, "b" * 16)
        assert [Path(name).name for name in tree(trial.disk) if "unbroken-doctor" in str(name)] == [KEPT.name], str(
            trial
        )
        trials += 1
    assert trials > 50


@pytest.mark.promise("X7")
def test_a_result_is_kept_whole_or_not_at_all() -> None:
    kept = set()
    for trial in crash_points(with_leftovers, keeps_a_result, (Kill("before"), Kill("during"), *ERRORS)):
        found = find_kept(REPORT.key, CACHE, Files(trial.disk))
        assert found in (None, REPORT)
        kept.add(found is not None)
        assert keeps_a_result(trial.disk) and find_kept(REPORT.key, CACHE, Files(trial.disk)) == REPORT
    assert kept == {True, False}
