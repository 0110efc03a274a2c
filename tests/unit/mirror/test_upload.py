"""What an upload proves before it calls a checkpoint mirrored, on a mirror in a directory."""

import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.mirror.made import SMALL, content, opened, run_at, saved, uploaded
from unbroken.errors import DamagedCheckpoint, MirrorDiverged, MirrorTaken, StorageError, StorageFailed, UnbrokenError
from unbroken.files import Files
from unbroken.mirror import background
from unbroken.mirror.background import Mirror, Mirroring, forget_removed, pending
from unbroken.mirror.bring_back import Taking, bring_back
from unbroken.mirror.client import Found, open_client
from unbroken.mirror.fetch import fetch_checkpoint
from unbroken.mirror.ownership import push_rewinds
from unbroken.mirror.remote import store_at
from unbroken.mirror.remove import remove_checkpoints
from unbroken.mirror.transfer import LEAST_MEMORY_BYTES, Limits, PieceBuffers, Stopped
from unbroken.mirror.upload import has_bytes
from unbroken.store.check import Level, verify
from unbroken.store.digest import BLOCK_BYTES
from unbroken.store.directory import Store
from unbroken.store.keep import LastK
from unbroken.store.mirrored import Upload, mirrored_ids, read_mirrors, write_run_id
from unbroken.store.names import MIRROR
from unbroken.store.rewind import record_rewind
from unbroken.store.scan import Inventory, scan
from unbroken.store.sweep import settle
from unbroken.testing import FaultyDisk, Operation, Refuse


@pytest.fixture
def mirror_url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/mirror"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = run_at(tmp_path / "run")
    saved(found, 10)
    return found


@pytest.mark.promise("M8")
def test_wrong_bytes_that_are_there_already_are_found_and_sent_anew(
    store: Store, mirror_url: str, tmp_path: Path
) -> None:
    mirror = opened(store, mirror_url)
    there = tmp_path / "mirror" / "checkpoints" / "checkpoint-10" / "state" / "a"
    uploaded(store, "checkpoint-10", mirror)
    # As a killed upload of another tool, or rot, would leave it: the right size, and no manifest.
    there.write_bytes(b"x" * SMALL["state/a"])
    (there.parents[1] / "manifest.json").unlink()
    uploaded(store, "checkpoint-10", mirror)
    is_sent_anew = there.read_bytes() == content("state/a", SMALL["state/a"], 10)
    assert is_sent_anew
    assert verify(store_at(mirror.client), "checkpoint-10", Level.FULL).is_sound


@pytest.mark.promise("M8", "M26")
def test_a_damaged_local_checkpoint_never_becomes_the_second_copy(store: Store, mirror_url: str) -> None:
    mirror = opened(store, mirror_url)
    (store.path("checkpoint-10") / "state" / "a").write_bytes(b"x" * SMALL["state/a"])
    with pytest.raises(DamagedCheckpoint):
        uploaded(store, "checkpoint-10", mirror)
    assert not scan(store_at(mirror.client)).committed
    assert scan(store_at(mirror.client)).uploading == ("checkpoint-10",)
    assert pending(store, mirror_url) == ["checkpoint-10"]


@pytest.mark.promise("M26")
def test_a_damaged_copy_in_a_mirror_is_not_fetched(store: Store, mirror_url: str, tmp_path: Path) -> None:
    mirror = opened(store, mirror_url)
    uploaded(store, "checkpoint-10", mirror)
    (tmp_path / "mirror/checkpoints/checkpoint-10/state/a").write_bytes(b"x" * SMALL["state/a"])
    back = run_at(tmp_path / "back")
    with pytest.raises(DamagedCheckpoint):
        fetch_checkpoint(store_at(mirror.client), "checkpoint-10", back, Limits(), job="f", at_ns=1)
    assert not scan(back).committed and not scan(back).torn


def test_two_checkpoints_of_one_name_take_two_names(store: Store, mirror_url: str, tmp_path: Path) -> None:
    mirror = opened(store, mirror_url)
    uploaded(store, "checkpoint-10", mirror)
    store.files.publish(store.path("checkpoint-10"), tmp_path / "aside")
    saved(store, 10, job="b")
    assert uploaded(store, "checkpoint-10", mirror).remote_name == "checkpoint-10.2"
    remote = store_at(mirror.client)
    assert all(verify(remote, name, Level.FULL).is_sound for name in scan(remote).committed)


