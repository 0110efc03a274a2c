"""Mirroring and fetching, met by a kill, a refusal and a power cut at every file operation, here and in the mirror.

Run and mirror are two directories of one disk in memory, so that a cut can fall between the two.
"""

import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.scenes import FOREIGN, PARTS, look, nobody_is_live, save, write_foreign
from unbroken.disk import Disk
from unbroken.errors import DamagedCheckpoint, StorageError
from unbroken.files import Files
from unbroken.mirror.address import parse_address
from unbroken.mirror.background import Mirror, pending
from unbroken.mirror.bring_back import Taking, bring_back, repair
from unbroken.mirror.client import open_client
from unbroken.mirror.fetch import command_job, fetch_checkpoint, sweep_own_drafts
from unbroken.mirror.ownership import push_rewinds, require_own
from unbroken.mirror.remote import store_at
from unbroken.mirror.remove import remove_checkpoints
from unbroken.mirror.transfer import LEAST_MEMORY_BYTES, Limits
from unbroken.mirror.upload import upload_checkpoint
from unbroken.store.check import Level, verify
from unbroken.store.commit import begin
from unbroken.store.digest import digest_bytes
from unbroken.store.directory import Store
from unbroken.store.keep import LastK
from unbroken.store.mirrored import forget_uploads, mirrored_ids, write_mirrors
from unbroken.store.names import scratch
from unbroken.store.rewind import rewind
from unbroken.store.scan import newest_first, scan
from unbroken.store.sweep import settle
from unbroken.testing import ERRORS, Killed, MemoryDisk, crash_points, crash_states

RUN = Path("/scratch/run/checkpoints")
URL = "file:///shared/mirror"
THERE = Path("/shared/mirror/checkpoints")
# One object at a time, so that every attempt does the same operations in the same order.
LIMITS = Limits(LEAST_MEMORY_BYTES)
HOST = "node-1"


def here(disk: Disk) -> Store:
    return Store(RUN, Files(disk))


def mirror_on(disk: Disk) -> Mirror:
    address = parse_address(URL)
    return Mirror(address, open_client(address.below("checkpoints"), Files(disk)))


def there(disk: Disk) -> Store:
    return store_at(mirror_on(disk).client)


def mirrors_everything(disk: Disk) -> None:
    """What a job's thread does: the prefix, the ledger, then each pending checkpoint."""
    store, mirror = here(disk), mirror_on(disk)
    require_own(store, mirror.client, new_id="run-1", job="m")
    write_mirrors(store, [URL], job="m")
    push_rewinds(store, mirror.client, mirror.address)
    for name in pending(store, URL):
        upload_checkpoint(store, name, mirror.client, URL, LIMITS, job="m", clock_ns=lambda: 1)


def two_checkpoints() -> MemoryDisk:
    disk = MemoryDisk()
    # The directory that the mirror is made in is there: it is never made.
    Files(disk).make_directory(Path("/shared"), durable=True)
    save(here(disk), 10, "a")
    save(here(disk), 20, "b")
    write_foreign(Files(disk), RUN)
    disk.sync_all()
    return disk


def with_a_ledger() -> MemoryDisk:
    """Two checkpoints, of which a mirror has the first, and a third that a rewind gave up."""
    disk = two_checkpoints()
    store = here(disk)
    save(store, 30, "c")
    rewind(store, newest_first(store, scan(store).committed), target="checkpoint-20", job="m", at_ns=1)
    require_own(store, mirror_on(disk).client, new_id="run-1", job="m")
    write_mirrors(store, [URL], job="m")
    upload_checkpoint(store, "checkpoint-10", mirror_on(disk).client, URL, LIMITS, job="m", clock_ns=lambda: 1)
    disk.sync_all()
    return disk


def with_an_empty_mirror() -> MemoryDisk:
    """Two checkpoints that both wait for their first upload."""
    disk = two_checkpoints()
    require_own(here(disk), mirror_on(disk).client, new_id="run-1", job="m")
    write_mirrors(here(disk), [URL], job="m")
    disk.sync_all()
    return disk


def require_sound(disk: Disk, where: str) -> None:
    """What must hold after any cut: nothing is called mirrored that is not, and nothing that is not is swept."""
    store, remote = here(disk), there(disk)
    for name in scan(remote).committed:
        assert verify(remote, name, Level.FULL).is_sound, f"{where}: the mirror shows a broken {name}"
    copies = {remote.read_manifest(name).id for name in scan(remote).committed}
    assert mirrored_ids(store, URL) <= copies, f"{where}: called mirrored and is not"
    found, passed = look(store)
    assert (found, passed) == ((20, "b"), ()), where


