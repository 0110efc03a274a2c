"""Saves straight to an object store, met by a kill, a refusal and a power cut at every operation; and by another job.

The object store is a directory of a disk in memory, written through the same client calls as a bucket.
"""

import random
from pathlib import Path

import pytest

from tests.crash.scenes import PARTS, content, look
from unbroken.disk import Disk
from unbroken.errors import EvidenceMissing, StorageError, Superseded, UnbrokenError
from unbroken.files import Files
from unbroken.mirror.address import parse_address
from unbroken.mirror.client import Client, open_client
from unbroken.mirror.direct import DirectStore, open_direct
from unbroken.mirror.remote import store_at
from unbroken.mirror.transfer import LEAST_MEMORY_BYTES, Limits
from unbroken.store.choose import quarantine
from unbroken.store.commit import Record
from unbroken.store.directory import Store
from unbroken.store.keep import LastK
from unbroken.store.manifest import Part
from unbroken.store.mirrored import read_direct, write_direct
from unbroken.store.names import PERIODIC, Begun
from unbroken.store.rewind import rewind
from unbroken.store.scan import newest_first, scan
from unbroken.store.sweep import pin, pinned_ids, unpin
from unbroken.testing import ERRORS, Killed, MemoryDisk, crash_points, crash_states

URL = "file:///shared/run/checkpoints"
RUN = Path("/scratch/run/checkpoints")


def client_on(disk: Disk) -> Client:
    return open_client(parse_address(URL), Files(disk))


def there(disk: Disk) -> Store:
    return store_at(client_on(disk))


def opened(disk: Disk, job: str, *, keep: int = 1) -> DirectStore:
    """What a job does when it starts: from now on it holds the run."""
    direct = open_direct(client_on(disk), job, Limits(LEAST_MEMORY_BYTES), is_first=True)
    direct.keep((LastK(keep),), resume_target=None, fence=None)
    return direct


def written(direct: DirectStore, step: int, job: str) -> tuple[Begun, list[Part]]:
    begun = direct.begin(step, PERIODIC, coming_bytes=1000, coming_files=3)
    draft = direct.draft(begun, coming_bytes=1000)
    try:
        return begun, [draft.write_part(part, [content(step, job, part)]) for part in PARTS]
    except UnbrokenError:
        draft.discard()
        raise


def committed(direct: DirectStore, begun: Begun, parts: list[Part]) -> str:
    try:
        record = Record(kind=PERIODIC, saved_at_ns=begun.step)
        return direct.commit(begun, plan=PARTS, parts=parts, record=record)
    except UnbrokenError:
        direct.draft(begun, coming_bytes=1000).discard()
        raise


def save(disk: Disk, step: int, job: str) -> None:
    direct = opened(disk, job)
    direct.settle(committed(direct, *written(direct, step, job)))


def with_a_checkpoint() -> MemoryDisk:
    """One checkpoint, and what a job that was killed in a later save has left."""
    disk = MemoryDisk()
    save(disk, 10, "a")
    written(opened(disk, "killed"), 20, "killed")
    disk.sync_all()
    return disk


def saves(disk: Disk) -> None:
    save(disk, 20, "b")


def require_one_of_two(disk: Disk, where: str) -> None:
    found, passed = look(there(disk))
    assert found in ((10, "a"), (20, "b")) and not passed, where


@pytest.mark.promise("G3", "C4", "X7")
def test_a_kill_at_any_operation_of_a_direct_save_leaves_the_old_checkpoint_or_the_new_one() -> None:
    for trial in crash_points(with_a_checkpoint, saves):
        assert trial.is_finished or isinstance(trial.raised, Killed)
        require_one_of_two(trial.disk, str(trial))
        save(trial.disk, 30, "c")
        assert look(there(trial.disk)) == ((30, "c"), ()), str(trial)
        after = scan(there(trial.disk))
        # What was unfinished is gone, but for a name that its writer may still be using.
        assert after.committed == ("checkpoint-30",), str(trial)
        left = (*after.uploading, *after.foreign)
        assert not any(list(client_on(trial.disk).listing(name)) for name in left), str(trial)
        assert client_on(trial.disk).find(".mirror/claims/checkpoint-20") is not None, str(trial)


