"""What every disk answers, the machine's and the one in memory: the same assertions, error codes included."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.disk import Disk, LocalDisk, Node, NodeKind
from unbroken.testing import FaultyDisk, MemoryDisk


@pytest.fixture(params=["local", "memory", "faulty"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    """The machine's disk, the one in memory, and one that counts but has nothing planned."""
    if request.param == "local":
        return LocalDisk()
    memory = MemoryDisk([tmp_path])
    return memory if request.param == "memory" else FaultyDisk(memory)


def write(disk: Disk, path: Path, content: bytes = b"") -> None:
    handle = disk.create(path)
    assert disk.write(handle, memoryview(content)) == len(content)
    disk.close(handle)


def read(disk: Disk, path: Path) -> bytes:
    handle = disk.open(path)
    buffer = bytearray(100)
    taken = disk.read_at(handle, 0, memoryview(buffer))
    disk.close(handle)
    return bytes(buffer[:taken])


def code_of(call: Callable[..., object], *arguments: object) -> int | None:
    with pytest.raises(OSError) as refusal:
        call(*arguments)
    return refusal.value.errno


def test_bytes_come_back_as_they_were_written_in_several_writes(disk: Disk, tmp_path: Path) -> None:
    handle = disk.create(tmp_path / "f")
    for piece in (b"one", b"", b"two"):
        assert disk.write(handle, memoryview(piece)) == len(piece)
    disk.sync_file(handle)
    disk.close(handle)
    assert read(disk, tmp_path / "f") == b"onetwo"
    assert disk.status(tmp_path / "f").size_bytes == 6


def test_reading_starts_anywhere_and_ends_at_the_end(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "f", b"abcdef")
    handle = disk.open(tmp_path / "f")
    buffer = bytearray(4)
    assert disk.read_at(handle, 4, memoryview(buffer)) == 2
    assert buffer == b"ef\0\0"
    assert disk.read_at(handle, 6, memoryview(buffer)) == 0
    assert disk.read_at(handle, 99, memoryview(buffer)) == 0
    disk.close(handle)


def test_handles_do_only_what_they_were_opened_for(disk: Disk, tmp_path: Path) -> None:
    writing = disk.create(tmp_path / "f")
    reading = disk.open(tmp_path / "f")
    assert code_of(disk.read_at, writing, 0, memoryview(bytearray(1))) == errno.EBADF
    assert code_of(disk.write, reading, memoryview(b"x")) == errno.EBADF
    disk.close(writing)
    disk.close(reading)
    assert code_of(disk.close, writing) == errno.EBADF
    assert code_of(disk.sync_file, writing) == errno.EBADF


def test_creating_never_opens_what_exists(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "f")
    disk.make_directory(tmp_path / "d")
    disk.make_symlink("nowhere", tmp_path / "l")
    for name in ("f", "d", "l"):
        assert code_of(disk.create, tmp_path / name) == errno.EEXIST
        assert code_of(disk.make_directory, tmp_path / name) == errno.EEXIST
        assert code_of(disk.make_symlink, "x", tmp_path / name) == errno.EEXIST
        assert code_of(disk.link, tmp_path / "f", tmp_path / name) == errno.EEXIST
    assert not {node.name for node in disk.list_directory(tmp_path)} - {"f", "d", "l"}


def test_only_regular_files_are_opened(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "f")
    disk.make_directory(tmp_path / "d")
    disk.make_symlink("f", tmp_path / "l")
    assert code_of(disk.open, tmp_path / "l") == errno.ELOOP
    assert code_of(disk.open, tmp_path / "d") == errno.EINVAL
    assert code_of(disk.open, tmp_path / "none") == errno.ENOENT


def test_a_pipe_under_a_files_name_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert code_of(LocalDisk().open, tmp_path / "pipe") == errno.EINVAL
    assert LocalDisk().list_directory(tmp_path) == [Node("pipe", NodeKind.OTHER)]
    assert LocalDisk().status(tmp_path / "pipe").kind is NodeKind.OTHER


def test_names_are_listed_by_kind_without_following_links(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "f")
    disk.make_directory(tmp_path / "d")
    disk.make_symlink("d", tmp_path / "l")
    expected = {Node("f", NodeKind.FILE), Node("d", NodeKind.DIRECTORY), Node("l", NodeKind.LINK)}
    assert set(disk.list_directory(tmp_path)) == expected
    assert {node.name: disk.status(tmp_path / node.name).kind for node in expected} == {
        node.name: node.kind for node in expected
    }


