"""An emergency dump under every crash: it is there whole or not at all, and nothing points at what is not durable."""

import errno
import functools
from pathlib import Path

import pytest

from tests.unit.state.dumping import ALONE, AREA, RUN, adopt_all, choice, dump_and_tell, items_at
from unbroken.disk import Disk
from unbroken.errors import CheckpointError, CopyDiffers, EvidenceMissing, StorageError
from unbroken.files import Files
from unbroken.state.restore import CheckpointSource, restore
from unbroken.store.check import Level, verify
from unbroken.store.directory import Store
from unbroken.store.dump_copies import sweep_dumps
from unbroken.store.dumps import look, make_area, read_area, read_pointers
from unbroken.store.scan import scan
from unbroken.testing import (
    KILLS,
    FaultyDisk,
    MemoryDisk,
    Refuse,
    Shorten,
    crash_points,
    crash_states,
)

FAULTS = (*KILLS, Refuse(errno.EIO), Shorten(1))
STORE = RUN / "checkpoints"


def with_an_older_dump() -> MemoryDisk:
    """A run whose area stands, and a dump of step 3, pointed at and copied."""
    # All of it is synced, so that what a power cut leaves of it is a copy of it.
    (copy,) = (found for _, found in crash_states(_dumped()))
    return copy


@functools.cache
def _dumped() -> MemoryDisk:
    disk = MemoryDisk([RUN, Path("/scratch"), Path("/shared")])
    make_area(RUN, job="j0001_0123abcd", files=Files(disk))
    dump_and_tell(Files(disk), 3)
    disk.sync_all()
    return disk


def dumps_once_more(disk: Disk) -> object:
    """A dump of step 4, told and copied."""
    return dump_and_tell(Files(disk), 4)


def brings_in(disk: Disk) -> object:
    """The next job makes a checkpoint of what it finds."""
    files = Files(disk)
    return adopt_all(files, choice(files), items_at(0))


def sweeps(disk: Disk) -> object:
    """A commit of step 3 has made the dump useless."""
    return sweep_dumps(RUN, AREA, up_to_step=3, share=(0, 1), files=Files(disk))


def renews_its_area(disk: Disk) -> object:
    """A run goes back, and leaves its dumps behind."""
    return make_area(RUN, job="j0002_0123abcd", is_new=True, files=Files(disk))


SCENES = (dumps_once_more, brings_in, sweeps, renews_its_area)


def found_after(disk: Disk) -> tuple[int, bool]:
    """The newest step that a later job on the same host would resume from, and whether it would on another host.

    Everything that stands under a good name must be whole, and everything that is pointed at must stand.
    """
    files = Files(disk)
    for dump in look(AREA, "node-1", files=files).dumps:
        assert verify(dump.store(files), dump.name, Level.FULL).is_sound, dump.name
    for pointer in read_pointers(RUN, files):
        for place in filter(None, (pointer.path, pointer.copy)):
            assert verify(Store(Path(place).parent, files), Path(place).name, Level.FULL).is_sound, place
    here, elsewhere = choice(files), choice(files, host="node-2")
    assert here.dump_set is not None
    assert elsewhere.dump_set is not None
    return here.dump_set.step, elsewhere.dump_set.step == here.dump_set.step


@pytest.mark.promise("M11", "X7")
def test_after_every_crash_there_is_the_old_dump_or_the_new_one_and_each_is_whole() -> None:
    seen = set[tuple[int, bool]]()
    for trial in crash_points(with_an_older_dump, dumps_once_more, FAULTS):
        for disk in (trial.disk, *(found for _, found in crash_states(trial.disk))):
            step, is_everywhere = found_after(disk)
            assert step == 4 or not trial.is_finished, str(trial)
            assert is_everywhere or not trial.is_finished, str(trial)
            results = [(each.step, each.copy is not None) for each in read_pointers(RUN, Files(disk))]
            assert results == [(4, True)] or not trial.is_finished, str(trial)
            seen.add((step, is_everywhere))
    assert seen == {(3, True), (4, False), (4, True)}


def test_an_io_error_raises_an_error_of_ours_only() -> None:
    for action in SCENES:
        for trial in crash_points(with_an_older_dump, action, (Refuse(errno.ENOSPC), Shorten(1, then=errno.ENOSPC))):
            raised = trial.raised
            assert raised is None or isinstance(raised, StorageError | EvidenceMissing | CheckpointError), str(trial)


@pytest.mark.promise("X7")
def test_a_crash_while_dumps_are_brought_in_leaves_no_checkpoint_or_a_whole_one_and_always_the_dumps() -> None:
    seen = set[int]()
    for trial in crash_points(with_an_older_dump, brings_in, FAULTS):
        for disk in (trial.disk, *(found for _, found in crash_states(trial.disk))):
            store = Store(STORE, Files(disk))
            names = scan(store).committed
            for name in names:
                live = items_at(0)
                restored = restore(CheckpointSource(store, name, store.read_manifest(name)), live, ALONE)
                assert (restored.step, restored.counters) == (3, {"step": 3})
                assert live[0].take()["last.weight"].eq(3.0).all()
            assert len(names) == 1 or not trial.is_finished, str(trial)
            assert found_after(disk) == (3, True)
            seen.add(len(names))
    assert seen == {0, 1}


def test_a_crash_of_a_sweep_leaves_a_whole_dump_or_none() -> None:
    for trial in crash_points(with_an_older_dump, sweeps, FAULTS):
        for disk in (trial.disk, *(found for _, found in crash_states(trial.disk))):
            files = Files(disk)
            dumps = look(AREA, "node-1", files=files).dumps
            assert all(verify(dump.store(files), dump.name, Level.FULL).is_sound for dump in dumps)
            assert not dumps or not trial.is_finished, str(trial)


def test_after_a_crash_the_area_is_the_old_one_or_the_new_one() -> None:
    for trial in crash_points(with_an_older_dump, renews_its_area, FAULTS):
        for disk in (trial.disk, *(found for _, found in crash_states(trial.disk))):
            area = read_area(RUN, Files(disk))
            assert area is not None
            assert len(area.before) == 1 or not trial.is_finished, str(trial)


class LyingDisk(FaultyDisk):
    """Storage that says yes to every byte and keeps another one in the parts of a copy."""

    def write(self, handle: int, data: memoryview) -> int:
        path = self._path(handle)
        if Path("/shared") in path.parents and path.name == "emergency.json":
            data = memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))
        return super().write(handle, data)


@pytest.mark.promise("C4")
def test_a_copy_with_other_bytes_is_never_reported_as_a_copy() -> None:
    disk = with_an_older_dump()
    with pytest.raises(CopyDiffers):
        dump_and_tell(Files(LyingDisk(disk)), 5)
    files = Files(disk)
    (pointer,) = read_pointers(RUN, files)
    assert (pointer.step, pointer.copy) == (5, None)
    here, elsewhere = choice(files), choice(files, host="node-2")
    assert here.dump_set is not None
    assert here.dump_set.step == 5
    # On another host the copy of before is the newest there is, and why is said.
    assert elsewhere.dump_set is not None
    assert elsewhere.dump_set.step == 3
    ((name, reason),) = elsewhere.skipped
    assert name == "emergency_step_5"
    assert "node-1" in reason and "persistent_dir" in reason
