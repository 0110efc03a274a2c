"""The moves of the house, over the machine's disk and the one in memory: what they do, refuse and promise in order."""

import errno
import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unbroken.disk import DIRECT_BYTES, Disk, LocalDisk, Node, NodeKind
from unbroken.errors import StorageFailed
from unbroken.files import Files
from unbroken.testing import (
    Fault,
    FaultyDisk,
    Ignore,
    Kill,
    Killed,
    MemoryDisk,
    Operation,
    Refuse,
    Shorten,
    always,
    at_nth,
    tree,
)


@pytest.fixture(params=["local", "memory"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return LocalDisk() if request.param == "local" else MemoryDisk([tmp_path])


@pytest.fixture
def files(disk: Disk) -> Files:
    return Files(disk)


def read(files: Files, path: Path) -> bytes:
    return files.read_bytes(path, limit_bytes=1000)


# ---- a new file ----


def test_a_new_file_holds_all_chunks_in_order(files: Files, tmp_path: Path) -> None:
    assert files.write_new(tmp_path / "f", [b"one", memoryview(b"two"), b""]) == 6
    assert read(files, tmp_path / "f") == b"onetwo"


def test_chunks_of_any_item_size_are_written_as_bytes(files: Files, tmp_path: Path) -> None:
    assert files.write_new(tmp_path / "f", [memoryview(b"abcdefgh").cast("I")]) == 8
    assert read(files, tmp_path / "f") == b"abcdefgh"


def test_a_generator_may_reuse_its_buffer_for_the_next_chunk(files: Files, tmp_path: Path) -> None:
    buffer = bytearray(1)

    def chunks() -> Iterator[memoryview]:
        for letter in b"abc":
            buffer[0] = letter
            yield memoryview(buffer)

    files.write_new(tmp_path / "f", chunks())
    assert read(files, tmp_path / "f") == b"abc"


@pytest.mark.parametrize(
    "fault",
    [None, ("use_direct_io", Refuse(errno.EINVAL)), ("write", Refuse(errno.EINVAL)), ("write", Shorten(4096 + 7))],
    ids=["direct", "no direct I/O", "another alignment", "a short write"],
)
def test_a_file_written_past_the_page_cache_has_all_bytes(
    disk: Disk, tmp_path: Path, fault: tuple[str, Fault] | None
) -> None:
    """Whole pages go directly, the tail does not; whatever the file system cannot goes through the cache."""
    memory = memoryview(mmap.mmap(-1, 5 * DIRECT_BYTES))
    memory[:] = bytes(range(256)) * (len(memory) // 256)
    faulty = FaultyDisk(disk, always(*fault) if fault and fault[0] == "use_direct_io" else _first(fault))
    chunks = [memory[: 3 * DIRECT_BYTES], memory[3 * DIRECT_BYTES : 4 * DIRECT_BYTES + 100], memory[:50]]
    size_bytes = Files(faulty).write_new(tmp_path / "f", chunks, is_direct=True)
    found = Files(disk).read_bytes(tmp_path / "f", limit_bytes=1 << 20)
    assert found == b"".join(chunks)
    assert size_bytes == len(found)


def _first(fault: tuple[str, Fault] | None) -> Callable[[Operation], Fault | None]:
    return at_nth(fault[0], 0, fault[1]) if fault else lambda _: None


def test_a_taken_name_is_refused_and_what_stands_there_is_untouched(files: Files, tmp_path: Path) -> None:
    files.write_new(tmp_path / "f", [b"first"])
    with pytest.raises(StorageFailed, match="File exists") as refusal:
        files.write_new(tmp_path / "f", [b"second"])
    assert refusal.value.path == tmp_path / "f"
    assert read(files, tmp_path / "f") == b"first"


def test_short_writes_are_completed(disk: Disk, tmp_path: Path) -> None:
    faulty = FaultyDisk(disk, always("write", Shorten(2)))
    assert Files(faulty).write_new(tmp_path / "f", [b"abcde", b"f"]) == 6
    assert read(Files(disk), tmp_path / "f") == b"abcdef"
    assert faulty.names.count("write") == 4


def test_a_write_that_takes_nothing_is_an_error_and_no_endless_loop(disk: Disk, tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="Input/output error"):
        Files(FaultyDisk(disk, always("write", Shorten(0)))).write_new(tmp_path / "f", [b"x"])


@pytest.mark.parametrize("name", ["write", "sync_file", "close"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_file_that_could_not_be_finished_is_removed(disk: Disk, tmp_path: Path, name: str, code: int) -> None:
    faulty = FaultyDisk(disk, at_nth(name, 0, Refuse(code)))
    with pytest.raises(StorageFailed) as refusal:
        Files(faulty).write_new(tmp_path / "f", [b"x"])
    assert isinstance(refusal.value.__cause__, OSError)
    assert refusal.value.__cause__.errno == code
    assert tree(disk, tmp_path) == {}
    # The handle went back exactly once, whatever was refused: a second close could hit a stranger's file.
    assert faulty.names.count("close") == 1


def test_a_failed_sync_is_not_tried_again(disk: Disk, tmp_path: Path) -> None:
    faulty = FaultyDisk(disk, at_nth("sync_file", 0, Refuse(errno.EIO)))
    with pytest.raises(StorageFailed):
        Files(faulty).write_new(tmp_path / "f", [b"x"])
    assert faulty.names.count("sync_file") == 1


def test_a_source_of_chunks_that_breaks_leaves_no_file_and_keeps_its_own_error(files: Files, tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        files.write_new(tmp_path / "f", chunks())
    assert tree(files.disk, tmp_path) == {}


def test_a_full_disk_is_reported_and_leaves_nothing_behind() -> None:
    files = Files(MemoryDisk(["/run"], capacity_bytes=4))
    with pytest.raises(StorageFailed, match="No space left on device"):
        files.write_new(Path("/run/f"), [b"abcdef"])
    assert files.space(Path("/run")).free_bytes == 4


# ---- the order of syncs ----


@pytest.mark.promise("C2", "M10")
def test_replacing_syncs_the_file_before_the_rename_and_the_directory_after_it(disk: Disk, tmp_path: Path) -> None:
    Files(disk).write_new(tmp_path / "f", [b"old"])
    faulty = FaultyDisk(disk)
    Files(faulty).replace(tmp_path / "f", b"new", scratch=".f")
    assert faulty.names == ["unlink", "create", "write", "sync_file", "close", "rename", "sync_directory"]
    assert [(o.path.name, o.source and o.source.name) for o in faulty.operations if o.name == "rename"] == [("f", ".f")]
    assert faulty.operations[-1].path == tmp_path
    assert tree(disk, tmp_path) == {"f": b"new"}


@pytest.mark.promise("C2", "M10")
def test_publishing_into_another_directory_syncs_both(disk: Disk, tmp_path: Path) -> None:
    files = Files(disk)
    files.make_directory(tmp_path / "from" / "d")
    files.make_directory(tmp_path / "to")
    faulty = FaultyDisk(disk)
    Files(faulty).publish(tmp_path / "from" / "d", tmp_path / "to" / "d")
    assert faulty.names == ["rename", "sync_directory", "sync_directory"]
    assert [o.path.name for o in faulty.operations if o.name == "sync_directory"] == ["to", "from"]
    assert tree(disk, tmp_path) == {"from": None, "to": None, "to/d": None}


def test_creating_once_syncs_the_bytes_before_they_get_their_name(disk: Disk, tmp_path: Path) -> None:
    faulty = FaultyDisk(disk)
    assert Files(faulty).create_once(tmp_path / "f", b"x", scratch=".f") is True
    assert faulty.names == ["unlink", "create", "write", "sync_file", "close", "link", "unlink", "sync_directory"]


def test_swapping_a_link_renames_over_the_old_one_and_syncs(disk: Disk, tmp_path: Path) -> None:
    disk.make_symlink("old", tmp_path / "latest")
    faulty = FaultyDisk(disk)
    Files(faulty).swap_link(tmp_path / "latest", "new", scratch=".latest")
    assert faulty.names == ["unlink", "make_symlink", "rename", "sync_directory"]
    assert tree(disk, tmp_path) == {"latest": "new"}


def test_a_refused_rename_leaves_the_old_file(disk: Disk, tmp_path: Path) -> None:
    Files(disk).write_new(tmp_path / "f", [b"old"])
    with pytest.raises(StorageFailed):
        Files(FaultyDisk(disk, always("rename", Refuse(errno.EIO)))).replace(tmp_path / "f", b"new", scratch=".f")
    assert read(Files(disk), tmp_path / "f") == b"old"
    # What was left beside it does not stand in the way of the next one.
    Files(disk).replace(tmp_path / "f", b"newer", scratch=".f")
    assert tree(disk, tmp_path) == {"f": b"newer"}


def test_publishing_over_a_full_directory_is_refused(files: Files, tmp_path: Path) -> None:
    files.make_directory(tmp_path / "a")
    files.make_directory(tmp_path / "b")
    files.write_new(tmp_path / "b" / "f", [b"x"])
    with pytest.raises(StorageFailed, match="Directory not empty"):
        files.publish(tmp_path / "a", tmp_path / "b")
    assert tree(files.disk, tmp_path) == {"a": None, "b": None, "b/f": b"x"}


# ---- once ----


def test_the_second_to_create_once_is_reported_and_changes_nothing(files: Files, tmp_path: Path) -> None:
    assert files.create_once(tmp_path / "f", b"first", scratch=".1") is True
    assert files.create_once(tmp_path / "f", b"second", scratch=".2") is False
    assert tree(files.disk, tmp_path) == {"f": b"first"}


def test_of_many_contenders_exactly_one_creates(files: Files, tmp_path: Path) -> None:
    contenders = 8
    start = threading.Barrier(contenders)
    won: list[int] = []

    def contend(number: int) -> None:
        start.wait()
        if files.create_once(tmp_path / "f", b"by %d" % number, scratch=f".{number}"):
            won.append(number)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(contenders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert tree(files.disk, tmp_path) == {"f": b"by %d" % won[0]}


# ---- directories ----


def test_a_directory_is_made_with_its_parents_and_again_without_complaint(files: Files, tmp_path: Path) -> None:
    files.make_directory(tmp_path / "a" / "b" / "c")
    files.make_directory(tmp_path / "a" / "b" / "c")
    assert tree(files.disk, tmp_path) == {"a": None, "a/b": None, "a/b/c": None}


def test_a_link_to_a_directory_serves_as_one(files: Files, tmp_path: Path) -> None:
    files.make_directory(tmp_path / "scratch")
    files.disk.make_symlink("scratch", tmp_path / "runs")
    files.make_directory(tmp_path / "runs")
    files.make_directory(tmp_path / "runs" / "a")
    assert tree(files.disk, tmp_path) == {"runs": "scratch", "scratch": None, "scratch/a": None}


@pytest.mark.parametrize("below", ["", "x", "x/y"])
def test_a_file_in_the_way_of_a_directory_is_refused(files: Files, tmp_path: Path, below: str) -> None:
    files.write_new(tmp_path / "f", [b"x"])
    with pytest.raises(StorageFailed, match="Not a directory"):
        files.make_directory(tmp_path / "f" / below)


def test_a_link_to_nothing_or_to_a_file_is_no_directory(files: Files, tmp_path: Path) -> None:
    files.write_new(tmp_path / "f", [b"x"])
    for name, target in (("dangling", "nowhere"), ("wrong", "f")):
        files.disk.make_symlink(target, tmp_path / name)
        with pytest.raises(StorageFailed):
            files.make_directory(tmp_path / name)


def test_a_directory_that_another_process_makes_at_the_same_time_is_no_error(disk: Disk, tmp_path: Path) -> None:
    def first(operation: Operation) -> Fault | None:
        if operation.name == "make_directory":
            disk.make_directory(operation.path)
        return None

    Files(FaultyDisk(disk, first)).make_directory(tmp_path / "a" / "b")
    assert tree(disk, tmp_path) == {"a": None, "a/b": None}


def test_a_durable_directory_outlives_a_power_cut_with_all_its_parents() -> None:
    for durable in (False, True):
        disk = MemoryDisk(["/run"])
        Files(disk).make_directory(Path("/run/a/b"), durable=durable)
        assert tree(disk.after_crash(), Path("/run")) == ({"a": None, "a/b": None} if durable else {})


def test_a_durable_directory_makes_the_name_it_stands_under_durable_too() -> None:
    disk = MemoryDisk(["/run"])
    Files(disk).make_directory(Path("/run/a"))
    Files(disk).make_directory(Path("/run/a/b"), durable=True)
    assert tree(disk.after_crash(), Path("/run")) == {"a": None, "a/b": None}


def test_a_directory_above_ours_that_we_may_not_read_does_not_stop_us(disk: Disk, tmp_path: Path) -> None:
    faulty = FaultyDisk(disk, at_nth("sync_directory", 0, Refuse(errno.EACCES)))
    Files(faulty).make_directory(tmp_path / "a", durable=True)
    assert faulty.struck is not None
    assert faulty.struck.path == tmp_path.parent
    assert tree(disk, tmp_path) == {"a": None}


def test_removing_a_tree_leaves_what_its_links_point_at(files: Files, tmp_path: Path) -> None:
    files.make_directory(tmp_path / "kept")
    files.write_new(tmp_path / "kept" / "f", [b"x"])
    files.make_directory(tmp_path / "gone" / "deep")
    files.write_new(tmp_path / "gone" / "deep" / "g", [b"x"])
    files.disk.make_symlink("../kept", tmp_path / "gone" / "link")
    files.disk.make_symlink("kept/f", tmp_path / "to-file")
    files.disk.make_symlink("kept", tmp_path / "to-directory")
    for name in ("gone", "to-file", "to-directory", "never-there"):
        files.remove_tree(tmp_path / name)
    assert tree(files.disk, tmp_path) == {"kept": None, "kept/f": b"x"}


def test_two_removers_of_one_tree_do_not_disturb_each_other(disk: Disk, tmp_path: Path) -> None:
    Files(disk).make_directory(tmp_path / "gone" / "a")
    Files(disk).write_new(tmp_path / "gone" / "f", [b"x"])

    def other(operation: Operation) -> Fault | None:
        if (operation.name, operation.nth) == ("unlink", 0):
            Files(disk).remove_tree(tmp_path / "gone")
        return None

    Files(FaultyDisk(disk, other)).remove_tree(tmp_path / "gone")
    assert tree(disk, tmp_path) == {}


# ---- reading ----


def test_a_file_larger_than_the_limit_is_refused_and_one_just_as_large_is_read(files: Files, tmp_path: Path) -> None:
    files.write_new(tmp_path / "f", [b"x" * 100])
    assert files.read_bytes(tmp_path / "f", limit_bytes=100) == b"x" * 100
    with pytest.raises(StorageFailed, match="File too large"):
        files.read_bytes(tmp_path / "f", limit_bytes=99)


def test_an_empty_file_reads_as_no_bytes(files: Files, tmp_path: Path) -> None:
    files.write_new(tmp_path / "f", [])
    assert files.read_bytes(tmp_path / "f", limit_bytes=0) == b""


def test_a_file_replaced_by_a_larger_one_while_we_look_is_read_whole(disk: Disk, tmp_path: Path) -> None:
    Files(disk).write_new(tmp_path / "f", [b"old"])

    def replace(operation: Operation) -> Fault | None:
        if operation.name == "open":
            Files(disk).replace(tmp_path / "f", b"new and longer", scratch=".f")
        return None

    assert Files(FaultyDisk(disk, replace)).read_bytes(tmp_path / "f", limit_bytes=100) == b"new and longer"


def test_reading_completes_short_reads_and_gives_the_handle_back(disk: Disk, tmp_path: Path) -> None:
    class Halting(FaultyDisk):
        def read_at(self, handle: int, offset: int, into: memoryview) -> int:
            return super().read_at(handle, offset, into[:2])

    Files(disk).write_new(tmp_path / "f", [b"abcde"])
    halting = Halting(disk)
    assert read(Files(halting), tmp_path / "f") == b"abcde"
    assert [o.name for o in halting.operations].count("close") == 1


def test_a_sick_disk_is_reported_and_the_handle_given_back(disk: Disk, tmp_path: Path) -> None:
    Files(disk).write_new(tmp_path / "f", [b"x"])
    faulty = FaultyDisk(disk, always("read_at", Refuse(errno.EIO)))
    with pytest.raises(StorageFailed, match="Input/output error"):
        read(Files(faulty), tmp_path / "f")
    assert faulty.operations[-1].name == "close"


def test_links_are_not_read_through(files: Files, tmp_path: Path) -> None:
    files.write_new(tmp_path / "f", [b"secret"])
    files.disk.make_symlink("f", tmp_path / "l")
    with pytest.raises(StorageFailed, match="symbolic links"):
        read(files, tmp_path / "l")


def test_what_stands_at_a_path_is_found_and_nothing_is_none(files: Files, tmp_path: Path) -> None:
    files.write_new(tmp_path / "f", [b"abc"])
    found = files.find(tmp_path / "f")
    assert found is not None
    assert (found.kind, found.size_bytes) == (NodeKind.FILE, 3)
    assert files.find(tmp_path / "none") is None
    assert files.find(tmp_path / "f" / "below") is None


def test_names_are_listed_in_order_and_a_missing_directory_is_reported(files: Files, tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        files.write_new(tmp_path / name, [])
    assert files.list_directory(tmp_path) == [Node(name, NodeKind.FILE) for name in "abc"]
    with pytest.raises(StorageFailed, match="No such file or directory"):
        files.list_directory(tmp_path / "none")


def test_a_link_is_read_and_anything_else_is_none(files: Files, tmp_path: Path) -> None:
    files.write_new(tmp_path / "f", [])
    files.swap_link(tmp_path / "l", "f", scratch=".l")
    assert files.read_link(tmp_path / "l") == "f"
    assert files.read_link(tmp_path / "f") is None
    assert files.read_link(tmp_path / "none") is None
    assert files.space(tmp_path).free_bytes > 0


# ---- death ----


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_dead_do_not_clean_up(disk: Disk, tmp_path: Path, moment: str) -> None:
    fault = Kill("before") if moment == "before" else Kill("after")
    faulty = FaultyDisk(disk, always("sync_file", fault))
    with pytest.raises(Killed) as death:
        Files(faulty).write_new(tmp_path / "f", [b"x"])
    faulty.release()
    assert death.value.operation.name == "sync_file"
    assert faulty.names == ["create", "write", "sync_file"]
    assert tree(disk, tmp_path) == {"f": b"x"}


def test_a_sync_that_is_ignored_is_counted_and_not_done() -> None:
    disk = MemoryDisk(["/run"])
    faulty = FaultyDisk(disk, always("sync_directory", Ignore()))
    Files(faulty).replace(Path("/run/f"), b"x", scratch=".f")
    assert faulty.names[-1] == "sync_directory"
    assert tree(disk.after_crash(), Path("/run")) == {}
