"""What the disk in memory forgets at a power cut, what it never tears, and how it fills up."""

import errno
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.disk import Disk
from unbroken.files import Files
from unbroken.testing import MemoryDisk, Tail, crash_states, tree

RUN = Path("/run")


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk([RUN])


def create(disk: Disk, name: str, content: bytes = b"12345678", *, sync: bool = False) -> None:
    handle = disk.create(RUN / name)
    disk.write(handle, memoryview(content))
    if sync:
        disk.sync_file(handle)
    disk.close(handle)


# ---- bytes and names are durable apart ----


def test_nothing_survives_that_was_not_synced(disk: MemoryDisk) -> None:
    create(disk, "f")
    assert tree(disk, RUN) == {"f": b"12345678"}
    assert tree(disk.after_crash(), RUN) == {}


def test_synced_bytes_without_a_synced_name_are_gone(disk: MemoryDisk) -> None:
    create(disk, "f", sync=True)
    assert tree(disk.after_crash(), RUN) == {}


def test_a_synced_name_without_synced_bytes_is_the_empty_file_everybody_knows(disk: MemoryDisk) -> None:
    create(disk, "f")
    disk.sync_directory(RUN)
    assert tree(disk.after_crash(), RUN) == {"f": b""}


def test_both_synced_is_there_for_good(disk: MemoryDisk) -> None:
    create(disk, "f", sync=True)
    disk.sync_directory(RUN)
    assert {str(tree(found, RUN)) for _, found in crash_states(disk, random.Random(0))} == {"{'f': b'12345678'}"}


@pytest.mark.parametrize(
    ("tail", "content"),
    [
        (Tail.LOST, b"1234"),
        (Tail.HALF, b"123456"),
        (Tail.ZEROED, b"1234\0\0\0\0"),
        (Tail.KEPT, b"12345678"),
    ],
)
def test_bytes_after_the_last_sync_are_lost_halved_zeroed_or_kept(disk: MemoryDisk, tail: Tail, content: bytes) -> None:
    handle = disk.create(RUN / "f")
    disk.write(handle, memoryview(b"1234"))
    disk.sync_file(handle)
    disk.write(handle, memoryview(b"5678"))
    assert tree(disk.after_crash(names="all", tail=tail), RUN) == {"f": content}


def test_a_sync_of_a_directory_says_nothing_about_its_own_name(disk: MemoryDisk) -> None:
    disk.make_directory(RUN / "d")
    create(disk, "d/f", sync=True)
    disk.sync_directory(RUN / "d")
    assert tree(disk.after_crash(), RUN) == {}
    disk.sync_directory(RUN)
    assert tree(disk.after_crash(), RUN) == {"d": None, "d/f": b"12345678"}


def test_a_renamed_directory_whose_names_were_never_synced_comes_back_empty(disk: MemoryDisk) -> None:
    disk.make_directory(RUN / ".tmp")
    create(disk, ".tmp/f", sync=True)
    disk.rename(RUN / ".tmp", RUN / "final")
    disk.sync_directory(RUN)
    assert tree(disk.after_crash(), RUN) == {"final": None}


def test_a_removal_that_was_not_synced_comes_back(disk: MemoryDisk) -> None:
    create(disk, "f")
    disk.sync_all()
    disk.unlink(RUN / "f")
    assert tree(disk, RUN) == {}
    assert tree(disk.after_crash(), RUN) == {"f": b"12345678"}
    disk.sync_directory(RUN)
    assert tree(disk.after_crash(), RUN) == {}


def test_two_names_of_one_file_share_what_survives(disk: MemoryDisk) -> None:
    create(disk, "a")
    disk.link(RUN / "a", RUN / "b")
    found = disk.after_crash(names="all", tail=random.Random(3))
    assert tree(found, RUN)["a"] == tree(found, RUN)["b"]
    found.unlink(RUN / "a")
    assert "b" in tree(found, RUN)


