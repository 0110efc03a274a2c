"""Which dumps together are a checkpoint, and what is said of those that are none."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.state.dumping import AREA, HOST, JOB, RUN, choice, dump_and_tell, dump_step
from unbroken.errors import RecordDamaged
from unbroken.files import LOCAL, Files
from unbroken.store.dump_copies import copy_dump, sweep_dumps
from unbroken.store.dumps import (
    Area,
    Dump,
    DumpChoice,
    DumpSet,
    Pointer,
    VisibleDumps,
    choose_dumps,
    look,
    make_area,
    point,
    read_area,
    read_pointers,
)
from unbroken.testing import MemoryDisk
from unbroken.world import World


def dump(rank: int, step: int = 5, *, job: str = "j0001_a", world: int = 2, host: str = "node-1") -> Dump:
    return Dump(rank, world, step, job, host, f"{job}-{step}-{rank}", step, f"/scratch/k/rank-{rank}", "d", False)


def chosen(*visible: VisibleDumps, pointers: tuple[Pointer, ...] = (), newest: int = -1) -> DumpChoice:
    return choose_dumps(visible, pointers, is_newer=lambda dump_set: dump_set.step > newest)


def test_the_newest_step_of_which_every_rank_has_a_dump_is_taken() -> None:
    sight = VisibleDumps("node-1", tuple(dump(rank, step) for step in (3, 5) for rank in (0, 1)))
    found = chosen(sight)
    assert found.dump_set == DumpSet(5, "j0001_a", 2)
    assert {rank: copies[0][1].rank for rank, copies in found.copies.items()} == {0: 0, 1: 1}
    assert found.skipped == ()


@pytest.mark.promise("M11")
def test_a_step_of_which_one_rank_has_none_is_skipped_with_the_reason() -> None:
    sight = VisibleDumps("node-1", (dump(0, 3), dump(1, 3), dump(0, 5)))
    found = chosen(sight)
    assert found.dump_set == DumpSet(3, "j0001_a", 2)
    assert found.skipped == (("emergency_step_5", "no complete dump from rank 1 (world size 2)"),)


@pytest.mark.promise("M11")
def test_dumps_of_two_jobs_or_of_two_worlds_are_never_put_together() -> None:
    for other in (dump(1, job="j0002_b"), dump(1, world=3)):
        found = chosen(VisibleDumps("node-1", (dump(0), other)))
        assert found.dump_set is None
        assert len(found.skipped) == 2


def test_of_two_dumps_of_one_step_the_later_one_counts_wherever_it_stands() -> None:
    older = dump(0, world=1)
    later = replace(older, id="later", saved_at_ns=older.saved_at_ns + 1, root="/shared/k/rank-0", is_shared=True)
    found = chosen(VisibleDumps("node-1", (older, later)))
    assert found.copies == {0: ((0, later),)}


def test_hosts_that_see_their_own_dumps_bring_them_in_together() -> None:
    found = chosen(VisibleDumps("node-1", (dump(0),)), VisibleDumps("node-2", (dump(1, host="node-2"),)))
    assert {rank: copies[0][0] for rank, copies in found.copies.items()} == {0: 0, 1: 1}


def test_a_dump_older_than_the_newest_checkpoint_is_ignored() -> None:
    sight = VisibleDumps("node-1", (dump(0), dump(1)))
    assert chosen(sight, newest=5) == DumpChoice()


@pytest.mark.promise("M12")
def test_a_dump_of_another_host_is_refused_with_its_host_and_its_path() -> None:
    files = Files(MemoryDisk([Path("/scratch")]))
    alone = replace(AREA, persistent=None)
    dump_step(files, 5, area=alone)
    assert choice(files, area=alone).dump_set == DumpSet(5, JOB, 1)
    # Another boot of the same host has the same disk.
    assert choice(files, area=alone, host="node-1/ffffffff").dump_set == DumpSet(5, JOB, 1)
    found = choice(files, area=alone, host="node-11/0f0f0f0f")
    assert found.dump_set is None
    ((name, reason),) = found.skipped
    assert name == "emergency_step_5"
    for part in ("node-1", "/scratch/run-1a2b3c4d/rank-00000/emergency_step_5_5", "node-11", "persistent_dir"):
        assert part in reason


@pytest.mark.promise("M12")
def test_a_dump_that_only_a_pointer_knows_of_is_refused_with_the_reason_too() -> None:
    pointers = tuple(Pointer(rank, 2, 5, JOB, f"node-{rank}", f"/scratch/{rank}") for rank in (0, 1))
    found = chosen(VisibleDumps("node-0/a", (dump(0, job=JOB),)), pointers=pointers)
    ((name, reason),) = found.skipped
    assert name == "emergency_step_5"
    for part in ("node-1", "/scratch/1", "node-0"):
        assert part in reason
    gone = chosen(VisibleDumps("node-1/a"), VisibleDumps("node-0/a", (dump(0, job=JOB),)), pointers=pointers)
    [(name, reason)] = gone.skipped
    assert name == "emergency_step_5" and "/scratch/1" in reason


@pytest.mark.promise("M12", "C4")
def test_a_copy_in_the_persistent_directory_counts_on_every_host() -> None:
    disk = MemoryDisk([RUN, Path("/scratch"), Path("/shared")])
    files = Files(disk)
    pointer = dump_and_tell(files, 5)
    assert pointer.copy == "/shared/run-1a2b3c4d/rank-00000/emergency_step_5_5"
    files.remove_tree(Path("/scratch"))
    assert choice(files, host="node-2").dump_set == DumpSet(5, JOB, 1)
    # Also for a job that was started without the directories: the pointer leads there.
    assert choice(files, host="node-2", area=Area(AREA.key)).dump_set == DumpSet(5, JOB, 1)


def test_a_directory_that_is_both_needs_no_copy() -> None:
    files = Files(MemoryDisk([Path("/shared")]))
    both = Area(AREA.key, Path("/shared"), Path("/shared"))
    dump_step(files, 5, area=both)
    assert choice(files, area=both, host="node-2").dump_set == DumpSet(5, JOB, 1)


def test_a_dump_with_a_part_missing_is_none_and_one_of_another_run_is_not_looked_at() -> None:
    files = Files(MemoryDisk([Path("/scratch")]))
    dump_step(files, 5)
    made = dump_step(files, 6)
    files.remove_file(made.store.path(made.name) / "emergency.json")
    sight = look(AREA, HOST, files=files)
    assert [each.step for each in sight.dumps] == [5]
    ((path, why),) = sight.damaged
    assert path.endswith("emergency_step_6_6")
    assert why.startswith("emergency.json:")
    assert look(replace(AREA, key="other-00000000"), HOST, files=files) == VisibleDumps(HOST)


def test_a_run_that_starts_over_at_the_same_path_never_meets_the_dumps_of_the_old_one(tmp_path: Path) -> None:
    first = make_area(tmp_path / "run", job="j0001_a")
    assert make_area(tmp_path / "run", job="j0002_a") == first == read_area(tmp_path / "run")
    renewed = make_area(tmp_path / "run", job="j0003_a", is_new=True)
    assert renewed.key != first.key
    assert renewed.before == (first.key,)
    LOCAL.remove_tree(tmp_path / "run")
    assert make_area(tmp_path / "run", job="j0001_a").key not in (first.key, renewed.key)


def test_an_area_that_cannot_be_read_is_an_error_and_a_pointer_that_cannot_points_at_nothing(tmp_path: Path) -> None:
    make_area(tmp_path, job="j0001_a")
    point(tmp_path, Pointer(0, 1, 5, JOB, HOST, "/scratch/0"))
    assert [each.step for each in read_pointers(tmp_path)] == [5]
    (tmp_path / "emergency/rank-00000.json").write_text("{")
    assert read_pointers(tmp_path) == []
    (tmp_path / "emergency/area.json").write_text('{"schema": "unbroken.emergency-area/1"}')
    with pytest.raises(RecordDamaged):
        read_area(tmp_path)


def test_a_sweep_takes_what_a_commit_has_made_useless_and_leaves_what_is_ahead_of_it() -> None:
    files = Files(MemoryDisk([RUN, Path("/scratch"), Path("/shared")]))
    dump_and_tell(files, 5)
    dump_step(files, 7)
    dump_step(files, 5, world=World(1, 2), job="j0001_b")
    assert sweep_dumps(RUN, AREA, up_to_step=4, share=(0, 1), files=files) == []
    # Each rank sweeps its own, and the first ones those of ranks that are no more.
    removed = sweep_dumps(RUN, AREA, up_to_step=6, share=(0, 2), files=files)
    assert removed == [
        "/scratch/run-1a2b3c4d/rank-00000/emergency_step_5_5",
        "/shared/run-1a2b3c4d/rank-00000/emergency_step_5_5",
    ]
    assert read_pointers(RUN, files) == []
    assert {(each.rank, each.step) for each in look(AREA, HOST, files=files).dumps} == {(0, 7), (1, 5)}
    left_behind = Area("run-ffffffff", AREA.local, AREA.persistent, before=(AREA.key,))
    assert len(sweep_dumps(RUN, left_behind, up_to_step=0, share=(0, 1), files=files)) == 2
    assert look(AREA, HOST, files=files).dumps == ()


def test_a_copy_is_the_original_byte_for_byte() -> None:
    files = Files(MemoryDisk([Path("/scratch"), Path("/shared")]))
    made = dump_step(files, 5)
    target = AREA.store(Path("/shared"), 0, files)
    name = copy_dump(made.store, made.name, target)
    assert target.read_manifest(name) == made.manifest