@pytest.mark.promise("C4", "X7")
def test_a_power_cut_at_any_operation_of_a_direct_save_leaves_the_old_checkpoint_or_the_new_one() -> None:
    for trial in crash_points(with_a_checkpoint, saves):
        for words, disk in crash_states(trial.disk, random.Random(str(trial)), subsets=2):
            require_one_of_two(disk, f"{trial}, then {words}")


@pytest.mark.promise("C4")
def test_a_refusal_at_any_operation_of_a_direct_save_is_reported_and_the_next_save_works() -> None:
    for trial in crash_points(with_a_checkpoint, saves, ERRORS):
        assert trial.is_finished or isinstance(trial.raised, StorageError), str(trial)
        require_one_of_two(trial.disk, str(trial))
        save(trial.disk, 30, "c")
        assert look(there(trial.disk)) == ((30, "c"), ()), str(trial)


# ---- two jobs ----


@pytest.mark.promise("C4")
def test_a_job_that_another_one_overtook_between_its_parts_and_its_manifest_commits_nothing() -> None:
    disk = with_a_checkpoint()
    slow = opened(disk, "slow")
    begun, parts = written(slow, 20, "slow")
    fast = opened(disk, "fast")
    with pytest.raises(Superseded, match="fast"):
        committed(slow, begun, parts)
    assert slow.lost is not None
    assert look(there(disk)) == ((10, "a"), ())
    with pytest.raises(Superseded):
        slow.begin(30, PERIODIC, coming_bytes=1, coming_files=1)
    # The slow one may still be sending under its name.
    begun, parts = written(fast, 20, "fast")
    assert begun.place != "checkpoint-20"
    committed(fast, begun, parts)
    assert look(there(disk)) == ((20, "fast"), ())


def test_the_parts_of_a_newer_job_are_not_taken_for_leavings() -> None:
    disk = with_a_checkpoint()
    older, newer = opened(disk, "older"), opened(disk, "newer")
    begun, parts = written(newer, 20, "newer")
    # Overtaken after its commit and before its sweep.
    older.settle("checkpoint-10")
    committed(newer, begun, parts)
    assert look(there(disk)) == ((20, "newer"), ())


@pytest.mark.promise("G3")
def test_a_manifest_needs_every_part_of_the_plan_as_it_was_reported() -> None:
    disk = with_a_checkpoint()
    direct = opened(disk, "b")
    begun, parts = written(direct, 20, "b")
    with pytest.raises(EvidenceMissing) as refused:
        direct.commit(begun, plan=PARTS, parts=parts[:-1], record=Record(kind=PERIODIC, saved_at_ns=1))
    assert f"{PARTS[-1]}: planned and not reported by its writer" in refused.value.missing
    client_on(disk).delete([f"{begun.place}/{PARTS[0]}"])
    with pytest.raises(EvidenceMissing) as refused:
        direct.commit(begun, plan=PARTS, parts=parts, record=Record(kind=PERIODIC, saved_at_ns=1))
    assert refused.value.missing == (f"{PARTS[0]}: reported and not on disk",)
    assert look(there(disk)) == ((10, "a"), ())


# ---- records there ----


def with_two() -> MemoryDisk:
    disk = with_a_checkpoint()
    direct = opened(disk, "b", keep=5)
    committed(direct, *written(direct, 20, "b"))
    disk.sync_all()
    return disk


def keeps_records(disk: Disk) -> None:
    """A pin, a quarantine, a rewind, and where the checkpoints are."""
    store = there(disk)
    pin(store, "checkpoint-10", reason="mine", job="b", at_ns=1)
    unpin(store, "checkpoint-10")
    quarantine(store, "checkpoint-20.2", ("rot",), job="b", at_ns=1)
    rewind(store, newest_first(store, scan(store).committed), target="checkpoint-10", job="b", at_ns=1, request="10")
    local = Store(RUN, Files(disk))
    write_direct(local, URL, job="b")
    write_direct(local, None, job="b")


@pytest.mark.promise("X7")
def test_records_in_an_object_store_are_there_whole_or_not_at_all() -> None:
    for trial in crash_points(with_two, keeps_records):
        store = there(trial.disk)
        found = scan(store)
        assert ("checkpoint-20.2" in found.committed) != ("checkpoint-20.2" in found.quarantined), str(trial)
        assert pinned_ids(store) <= {store.read_manifest("checkpoint-10").id}
        assert read_direct(Store(RUN, Files(trial.disk))) in (None, URL)
        keeps_records(trial.disk)
        assert look(there(trial.disk)) == ((10, "a"), ()), str(trial)
