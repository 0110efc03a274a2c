"""A checkpoint that is copied into another store, under every crash and every power cut: there whole, or not there."""

from pathlib import Path

import pytest

from tests.unit.store.saving import save
from unbroken.disk import Disk
from unbroken.errors import DamagedCheckpoint
from unbroken.files import Files
from unbroken.prove.replay import copy_checkpoint
from unbroken.store.check import Level, verify
from unbroken.store.directory import Store
from unbroken.store.scan import scan
from unbroken.testing import ERRORS, KILLS, MemoryDisk, crash_points, crash_states

SOURCE, TARGET = Path("/run/checkpoints"), Path("/again/checkpoints")
NAME = "checkpoint-7"


def with_a_checkpoint() -> MemoryDisk:
    disk = MemoryDisk(["/run", "/again"])
    save(Store(SOURCE, Files(disk)), 7)
    return disk


def copies_it(disk: Disk) -> None:
    files = Files(disk)
    source = Store(SOURCE, files)
    copy_checkpoint(source, NAME, source.read_manifest(NAME), Store(TARGET, files), job="replay")


def found(disk: Disk) -> str:
    """What a reader finds in the target; the source must be sound whatever happened."""
    files = Files(disk)
    assert verify(Store(SOURCE, files), NAME, Level.FULL).is_sound
    target = Store(TARGET, files)
    if scan(target).committed == ():
        return "nothing"
    assert scan(target).committed == (NAME,)
    return "whole" if verify(target, NAME, Level.FULL).is_sound else "damaged"


@pytest.mark.promise("X7")
def test_a_copy_is_there_whole_or_not_at_all() -> None:
    for trial in crash_points(with_a_checkpoint, copies_it, (*KILLS, *ERRORS)):
        left = found(trial.disk)
        assert left == "whole" if trial.is_finished else left in ("nothing", "whole"), str(trial)
        for words, disk in crash_states(trial.disk):
            left = found(disk)
            assert left == "whole" if trial.is_finished else left in ("nothing", "whole"), f"{trial}, {words}"


def test_a_copy_has_the_bytes_and_the_manifest_of_its_original() -> None:
    disk = with_a_checkpoint()
    copies_it(disk)
    files = Files(disk)
    original, copy = (Store(root, files) for root in (SOURCE, TARGET))
    assert copy.read_manifest(NAME) == original.read_manifest(NAME)
    manifests = [
        files.read_bytes(store.path(NAME) / "manifest.json", limit_bytes=1 << 20) for store in (original, copy)
    ]
    assert manifests[0] == manifests[1]


def test_a_damaged_original_is_not_copied() -> None:
    disk = with_a_checkpoint()
    files = Files(disk)
    part = SOURCE / NAME / "state" / "__0_0.distcp"
    data = bytearray(files.read_bytes(part, limit_bytes=1 << 20))
    data[3] ^= 1
    files.replace(part, bytes(data), scratch=".other")
    with pytest.raises(DamagedCheckpoint):
        copies_it(disk)
    assert scan(Store(TARGET, files)).committed == ()