def test_the_disk_after_a_crash_is_another_one_and_all_of_it_is_durable(disk: MemoryDisk) -> None:
    handle = disk.create(RUN / "f")
    disk.write(handle, memoryview(b"one"))
    found = disk.after_crash(names="all", tail=Tail.KEPT)
    disk.write(handle, memoryview(b"two"))
    assert tree(found, RUN) == {"f": b"one"}
    assert tree(found.after_crash(), RUN) == {"f": b"one"}
    assert found.pending == ()
    with pytest.raises(OSError, match="Bad file descriptor"):
        found.write(handle, memoryview(b"from before the crash"))


# ---- which names survive ----


def test_changes_survive_as_a_prefix_of_their_order(disk: MemoryDisk) -> None:
    for name in ("a", "b", "c"):
        disk.make_directory(RUN / name)
    assert [change.description.split("/")[-1] for change in disk.pending] == ["a", "b", "c"]
    found = [set(tree(state, RUN)) for _, state in crash_states(disk)]
    assert found == [set(), {"a"}, {"a", "b"}, {"a", "b", "c"}]


def test_with_a_generator_later_changes_survive_earlier_ones(disk: MemoryDisk) -> None:
    for name in ("a", "b"):
        disk.make_directory(RUN / name)
    found = [set(tree(state, RUN)) for _, state in crash_states(disk, random.Random(0))]
    assert {"b"} in found


def test_a_chosen_change_brings_along_what_it_cannot_do_without(disk: MemoryDisk) -> None:
    create(disk, "a", b"")
    disk.rename(RUN / "a", RUN / "b")
    disk.rename(RUN / "b", RUN / "c")
    assert tree(disk.after_crash(names=[2]), RUN) == {"c": b""}
    assert tree(disk.after_crash(names=[0]), RUN) == {"a": b""}


def test_an_entry_renamed_twice_never_has_its_first_and_its_last_name(disk: MemoryDisk) -> None:
    create(disk, "a", b"", sync=True)
    disk.sync_all()
    disk.rename(RUN / "a", RUN / "b")
    disk.rename(RUN / "b", RUN / "c")
    assert tree(disk.after_crash(names=[1]), RUN) == {"c": b""}


def test_an_unsynced_file_is_absent_empty_half_zeroed_or_whole(disk: MemoryDisk) -> None:
    create(disk, "f", b"abcd")
    found = {tree(state, RUN).get("f") for _, state in crash_states(disk)}
    assert found == {None, b"", b"ab", b"\0\0\0\0", b"abcd"}


def test_a_move_into_a_new_directory_is_never_lost_with_it(disk: MemoryDisk) -> None:
    create(disk, "f", b"")
    disk.sync_all()
    disk.make_directory(RUN / "new")
    disk.rename(RUN / "f", RUN / "new" / "f")
    assert tree(disk.after_crash(names=[1]), RUN) == {"new": None, "new/f": b""}
    disk.sync_directory(RUN / "new")
    assert tree(disk.after_crash(), RUN) == {"new": None, "new/f": b""}


def test_a_move_out_of_a_removed_directory_is_never_lost_with_it(disk: MemoryDisk) -> None:
    disk.make_directory(RUN / "old")
    disk.make_directory(RUN / "kept")
    create(disk, "old/f", b"")
    disk.sync_all()
    disk.rename(RUN / "old" / "f", RUN / "kept" / "f")
    disk.remove_directory(RUN / "old")
    disk.sync_directory(RUN)
    assert tree(disk.after_crash(), RUN) == {"kept": None, "kept/f": b""}


def test_directories_moved_into_each_other_never_vanish_in_a_circle(disk: MemoryDisk) -> None:
    Files(disk).make_directory(RUN / "a" / "b" / "x" / "y")
    disk.sync_all()
    disk.rename(RUN / "a" / "b" / "x", RUN / "x")
    disk.rename(RUN / "a", RUN / "x" / "y" / "a")
    for names in ([], [0], [1], [0, 1]):
        assert len(tree(disk.after_crash(names=names), RUN)) == 4


_MOVE = st.tuples(st.sampled_from(["rename", "make", "sync"]), st.sampled_from("abcd"), st.sampled_from("abcd"))