@pytest.mark.promise("M8")
def test_of_two_writers_one_commits(store: Store, mirror_url: str) -> None:
    """Both upload the same checkpoint at the same time; the manifest is created once."""
    mirrors = [opened(store, mirror_url) for _ in range(4)]
    made: list[bool] = []
    lock = threading.Lock()

    def create(mirror: Mirror, number: int) -> None:
        is_ours = mirror.client.create("contested", f"writer {number}".encode())
        with lock:
            made.append(is_ours)

    threads = [threading.Thread(target=create, args=(mirror, n)) for n, mirror in enumerate(mirrors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False, False, False, True]


def test_another_run_is_refused_and_the_same_one_is_recognised(store: Store, mirror_url: str, tmp_path: Path) -> None:
    mirror = opened(store, mirror_url)
    uploaded(store, "checkpoint-10", mirror)
    other = run_at(tmp_path / "other")
    saved(other, 10, job="b")
    with pytest.raises(MirrorTaken):
        opened(other, mirror_url)
    # Of the same name, and with checkpoints that the mirror does not know.
    same_name = run_at(tmp_path / "elsewhere" / "run")
    saved(same_name, 10, job="b")
    with pytest.raises(MirrorTaken):
        opened(same_name, mirror_url)
    # Among its checkpoints, where the records of the other run would be.
    with pytest.raises(MirrorTaken):
        opened(other, f"{mirror_url}/checkpoints/b")
    # Nothing here and the same name, but the run that the mirror was made for is still there.
    with pytest.raises(MirrorTaken, match=str(tmp_path / "run")):
        opened(run_at(tmp_path / "again" / "run"), mirror_url)
    # Wiped, and then in another place.
    shutil.rmtree(tmp_path / "run")
    assert opened(run_at(tmp_path / "run"), mirror_url).url == mirror_url
    shutil.rmtree(tmp_path / "run")
    assert opened(run_at(tmp_path / "again" / "run"), mirror_url).url == mirror_url


@pytest.mark.promise("C4")
def test_an_unreachable_mirror_is_an_error_only_without_local_checkpoints(
    store: Store, mirror_url: str, tmp_path: Path
) -> None:
    mirror = opened(store, mirror_url)
    uploaded(store, "checkpoint-10", mirror)

    def unreadable(operation: Operation) -> Refuse | None:
        return None if operation.is_mutating else Refuse(5)

    broken = Mirror(mirror.address, open_client(mirror.client.address, Files(FaultyDisk(store.files.disk, unreadable))))
    taking = Taking("next", time.time_ns, Limits())
    results: list[StorageError] = []

    def refused(_: Mirror, error: StorageError) -> None:
        results.append(error)

    assert bring_back(store, [broken], taking, refused=refused) == [] and len(results) == 1
    with pytest.raises(StorageError):
        bring_back(run_at(tmp_path / "wiped" / "run"), [broken], taking, refused=refused)


def test_what_is_read_back_counts_for_the_bandwidth_and_can_be_stopped(
    store: Store, mirror_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(Limits, "wait_for", lambda limits, amount: waited.append(amount))
    mirror, limits = opened(store, mirror_url), Limits()
    shown: list[int] = []
    limits.progress = shown.append
    uploaded(store, "checkpoint-10", mirror, limits)
    assert sum(waited) == 2 * sum(SMALL.values()) and sum(shown) == sum(SMALL.values())
    monkeypatch.undo()
    part = next(part for part in store.read_manifest("checkpoint-10").parts if part.name == "state/a")
    found = Found("checkpoint-10/state/a", part.size_bytes)
    stopping = Limits(is_stopped=lambda: True)
    with pytest.raises(Stopped):
        has_bytes(mirror.client, part, found, BLOCK_BYTES, PieceBuffers(2, BLOCK_BYTES), stopping)


@pytest.mark.promise("M9")
def test_a_thread_that_is_left_over_does_not_take_back_what_the_next_job_records(
    store: Store, mirror_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = opened(store, mirror_url)
    uploaded(store, "checkpoint-10", mirror)
    [worker] = (left := Mirroring(store, [mirror], Limits(), _Heard(), job="left"))._workers
    saves: list[str] = []

    def scan_before_a_commit(found: Store) -> Inventory:
        inventory = scan(found)
        if not saves:
            saves.append(saved(store, 20))
            uploaded(store, saves[0], mirror)
        return inventory

    monkeypatch.setattr(background, "scan", scan_before_a_commit)
    worker._forget_gone()
    assert saves and pending(store, mirror_url) == []
    # Closed, it takes back nothing at all.
    monkeypatch.undo()
    shutil.rmtree(store.path("checkpoint-20"))
    left._is_stopped.set()
    worker._forget_gone()
    assert len(mirrored_ids(store, mirror_url)) == 2
    Mirroring(store, [mirror], Limits(), _Heard(), job="next")._workers[0]._forget_gone()
    assert len(mirrored_ids(store, mirror_url)) == 1


@pytest.mark.promise("M9", "C17")
def test_a_ledger_that_cannot_be_read_holds_everything(store: Store, mirror_url: str) -> None:
    opened(store, mirror_url)
    saved(store, 20)
    (store.path(MIRROR) / "targets.json").write_text("{}")
    with pytest.raises(StorageFailed, match="damaged"):
        read_mirrors(store)
    with pytest.raises(StorageFailed):
        settle(store, "checkpoint-20", (LastK(1),), job="n", is_live=lambda draft: False)
    assert len(scan(store).committed) == 2


def test_bandwidth_and_memory_are_bounded(store: Store, mirror_url: str) -> None:
    limits = Limits(LEAST_MEMORY_BYTES)
    assert (limits.in_flight(), limits.objects()) == (1, 1)
    for mebibytes in (48, 96, 256, 1024):
        limits = Limits(mebibytes << 20)
        assert limits.objects() * (limits.in_flight() + 2) * BLOCK_BYTES <= limits.memory_bytes
    slow = Limits(bytes_per_second=2_000_000)
    began = time.monotonic()
    uploaded(store, "checkpoint-10", opened(store, mirror_url), slow)
    slow.take(1)
    # What was sent, less the last piece, took its time.
    assert time.monotonic() - began >= 3_000_000 / 2_000_000


def test_a_cancelled_transfer_ends_and_stays_pending(store: Store, mirror_url: str) -> None:
    mirror = opened(store, mirror_url)
    with pytest.raises(Stopped):
        uploaded(store, "checkpoint-10", mirror, Limits(is_stopped=lambda: True))
    assert not mirrored_ids(store, mirror_url)


@pytest.mark.promise("M9")
def test_what_was_removed_from_a_mirror_counts_as_pending_again(tmp_path: Path) -> None:
    store = run_at(tmp_path / "run")
    url = f"file://{tmp_path}/mirror"
    mirror = opened(store, url)
    for step in (10, 20):
        uploaded(store, saved(store, step), mirror)
    assert forget_removed(store, mirror) == [] and pending(store, url) == []
    remove_checkpoints(mirror.client, ["checkpoint-10"])
    assert forget_removed(store, mirror) == ["checkpoint-10"]
    assert pending(store, url) == ["checkpoint-10"]
    decision, _ = settle(store, "checkpoint-20", (LastK(1),), job="j", is_live=lambda draft: False)
    assert decision.held == ("checkpoint-10",) and "checkpoint-10" in scan(store).committed
    # Another checkpoint has the name there now.
    uploaded(store, "checkpoint-10", mirror)
    remove_checkpoints(mirror.client, ["checkpoint-20"])
    other = run_at(tmp_path / "other" / "run")
    write_run_id(other, "id-of-run", job="m")
    uploaded(other, saved(other, 20, job="b"), opened(other, url))
    assert forget_removed(store, mirror) == ["checkpoint-20"]


class _Heard:
    """What a mirroring tells."""

    def __init__(self) -> None:
        self.errors: list[UnbrokenError] = []
        self.uploads: list[str] = []

    def mirrored(self, upload: Upload, seconds: float) -> None:
        self.uploads.append(upload.name)

    def refused(self, mirror: str, name: str, error: UnbrokenError) -> None:
        self.errors.append(error)


def test_a_mirror_that_follows_another_copy_refuses_and_is_not_waited_for(
    store: Store, mirror_url: str, tmp_path: Path
) -> None:
    mirror, other = opened(store, mirror_url), run_at(tmp_path / "other")
    for each, job in ((store, "a"), (other, "b")):
        record_rewind(each, target="checkpoint-10", abandoned={}, job=job, at_ns=1)
    push_rewinds(other, mirror.client, mirror.address)
    heard = _Heard()
    mirroring = Mirroring(store, [mirror], Limits(), heard, job="m")
    mirroring.start()
    # Waiting on, it would hear one refusal after another.
    assert mirroring.wait(1e9, is_cut_short=lambda: len(heard.errors) > 2)
    mirroring.close()
    refused = heard.errors[0]
    assert not heard.uploads
    assert isinstance(refused, MirrorDiverged) and refused.record == ".rewinds/000001.json"
    assert (refused.mirror, refused.run) == (mirror_url, str(tmp_path / "run"))
    assert pending(store, mirror_url) == ["checkpoint-10"]


def test_the_end_of_a_job_waits_for_a_thread_that_has_not_begun_with_the_last_checkpoint(
    store: Store, mirror_url: str
) -> None:
    mirror, heard = opened(store, mirror_url), _Heard()
    mirroring = Mirroring(store, [mirror], Limits(), heard, job="m")
    mirroring.start()
    assert mirroring.wait(1e9)
    last = saved(store, 20)
    before = sys.getswitchinterval()
    # The other thread runs only where this one waits for something: on a busy machine it does so by chance.
    sys.setswitchinterval(1e3)
    try:
        mirroring.committed()
        assert mirroring.wait(1e9)
    finally:
        sys.setswitchinterval(before)
    mirroring.close()
    assert last in heard.uploads and not pending(store, mirror_url)