def test_a_link_is_its_target_and_its_size_the_targets_length(disk: Disk, tmp_path: Path) -> None:
    disk.make_symlink("ä/b", tmp_path / "l")
    assert disk.read_link(tmp_path / "l") == "ä/b"
    assert disk.status(tmp_path / "l").size_bytes == 4
    write(disk, tmp_path / "f")
    assert code_of(disk.read_link, tmp_path / "f") == errno.EINVAL
    assert code_of(disk.read_link, tmp_path) == errno.EINVAL
    assert code_of(disk.read_link, tmp_path / "none") == errno.ENOENT
    assert code_of(disk.make_symlink, "", tmp_path / "empty") == errno.ENOENT


def test_links_on_the_way_are_followed_and_circles_refused(disk: Disk, tmp_path: Path) -> None:
    disk.make_directory(tmp_path / "d")
    disk.make_directory(tmp_path / "d" / "e")
    disk.make_symlink("d/e", tmp_path / "l")
    write(disk, tmp_path / "l" / "f", b"x")
    assert read(disk, tmp_path / "d" / "e" / "f") == b"x"
    assert read(disk, tmp_path / "l" / ".." / "e" / "f") == b"x"
    disk.make_symlink(str(tmp_path / "d"), tmp_path / "absolute")
    assert read(disk, tmp_path / "absolute" / "e" / "f") == b"x"
    assert [node.name for node in disk.list_directory(tmp_path / "l")] == ["f"]
    disk.sync_directory(tmp_path / "l")
    disk.make_symlink("circle", tmp_path / "circle")
    assert code_of(disk.status, tmp_path / "circle" / "x") == errno.ELOOP
    assert code_of(disk.list_directory, tmp_path / "circle") == errno.ELOOP


def test_a_file_on_the_way_is_no_directory_and_nothing_on_the_way_is_not_there(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "f")
    for call in (disk.status, disk.open, disk.create, disk.make_directory, disk.unlink, disk.remove_directory):
        assert code_of(call, tmp_path / "f" / "x") == errno.ENOTDIR
        assert code_of(call, tmp_path / "none" / "x") == errno.ENOENT
    for look in (disk.list_directory, disk.sync_directory):
        assert code_of(look, tmp_path / "f") == errno.ENOTDIR
        assert code_of(look, tmp_path / "none") == errno.ENOENT
    assert code_of(disk.space, tmp_path / "none") == errno.ENOENT


def test_a_name_longer_than_the_kernel_takes_is_refused(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / ("x" * 255))
    assert code_of(disk.create, tmp_path / ("x" * 256)) == errno.ENAMETOOLONG
    assert code_of(disk.create, tmp_path / ("ä" * 128)) == errno.ENAMETOOLONG
    assert code_of(disk.create, tmp_path / "/".join(["x"] * 3000)) == errno.ENAMETOOLONG
    with pytest.raises(ValueError, match="null"):
        disk.create(tmp_path / "a\0b")


def test_a_file_is_renamed_over_a_file_or_link_and_takes_its_place(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "a", b"a")
    write(disk, tmp_path / "b", b"b")
    disk.make_symlink("b", tmp_path / "l")
    disk.rename(tmp_path / "a", tmp_path / "l")
    disk.rename(tmp_path / "l", tmp_path / "b")
    assert read(disk, tmp_path / "b") == b"a"
    assert [node.name for node in disk.list_directory(tmp_path)] == ["b"]


def test_a_directory_is_renamed_over_an_empty_one_only(disk: Disk, tmp_path: Path) -> None:
    for name in ("from", "empty", "full"):
        disk.make_directory(tmp_path / name)
    write(disk, tmp_path / "from" / "f", b"x")
    write(disk, tmp_path / "full" / "g")
    assert code_of(disk.rename, tmp_path / "from", tmp_path / "full") == errno.ENOTEMPTY
    disk.rename(tmp_path / "from", tmp_path / "empty")
    assert read(disk, tmp_path / "empty" / "f") == b"x"
    assert {node.name for node in disk.list_directory(tmp_path)} == {"empty", "full"}
    assert disk.list_directory(tmp_path / "empty" / "..") == disk.list_directory(tmp_path)