@pytest.mark.promise("C4", "M9", "X7")
@pytest.mark.parametrize("fresh", [two_checkpoints, with_a_ledger], ids=["first", "again"])
def test_a_kill_at_any_operation_of_a_mirroring_loses_nothing_and_calls_nothing_mirrored_too_early(
    fresh: Callable[[], MemoryDisk],
) -> None:
    for trial in crash_points(fresh, mirrors_everything):
        assert trial.is_finished or isinstance(trial.raised, Killed)
        require_sound(trial.disk, str(trial))
        mirrors_everything(trial.disk)
        require_sound(trial.disk, f"{trial}, then again")
        assert not pending(here(trial.disk), URL)


@pytest.mark.promise("C4", "M9", "X7")
def test_a_power_cut_at_any_operation_of_a_mirroring_leaves_a_true_ledger() -> None:
    for trial in crash_points(two_checkpoints, mirrors_everything):
        for words, disk in crash_states(trial.disk, random.Random(str(trial)), subsets=2):
            require_sound(disk, f"{trial}, then {words}")


@pytest.mark.promise("C4", "M9")
def test_a_refusal_at_any_operation_is_reported_and_never_counts_as_mirrored() -> None:
    for trial in crash_points(two_checkpoints, mirrors_everything, ERRORS):
        assert trial.is_finished or isinstance(trial.raised, StorageError), str(trial)
        require_sound(trial.disk, str(trial))
        mirrors_everything(trial.disk)
        assert not pending(here(trial.disk), URL)


@pytest.mark.promise("M9", "M26", "C17")
def test_a_sweep_after_any_kill_of_a_mirroring_keeps_what_the_mirror_lacks() -> None:
    for trial in crash_points(with_an_empty_mirror, mirrors_everything):
        store = here(trial.disk)
        waiting = pending(store, URL)
        decision, _ = settle(store, "checkpoint-20", (LastK(1),), job="next", is_live=nobody_is_live)
        left = scan(store).committed
        assert set(waiting) <= set(left), str(trial)
        assert all(name in waiting or name == "checkpoint-20" for name in left), str(trial)
        assert set(decision.held) == set(waiting) - {"checkpoint-20"}


# ---- back ----


def wiped() -> MemoryDisk:
    """A mirror with two checkpoints and a rewind, and an older local store: another machine, or an old scratch disk."""
    disk = with_a_ledger()
    mirrors_everything(disk)
    files = Files(disk)
    files.remove_tree(RUN)
    save(here(disk), 10, "a")
    write_foreign(files, RUN)
    disk.sync_all()
    return disk


def damaged() -> MemoryDisk:
    """The newest local checkpoint has a wrong part and one too few; the mirror has it whole."""
    disk = two_checkpoints()
    mirrors_everything(disk)
    files = Files(disk)
    bad = RUN / "checkpoint-20"
    files.remove_file(bad / PARTS[0])
    files.remove_file(bad / PARTS[1])
    files.write_new(bad / PARTS[1], [b"rot"])
    disk.sync_all()
    return disk


def brings_back(disk: Disk) -> None:
    bring_back(here(disk), [mirror_on(disk)], Taking("next", lambda: 1, LIMITS), refused=lambda mirror, error: None)


def wiped_with_a_damaged_copy() -> MemoryDisk:
    """Nothing is here but the ledger, and of the newest checkpoint the mirror's copy is damaged."""
    disk = two_checkpoints()
    mirrors_everything(disk)
    files = Files(disk)
    for name in ("checkpoint-10", "checkpoint-20"):
        files.remove_tree(RUN / name)
    files.replace(THERE / "checkpoint-20" / PARTS[1], b"rot", scratch=".x")
    disk.sync_all()
    return disk


def repairs(disk: Disk) -> None:
    repair(here(disk), "checkpoint-20", [mirror_on(disk)], Taking("next", lambda: 1, LIMITS))


@pytest.mark.promise("C4", "M26", "X7")
def test_a_kill_at_any_operation_of_a_fetch_leaves_the_old_copy_or_the_new_one() -> None:
    for trial in crash_points(wiped, brings_back):
        found, passed = look(here(trial.disk))
        assert found == ((20, "b") if trial.is_finished else found), str(trial)
        assert found in ((10, "a"), (20, "b")) and not passed, str(trial)
        brings_back(trial.disk)
        assert look(here(trial.disk)) == ((20, "b"), ())
        assert all(trial.disk.status(RUN / name) for name in FOREIGN)


@pytest.mark.promise("C4", "X7")
def test_a_power_cut_at_any_operation_of_a_fetch_leaves_the_old_copy_or_the_new_one() -> None:
    for trial in crash_points(wiped, brings_back):
        for words, disk in crash_states(trial.disk, random.Random(str(trial)), subsets=2):
            found, passed = look(here(disk))
            assert found in ((10, "a"), (20, "b")) and not passed, f"{trial}, then {words}"


