"""File systems that lack something or ask twice: everything works on them, and what they lack is said once."""

import errno
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.scenes import ROOT, SCENES, Scene, examine, nobody_is_live, save
from tests.crash.test_lease import RUN, _run_with, _take
from unbroken.disk import Disk
from unbroken.errors import RunHeld
from unbroken.files import Files
from unbroken.records.lease import Holder, Lease, acquire, read_current, release, renew, require_held
from unbroken.records.takeover import take_over
from unbroken.store.directory import Store
from unbroken.store.keep import LastK
from unbroken.store.names import LATEST
from unbroken.store.rewind import abandoned_ids, record_rewind
from unbroken.store.scan import scan
from unbroken.testing import ERRORS, FaultyDisk, Kill, MemoryDisk, Operation, Refuse, Repeat, crash_points
from unbroken.testing.faults import Fault, Plan


def lacking(code: int, *names: str) -> Plan:
    return lambda operation: Refuse(code) if operation.name in names else None


def twice(operation: Operation) -> Fault | None:
    del operation
    return Repeat()


LINKS = "hard links"
SYMLINKS = "symlinks"
SYNC = "directory fsync"
KINDS: dict[str, tuple[Plan, set[str]]] = {
    "vfat": (lacking(errno.EPERM, "link", "make_symlink"), {LINKS, SYMLINKS}),
    "cifs": (lacking(errno.EOPNOTSUPP, "make_symlink"), {SYMLINKS}),
    "fuse": (lacking(errno.ENOSYS, "link", "make_symlink", "sync_directory"), {LINKS, SYMLINKS, SYNC}),
    "no directory fsync": (lacking(errno.EINVAL, "sync_directory"), {SYNC}),
    "nfs that asks twice": (twice, set()),
}
kinds = pytest.mark.parametrize(("plan", "lacks"), KINDS.values(), ids=KINDS.keys())


@kinds
@pytest.mark.parametrize("scene", SCENES, ids=str)
@pytest.mark.promise("U16")
def test_every_move_of_a_store_works_on_every_file_system(scene: Scene, plan: Plan, lacks: set[str]) -> None:
    store = Store(ROOT, Files(FaultyDisk(MemoryDisk(), plan)))
    scene.prepare(store)
    scene.act(store, lambda: None)
    examine(store, scene, must=scene.after, has_symlinks=SYMLINKS not in lacks)


@kinds
@pytest.mark.promise("U16")
def test_saves_are_swept_and_what_is_lacking_is_reported_once(
    plan: Plan, lacks: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    files = Files(FaultyDisk(MemoryDisk([RUN]), plan))
    store = Store(ROOT, files)
    with caplog.at_level(logging.WARNING):
        lease = _take(files, 1)
        for step in (10, 20, 30):
            save(store, step, lease.job, policies=[LastK(1)], live=nobody_is_live)
            lease = renew(RUN, lease, now_s=float(step), files=files)
        require_held(RUN, lease, files)
        release(RUN, lease, now_s=40.0, files=files)
        assert _take(files, 2).number == 2
    assert scan(store).committed == ("checkpoint-30",)
    assert (files.read_link(store.path(LATEST)) is None) is (SYMLINKS in lacks)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(lacks) and all(any(f"has no {lack}: " in line for line in said) for lack in lacks)


@kinds
@pytest.mark.promise("U16")
def test_of_two_contenders_one_gets_the_run_on_every_file_system(plan: Plan, lacks: set[str]) -> None:
    disk = FaultyDisk(MemoryDisk([RUN]), plan)
    files = Files(disk)
    first = _take(files, 1)

    def late(operation: Operation) -> Fault | None:
        # The other one reads the lease, and is overtaken before it creates the next.
        if operation.name == "create" and operation.path.name.startswith(".scratch") and not overtaken:
            overtaken.append(_take(files, 2))
        return None

    overtaken: list[Lease] = []
    with pytest.raises(RunHeld, check=lambda each: each.proof == "contest"):
        _take(Files(FaultyDisk(disk, late)), 3)
    assert overtaken[0].number == first.number + 1 and read_current(RUN, files) == overtaken[0]


def acquire_without_links(disk: Disk) -> Lease:
    """Take a run where the file system has no hard links."""
    return _take(Files(FaultyDisk(disk, lacking(errno.EPERM, "link"))), 99)


@pytest.mark.parametrize("faults", [(Kill("before"), Kill("during"), Kill("after")), ERRORS], ids=["kill", "refusal"])
@pytest.mark.promise("U16", "U6")
def test_a_lease_that_was_claimed_and_never_written_is_watched(faults: tuple[Fault, ...]) -> None:
    empty = 0
    for trial in crash_points(_run_with(1), acquire_without_links, faults):
        files = Files(trial.disk)
        current = read_current(RUN, files)
        assert current is not None and current.number in (1, 2)
        if current.token == "unknown":
            empty += 1
            assert trial.raised is not None and current.number == 2
            with pytest.raises(RunHeld, check=lambda each: each.proof == "unknown"):
                acquire(RUN, Holder("h", 5, "s"), token="n", now_s=0.0, process_of=_gone_if_known, files=files)
        elif trial.is_finished:
            assert current == trial.returned
        assert _take_over(files).number == current.number + 1
    assert empty or not isinstance(faults[0], Kill), "no crash came between the claim and the content"


def _gone_if_known(holder: Holder) -> str | None:
    return None if holder.pid == 0 else ""


def _take_over(files: Files) -> Lease:
    now_s = [0.0]

    def wait(seconds: float) -> None:
        now_s[0] += seconds

    return take_over(
        RUN, Holder("h", 5, "s"), token="n", clock=lambda: 0.0, monotonic=lambda: now_s[0], wait=wait,
        process_of=_gone_if_known, files=files,
    )  # fmt: skip


@pytest.mark.promise("U16")
def test_without_links_a_decision_to_go_back_is_whole_or_absent() -> None:
    def goes_back(disk: Disk) -> None:
        store = Store(ROOT, Files(FaultyDisk(disk, lacking(errno.EPERM, "link"))))
        record_rewind(store, target="checkpoint-10", abandoned={"checkpoint-20": "x"}, job="a", at_ns=1)

    for trial in crash_points(lambda: MemoryDisk([ROOT]), goes_back, (Kill("before"), Kill("during"), *ERRORS)):
        found = abandoned_ids(Store(ROOT, Files(trial.disk)))
        assert found in ({}, {"checkpoint-20": frozenset({"x"})}) and (found or not trial.is_finished), str(trial)


@pytest.mark.promise("U6", "U16")
def test_a_link_that_a_network_file_system_made_twice_is_known_as_our_own(tmp_path: Path) -> None:
    files = Files(FaultyDisk(MemoryDisk([tmp_path]), twice))
    lease = acquire(tmp_path, Holder("h", 1, "s"), token="t", now_s=0.0, files=files)
    assert read_current(tmp_path, files) == lease
    # A name that somebody else holds is not ours, even with the same content.
    create: Callable[..., bool] = files.create_once
    assert create(tmp_path / "a", b"x", scratch=".s") and not create(tmp_path / "a", b"x", scratch=".s")
