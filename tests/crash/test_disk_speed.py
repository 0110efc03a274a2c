"""The speed of a disk, measured and killed on the way: the next measurement leaves nothing behind."""

from pathlib import Path

import pytest

from unbroken.disk import Disk
from unbroken.files import Files
from unbroken.store.capacity import PREFIX, write_speed
from unbroken.testing import ERRORS, Kill, MemoryDisk, crash_points, crash_states, tree

ROOT = Path("/runs")
KEPT = ROOT / ".unbroken-notes"


def with_a_leftover() -> MemoryDisk:
    """A folder in which a measurement was killed, beside a file of somebody else."""
    disk = MemoryDisk([ROOT])
    for path in (ROOT / f"{PREFIX}dead", KEPT):
        Files(disk).write_new(path, [b"half"])
    disk.sync_all()
    return disk


def measures(disk: Disk, token: str = "mine") -> float:
    """Measure over a clock that ticks a second a look."""
    ticks = iter(range(100))
    content, size = lambda size: bytes(size), 64
    clock = lambda: float(next(ticks))  # noqa: E731
    return write_speed(ROOT, clock=clock, token=token, content=content, files=Files(disk), size_bytes=size)


def test_the_speed_is_bytes_by_the_time_they_took() -> None:
    assert measures(with_a_leftover()) == 64.0


@pytest.mark.promise("X7")
def test_after_every_crash_the_next_measurement_leaves_nothing() -> None:
    trials = 0
    for trial in crash_points(with_a_leftover, measures, (Kill("before"), Kill("during"), *ERRORS)):
        for words, disk in (("the process was killed", trial.disk), *crash_states(trial.disk)):
            measures(disk, "next")
            assert [Path(name).name for name in tree(disk) if "unbroken" in str(name)] == [KEPT.name], (
                str(trial),
                words,
            )
            trials += 1
    assert trials > 10
