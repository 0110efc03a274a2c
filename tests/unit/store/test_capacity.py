"""The gate before a save: bytes and inodes, and what pruning would free."""

from pathlib import Path

import pytest

from tests.unit.store.saving import nobody, save
from unbroken.disk import LocalDisk, Space
from unbroken.errors import NoRoom, render
from unbroken.files import Files
from unbroken.store.capacity import RESERVE_BYTES, RESERVE_INODES, require_room
from unbroken.store.commit import begin
from unbroken.store.directory import Store
from unbroken.store.keep import LastK
from unbroken.store.names import DraftName


class Filling(LocalDisk):
    """A real disk that says how much room it has."""

    def __init__(self, free_bytes: int, free_inodes: int | None) -> None:
        self.room = Space(free_bytes, 10 * free_bytes, free_inodes)

    def space(self, path: Path) -> Space:
        return self.room


def filling(root: Path, free_bytes: int, free_inodes: int | None) -> Store:
    return Store(root, Files(Filling(free_bytes, free_inodes)))


def test_a_store_that_does_not_exist_yet_has_the_room_of_its_disk(tmp_path: Path) -> None:
    require_room(Store(tmp_path / "runs" / "checkpoints"), coming_bytes=1, coming_files=1, reserve_bytes=1)
    assert (tmp_path / "runs" / "checkpoints").is_dir()


def test_exactly_enough_is_enough_and_one_byte_less_is_not(tmp_path: Path) -> None:
    needed = 1000 + RESERVE_BYTES
    require_room(filling(tmp_path, needed, 100), coming_bytes=1000, coming_files=3)
    with pytest.raises(NoRoom) as full:
        require_room(filling(tmp_path, needed - 1, 100), coming_bytes=1000, coming_files=3)
    assert (full.value.needed_bytes, full.value.reserve_bytes) == (1000, RESERVE_BYTES)
    assert full.value.free_bytes == needed - 1


def test_inodes_can_be_what_is_short(tmp_path: Path) -> None:
    require_room(filling(tmp_path, 1 << 40, 3 + RESERVE_INODES), coming_bytes=1, coming_files=3)
    with pytest.raises(
        NoRoom, check=lambda each: (each.needed_inodes, each.free_inodes, each.reserve_inodes) == (3, 18, 16)
    ) as full:
        require_room(filling(tmp_path, 1 << 40, 2 + RESERVE_INODES), coming_bytes=1, coming_files=3)
    assert (full.value.needed_inodes, full.value.free_inodes) == (3, 18)


def test_a_file_system_that_counts_no_inodes_has_enough_of_them(tmp_path: Path) -> None:
    require_room(filling(tmp_path, 1 << 40, None), coming_bytes=1, coming_files=10**9)


def test_the_error_says_what_pruning_would_free(tmp_path: Path) -> None:
    store = filling(tmp_path, 1000, None)
    for step in (1, 2, 3):
        save(store, step)
    begin(store, step=4, job="dead").write_part("a", [b"x" * 50])
    with pytest.raises(NoRoom) as full:
        require_room(store, coming_bytes=1, coming_files=1, policies=[LastK(1)], is_live=nobody)
    each = store.read_manifest("checkpoint-1").size_bytes
    assert full.value.prunable == ("checkpoint-1", "checkpoint-2", str(DraftName("dead", 4, 1)))
    assert full.value.prunable_bytes == 2 * each + 50
    names = ", ".join(full.value.prunable)
    assert render(full.value).splitlines() == [
        "error[no-room]: disk full: the save needs 1 bytes and a reserve of 67.1 MB, 1.0 kB free",
        f"  at   {tmp_path}",
        f"  so   nothing was written, the last commit is intact; pruning would free 1.5 kB ({names})",
        f"  help unbroken prune {tmp_path} --dry-run   show what would be removed",
    ]


def test_where_pruning_frees_nothing_it_is_not_offered(tmp_path: Path) -> None:
    store = filling(tmp_path, 1000, None)
    save(store, 1)
    with pytest.raises(NoRoom) as full:
        require_room(store, coming_bytes=1, coming_files=1, policies=[LastK(1)])
    assert full.value.help()[0].command.startswith("df -h ")