def test_renames_that_make_no_sense_are_refused_as_the_kernel_does(disk: Disk, tmp_path: Path) -> None:
    disk.make_directory(tmp_path / "d")
    disk.make_directory(tmp_path / "d" / "e")
    write(disk, tmp_path / "f")
    write(disk, tmp_path / "d" / "f")
    assert code_of(disk.rename, tmp_path / "d", tmp_path / "f") == errno.ENOTDIR
    assert code_of(disk.rename, tmp_path / "f", tmp_path / "d") == errno.EISDIR
    assert code_of(disk.rename, tmp_path / "d", tmp_path / "d" / "e" / "x") == errno.EINVAL
    assert code_of(disk.rename, tmp_path / "d" / "f", tmp_path / "d") == errno.ENOTEMPTY
    assert code_of(disk.rename, tmp_path / "none", tmp_path / "x") == errno.ENOENT
    assert code_of(disk.rename, tmp_path / "f", tmp_path / "none" / "x") == errno.ENOENT
    assert code_of(disk.rename, tmp_path / "d" / "..", tmp_path / "x") == errno.EBUSY
    disk.rename(tmp_path / "d", tmp_path / "d")


def test_a_hard_link_is_a_second_name_for_the_same_bytes(disk: Disk, tmp_path: Path) -> None:
    handle = disk.create(tmp_path / "a")
    disk.link(tmp_path / "a", tmp_path / "b")
    disk.write(handle, memoryview(b"both"))
    disk.close(handle)
    # Two names of one file: the kernel leaves both where they are and says yes.
    disk.rename(tmp_path / "a", tmp_path / "b")
    assert read(disk, tmp_path / "a") == b"both"
    disk.unlink(tmp_path / "a")
    assert read(disk, tmp_path / "b") == b"both"
    disk.make_directory(tmp_path / "d")
    assert code_of(disk.link, tmp_path / "d", tmp_path / "e") == errno.EPERM
    assert code_of(disk.link, tmp_path / "none", tmp_path / "e") == errno.ENOENT


def test_a_link_to_a_link_names_the_link_itself(disk: Disk, tmp_path: Path) -> None:
    disk.make_symlink("nowhere", tmp_path / "l")
    disk.link(tmp_path / "l", tmp_path / "m")
    disk.unlink(tmp_path / "l")
    assert disk.read_link(tmp_path / "m") == "nowhere"


def test_removing_takes_the_right_call_for_each_kind(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "f")
    disk.make_directory(tmp_path / "d")
    write(disk, tmp_path / "d" / "g")
    disk.make_symlink("d", tmp_path / "l")
    assert code_of(disk.unlink, tmp_path / "d") == errno.EISDIR
    assert code_of(disk.remove_directory, tmp_path / "f") == errno.ENOTDIR
    assert code_of(disk.remove_directory, tmp_path / "l") == errno.ENOTDIR
    assert code_of(disk.remove_directory, tmp_path / "d") == errno.ENOTEMPTY
    disk.unlink(tmp_path / "l")
    disk.unlink(tmp_path / "d" / "g")
    disk.remove_directory(tmp_path / "d")
    disk.unlink(tmp_path / "f")
    assert disk.list_directory(tmp_path) == []


def test_an_unlinked_file_can_be_read_by_whoever_holds_it(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "f", b"still here")
    handle = disk.open(tmp_path / "f")
    disk.unlink(tmp_path / "f")
    buffer = bytearray(10)
    assert disk.read_at(handle, 0, memoryview(buffer)) == 10
    assert buffer == b"still here"
    disk.close(handle)


def test_free_space_is_no_more_than_all_space(disk: Disk, tmp_path: Path) -> None:
    room = disk.space(tmp_path)
    assert 0 < room.free_bytes <= room.total_bytes


def test_the_time_of_modification_never_goes_back(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "f", b"1")
    before = disk.status(tmp_path).modified_ns
    write(disk, tmp_path / "g", b"2")
    assert disk.status(tmp_path).modified_ns >= before
    assert disk.status(tmp_path / "g").modified_ns >= disk.status(tmp_path / "f").modified_ns
