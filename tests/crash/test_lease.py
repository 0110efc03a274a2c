"""Taking, renewing and releasing a run, cut short at every operation; and a commit behind its fence."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.scenes import ROOT, UNFINISHED, look, names_below, save
from unbroken.disk import Disk
from unbroken.errors import LeaseLost, RunHeld, StorageError
from unbroken.files import Files
from unbroken.records.lease import Holder, Lease, acquire, read_current, release, renew, require_held
from unbroken.store.directory import Store
from unbroken.testing import ERRORS, Kill, MemoryDisk, Trial, crash_points, crash_states

RUN = Path("/run")
KILLS = (Kill("before"), Kill("during"), Kill("after"))


def _holder(pid: int) -> Holder:
    return Holder("host", pid, f"started-{pid}")


def _all_are_gone(holder: Holder) -> str:
    return ""


def _all_run(holder: Holder) -> str:
    return f"started-{holder.pid}"


def _take(files: Files, pid: int) -> Lease:
    return acquire(RUN, _holder(pid), token=f"t{pid}", now_s=float(pid), process_of=_all_are_gone, files=files)


def _run_with(jobs: int) -> Callable[[], MemoryDisk]:
    def fresh() -> MemoryDisk:
        disk = MemoryDisk([RUN])
        for pid in range(1, jobs + 1):
            _take(Files(disk), pid)
        disk.sync_all()
        return disk

    return fresh


def _acquire(disk: Disk) -> Lease:
    return _take(Files(disk), 99)


def _renew(disk: Disk) -> Lease:
    held = read_current(RUN, Files(disk))
    assert held is not None
    return renew(RUN, held, now_s=100.0, files=Files(disk))


def _release(disk: Disk) -> None:
    held = read_current(RUN, Files(disk))
    assert held is not None
    release(RUN, held, now_s=100.0, files=Files(disk))


actions = pytest.mark.parametrize(
    ("jobs", "action"),
    [(0, _acquire), (1, _acquire), (7, _acquire), (1, _renew), (7, _renew), (1, _release)],
    ids=["first take", "take over", "take over the eighth time", "renew", "renew the seventh", "release"],
)


def _examine(disk: MemoryDisk, trial: Trial[MemoryDisk], jobs: int) -> None:
    files = Files(disk)
    current = read_current(RUN, files)
    before = jobs
    assert (current.number if current else 0) in (before, before + 1), "the number went back"
    if current is not None:
        assert current.token != "unknown", "the lease cannot be read"
    if isinstance(trial.returned, Lease):
        assert current == trial.returned, "what was promised to the holder is not what stands there"
    successor = _take(files, 200)
    assert successor.number > (current.number if current else 0)
    with pytest.raises(RunHeld):
        acquire(RUN, _holder(201), token="late", now_s=200.0, process_of=_all_run, files=files)
    _take(files, 202)
    left = [name for name in names_below(disk, RUN) if name.startswith(UNFINISHED)]
    assert not left, f"{left} is left after two more jobs"


@actions
@pytest.mark.promise("X7")
def test_a_kill_leaves_a_run_that_the_next_job_can_take(jobs: int, action: Callable[[Disk], object]) -> None:
    for trial in crash_points(_run_with(jobs), action, KILLS):
        _examine(trial.disk, trial, jobs)


@actions
@pytest.mark.promise("X7")
def test_a_power_cut_never_takes_back_a_number_that_was_given(jobs: int, action: Callable[[Disk], object]) -> None:
    for trial in crash_points(_run_with(jobs), action):
        for words, disk in crash_states(trial.disk):
            try:
                _examine(disk, trial, jobs)
            except AssertionError as problem:
                raise AssertionError(f"{trial}, then {words}: {problem}") from problem


@actions
@pytest.mark.promise("X7")
def test_an_io_error_is_reported_and_the_next_job_can_take_the_run(jobs: int, action: Callable[[Disk], object]) -> None:
    for trial in crash_points(_run_with(jobs), action, ERRORS):
        assert trial.is_finished or isinstance(trial.raised, StorageError), str(trial)
        _examine(trial.disk, trial, jobs)


@pytest.mark.promise("C2")
def test_a_job_that_was_taken_for_dead_commits_nothing() -> None:
    files = Files(_run_with(1)())
    store = Store(ROOT, files)
    save(store, 10, "a")
    mine = read_current(RUN, files)
    assert mine is not None
    require_held(RUN, mine, files)
    _take(files, 2)
    with pytest.raises(LeaseLost):
        save(store, 20, "b", fence=lambda: require_held(RUN, mine, files))
    assert look(store) == ((10, "a"), ())