@pytest.mark.promise("C4", "M26", "X7")
def test_a_kill_at_any_operation_of_a_fetch_that_skips_a_damaged_copy_leaves_none_or_the_one_before() -> None:
    for trial in crash_points(wiped_with_a_damaged_copy, brings_back):
        found, passed = look(here(trial.disk))
        assert found in (None, (10, "a")) and not passed, str(trial)
        assert found is not None or not trial.is_finished, str(trial)
        brings_back(trial.disk)
        assert look(here(trial.disk)) == ((10, "a"), ())
        # The damaged copy is none.
        assert mirrored_ids(here(trial.disk), URL) == {there(trial.disk).read_manifest("checkpoint-10").id}, str(trial)


@pytest.mark.promise("C4", "M26", "X7")
def test_a_kill_at_any_operation_of_a_repair_leaves_a_checkpoint_that_the_next_repair_makes_whole() -> None:
    for trial in crash_points(damaged, repairs):
        # What the manifest names is right or as damaged as before; nothing else is in the checkpoint.
        verdict = verify(here(trial.disk), "checkpoint-20", Level.FULL)
        assert {finding.part for finding in verdict.findings} <= {PARTS[0], PARTS[1]}, str(trial)
        assert not verdict.foreign, str(trial)
        repairs(trial.disk)
        assert look(here(trial.disk)) == ((20, "b"), ()), str(trial)


def stale() -> MemoryDisk:
    """Another checkpoint has the name here that the mirror's newest one has, and it was saved later."""
    disk = two_checkpoints()
    mirrors_everything(disk)
    Files(disk).remove_tree(RUN / "checkpoint-20")
    save(here(disk), 20, "stale")
    disk.sync_all()
    return disk


def refreshes(disk: Disk) -> None:
    fetch_checkpoint(there(disk), "checkpoint-20", here(disk), LIMITS, job="next", at_ns=1, is_refreshing=True)


@pytest.mark.promise("M4", "X7")
def test_a_kill_at_any_operation_of_a_refresh_leaves_the_stale_copy_or_the_fresh_one() -> None:
    for trial in crash_points(stale, refreshes):
        found, passed = look(here(trial.disk))
        assert found == (20, "b") if trial.is_finished else found in ((20, "stale"), (20, "b")), str(trial)
        assert not passed, str(trial)
        refreshes(trial.disk)
        assert look(here(trial.disk)) == ((20, "b"), ()), str(trial)
        # Kept, and never chosen.
        assert here(trial.disk).read_manifest("quarantine/checkpoint-20").job == "stale"
        left = [here(trial.disk).read_manifest(name).step for name in scan(here(trial.disk)).committed]
        assert left == [10, 20], str(trial)


@pytest.mark.promise("M4")
def test_a_refresh_that_cannot_be_completed_leaves_the_stale_copy() -> None:
    for trial in crash_points(stale, refreshes, ERRORS):
        assert trial.is_finished or isinstance(trial.raised, StorageError), str(trial)
        assert look(here(trial.disk))[0] in ((20, "stale"), (20, "b")), str(trial)
    disk = stale()
    Files(disk).replace(THERE / "checkpoint-20" / PARTS[1], b"rot", scratch=".x")
    with pytest.raises(DamagedCheckpoint):
        refreshes(disk)
    assert look(here(disk)) == ((20, "stale"), ())


def test_two_checkpoints_of_one_step_do_not_replace_each_other() -> None:
    disk = two_checkpoints()
    save(here(disk), 20, "again")
    mirrors_everything(disk)
    Files(disk).remove_tree(RUN)
    for name in scan(there(disk)).committed:
        fetch_checkpoint(there(disk), name, here(disk), LIMITS, job="next", at_ns=1, is_refreshing=True)
    assert scan(here(disk)).committed == ("checkpoint-10", "checkpoint-20", "checkpoint-20.2")


# ---- the rest of what changes storage ----


def with_leavings() -> MemoryDisk:
    disk = wiped()
    begin(here(disk), step=20, job=command_job(HOST, 1 << 30)).write_part(PARTS[0], [b"half"])
    dead = f"mirror_{digest_bytes(socket.gethostname().encode())[:4].hex()}_{1 << 30}_1"
    Files(disk).write_new(THERE / ".mirror" / scratch(dead, "x"), [b"half"])
    return disk


def tidies(disk: Disk) -> None:
    sweep_own_drafts(here(disk), HOST)
    forget_uploads(here(disk), URL, ["gone", *mirrored_ids(here(disk), URL)])
    remove_checkpoints(mirror_on(disk).client, ["checkpoint-10"])
    mirror_on(disk).client.create(".mirror/other.json", b"{}")


@pytest.mark.promise("X7")
def test_a_checkpoint_that_is_removed_from_a_mirror_is_there_whole_or_not_at_all() -> None:
    for trial in crash_points(with_leavings, tidies):
        remote = there(trial.disk)
        assert all(verify(remote, name, Level.FULL).is_sound for name in scan(remote).committed), str(trial)
        tidies(trial.disk)
        assert scan(there(trial.disk)).committed == ("checkpoint-20",)
        assert not scan(here(trial.disk)).torn
        assert not any(str(1 << 30) in node.name for node in trial.disk.list_directory(THERE / ".mirror"))
