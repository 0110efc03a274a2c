"""What a prover writes, under every crash of the prover: a whole drill or none, a sound checkpoint or a damaged one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.scenes import PARTS, ROOT, content, save
from unbroken.disk import Disk
from unbroken.files import Files
from unbroken.prove.damage import do_damage
from unbroken.records.drill import ENVIRONMENT, Drill, Fault, read_drill, write_drill
from unbroken.store.check import Level, verify
from unbroken.store.directory import Store
from unbroken.store.scan import scan
from unbroken.testing import ERRORS, KILLS, MemoryDisk, crash_points

PLACE = Path("/proof/drill.json")
BEFORE = Drill(save_steps=3)
AFTER = Drill(Path("/proof/run"), save_steps=5, faults=(Fault("manifest", "kill", 2),))
DAMAGES = ("flip", "truncate", "torn")


def a_folder() -> MemoryDisk:
    disk = MemoryDisk([PLACE.parent])
    write_drill(PLACE, BEFORE, Files(disk))
    return disk


def writes_a_drill(disk: Disk) -> None:
    write_drill(PLACE, AFTER, Files(disk))


def two_checkpoints() -> MemoryDisk:
    disk = MemoryDisk()
    for step in (10, 20):
        save(Store(ROOT, Files(disk)), step, "a")
    return disk


def damages(kind: str) -> Callable[[Disk], None]:
    def act(disk: Disk) -> None:
        assert do_damage(Store(ROOT, Files(disk)), kind, (0.5, 0.5), job=1).name == "checkpoint-20"

    return act


def test_a_job_reads_the_drill_before_or_this_one_and_never_half_of_one() -> None:
    seen = set()
    for trial in crash_points(a_folder, writes_a_drill, (*KILLS, *ERRORS)):
        found = read_drill({ENVIRONMENT: str(PLACE)}, Files(trial.disk))
        assert found in (BEFORE, AFTER), str(trial)
        assert found == AFTER or not trial.is_finished, str(trial)
        seen.add(found)
    assert seen == {BEFORE, AFTER}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_that_is_cut_short_leaves_the_newest_sound_or_damaged_and_the_older_one_alone(kind: str) -> None:
    seen = set()
    for trial in crash_points(two_checkpoints, damages(kind), (*KILLS, *ERRORS)):
        store = Store(ROOT, Files(trial.disk))
        committed = scan(store).committed
        is_sound = "checkpoint-20" in committed and verify(store, "checkpoint-20", Level.FULL, workers=1).is_sound
        assert verify(store, "checkpoint-10", Level.FULL, workers=1).is_sound, str(trial)
        assert ("checkpoint-20" in committed) or kind == "torn", str(trial)
        assert not (trial.is_finished and is_sound), str(trial)
        seen.add(is_sound)
    assert seen == {True, False}


def test_a_flip_changes_one_bit_of_one_file_and_a_cut_keeps_what_is_before_it() -> None:
    for kind, changed in (("flip", 1), ("truncate", 1)):
        disk = two_checkpoints()
        damages(kind)(disk)
        files = Files(disk)
        found = {part: files.read_bytes(ROOT / "checkpoint-20" / part, limit_bytes=9999) for part in PARTS}
        wrong = [part for part in PARTS if found[part] != content(20, "a", part)]
        assert len(wrong) == changed
        was, now = content(20, "a", wrong[0]), found[wrong[0]]
        if kind == "flip":
            assert len(now) == len(was)
            assert sum((a ^ b).bit_count() for a, b in zip(was, now, strict=True)) == 1
        else:
            assert now == was[: len(was) // 2]


def test_the_last_checkpoint_that_is_left_is_never_damaged() -> None:
    disk = MemoryDisk()
    store = Store(ROOT, Files(disk))
    save(store, 10, "a")
    for kind in DAMAGES:
        done = do_damage(store, kind, (0.0, 0.0), job=1)
        assert done.name is None
        assert "no second checkpoint" in done.words
    assert verify(store, "checkpoint-10", Level.FULL, workers=1).is_sound