@settings(max_examples=150, deadline=None)
@given(st.lists(_MOVE, max_size=12), st.integers(0, 10_000))
def test_whatever_is_renamed_and_synced_an_entry_has_one_name_after_any_crash(
    moves: list[tuple[str, str, str]], seed: int
) -> None:
    disk = MemoryDisk([RUN / name for name in "abcd"])
    create(disk, "a/thing", b"thing", sync=True)
    disk.sync_all()
    for kind, one, other in moves:
        try:
            if kind == "rename":
                disk.rename(RUN / one / "thing", RUN / other / "thing")
            elif kind == "make":
                disk.rename(RUN / one, RUN / other / one)
            else:
                disk.sync_directory(RUN / one)
        except OSError:
            continue
    for words, found in crash_states(disk, random.Random(seed)):
        contents = [content for content in tree(found, RUN).values() if content is not None]
        assert contents == [b"thing"], words
        assert sum(content is None for content in tree(found, RUN).values()) == 4, words


# ---- room ----


def test_a_write_takes_what_there_is_room_for_and_the_next_one_is_refused() -> None:
    disk = MemoryDisk([RUN], capacity_bytes=5)
    handle = disk.create(RUN / "f")
    assert disk.write(handle, memoryview(b"12345678")) == 5
    assert disk.write(handle, memoryview(b"")) == 0
    with pytest.raises(OSError) as refusal:
        disk.write(handle, memoryview(b"6"))
    assert refusal.value.errno == errno.ENOSPC
    assert disk.space(RUN).free_bytes == 0


def test_space_is_freed_when_no_name_and_no_handle_is_left() -> None:
    disk = MemoryDisk([RUN], capacity_bytes=8, capacity_inodes=3)
    handle = disk.create(RUN / "f")
    disk.write(handle, memoryview(b"12345678"))
    disk.link(RUN / "f", RUN / "g")
    assert disk.space(RUN).free_inodes == 1
    disk.unlink(RUN / "f")
    disk.unlink(RUN / "g")
    assert disk.space(RUN).free_bytes == 0
    disk.close(handle)
    assert (disk.space(RUN).free_bytes, disk.space(RUN).free_inodes) == (8, 2)


def test_replacing_gives_the_room_of_the_old_file_back() -> None:
    disk = MemoryDisk([RUN], capacity_bytes=100, capacity_inodes=3)
    for number in range(10):
        Files(disk).replace(RUN / "f", b"%d" % number * 40, scratch=".f")
    assert (disk.space(RUN).free_bytes, disk.space(RUN).free_inodes) == (60, 1)
    disk.make_directory(RUN / "d")
    disk.remove_directory(RUN / "d")
    assert disk.space(RUN).free_inodes == 1


def test_without_inodes_nothing_new_is_made() -> None:
    disk = MemoryDisk([RUN], capacity_inodes=1)
    with pytest.raises(OSError, match="No space left"):
        disk.create(RUN / "x")
    with pytest.raises(OSError, match="No space left"):
        disk.make_directory(RUN / "x")
    with pytest.raises(OSError, match="No space left"):
        disk.make_symlink("y", RUN / "x")
    assert tree(disk, RUN) == {}


def test_the_room_after_a_crash_is_that_of_what_survived() -> None:
    disk = MemoryDisk([RUN], capacity_bytes=10, capacity_inodes=5)
    create(disk, "kept", b"123", sync=True)
    disk.sync_directory(RUN)
    create(disk, "lost", b"4567")
    assert (disk.space(RUN).free_bytes, disk.space(RUN).free_inodes) == (3, 2)
    found = disk.after_crash().space(RUN)
    assert (found.free_bytes, found.free_inodes) == (7, 3)


def test_the_clock_can_be_passed_in() -> None:
    now = [5_000]
    disk = MemoryDisk([RUN], now_ns=lambda: now[0])
    create(disk, "f", sync=True)
    disk.sync_all()
    now[0] = 9_000
    assert disk.status(RUN / "f").modified_ns == 5_000
    found = disk.after_crash()
    assert found.status(RUN / "f").modified_ns == 5_000
    found.make_directory(RUN / "d")
    assert found.status(RUN / "d").modified_ns == 9_000
