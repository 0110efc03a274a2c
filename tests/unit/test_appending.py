"""Adding to a file behind its end: what stands there, what a refusal leaves, what a power cut leaves."""

import errno
import os
from pathlib import Path

import pytest

from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Appender, Files
from unbroken.testing import FaultyDisk, MemoryDisk, Refuse, Shorten, Tail, at_nth, tree

RUN = Path("/run")
RECORD = RUN / "record"


def test_appended_bytes_follow_the_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "record"
    for data in (b"one\n", b"two\n"):
        appender = LOCAL.appending(path)
        appender.append(data)
        appender.sync()
        appender.close()
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_file_is_made_only_when_something_is_appended_and_closing_twice_is_no_error(tmp_path: Path) -> None:
    appender = LOCAL.appending(tmp_path / "record")
    appender.close()
    appender.close()
    assert not (tmp_path / "record").exists()
    appender.append(b"x")
    appender.close()
    appender.append(b"y")
    appender.close()
    assert (tmp_path / "record").read_bytes() == b"xy"


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
def test_only_a_regular_file_is_appended_to(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "record"
    if kind == "link":
        (tmp_path / "other").write_bytes(b"")
        path.symlink_to("other")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(StorageFailed):
        LOCAL.appending(path).append(b"x")


def test_the_disk_in_memory_refuses_links_and_directories_too() -> None:
    disk = MemoryDisk([RUN, RUN / "directory"])
    disk.make_symlink("directory", RUN / "link")
    with pytest.raises(OSError) as refused:
        disk.open_append(RUN / "directory")
    assert refused.value.errno == errno.EISDIR
    with pytest.raises(OSError) as refused:
        disk.open_append(RUN / "link")
    assert refused.value.errno == errno.ELOOP


def test_what_was_synced_survives_a_power_cut_and_what_was_not_may_be_gone() -> None:
    disk = MemoryDisk([RUN])
    appender = Files(disk).appending(RECORD)
    appender.append(b"promised\n")
    assert tree(disk.after_crash(), RUN) == {}
    appender.sync()
    appender.append(b"not yet\n")
    assert tree(disk.after_crash(), RUN) == {"record": b"promised\n"}
    assert tree(disk.after_crash(tail=Tail.HALF), RUN) == {"record": b"promised\nnot "}
    assert tree(disk.after_crash(tail=Tail.ZEROED), RUN) == {"record": b"promised\n" + bytes(8)}


def test_a_file_appended_to_by_the_next_process_keeps_what_was_durable() -> None:
    disk = MemoryDisk([RUN])
    first = Files(disk).appending(RECORD)
    first.append(b"a")
    first.sync()
    second = Files(disk).appending(RECORD)
    second.append(b"b")
    assert tree(disk.after_crash(), RUN) == {"record": b"a"}
    second.sync()
    assert tree(disk.after_crash(), RUN) == {"record": b"ab"}


def test_the_name_is_synced_once_and_each_sync_reaches_the_bytes() -> None:
    disk = FaultyDisk(MemoryDisk([RUN]))
    appender = Files(disk).appending(RECORD)
    for _ in range(3):
        appender.append(b"x")
        appender.sync()
    assert disk.names == [
        *("open_append", "write", "sync_file", "sync_directory"),
        *("write", "sync_file", "write", "sync_file"),
    ]


def test_a_short_write_is_finished() -> None:
    disk = FaultyDisk(MemoryDisk([RUN]), at_nth("write", 0, Shorten(2)))
    Files(disk).appending(RECORD).append(b"whole")
    assert tree(disk.inner, RUN) == {"record": b"whole"}


def _append_and_sync(appender: Appender) -> None:
    appender.append(b"1")
    appender.sync()


@pytest.mark.parametrize("operation", ["open_append", "write", "sync_file", "sync_directory"])
def test_after_a_refusal_the_file_is_opened_again_and_no_sync_is_tried_twice_on_a_handle(operation: str) -> None:
    disk = FaultyDisk(MemoryDisk([RUN]), at_nth(operation, 0, Refuse(errno.EIO)))
    appender = Files(disk).appending(RECORD)
    with pytest.raises(StorageFailed):
        _append_and_sync(appender)
    appender.append(b"2")
    appender.sync()
    assert disk.names.count("open_append") == 2
    left = tree(disk.inner, RUN)["record"]
    assert isinstance(left, bytes) and left.endswith(b"2")


def test_a_full_disk_met_at_the_close_is_reported() -> None:
    disk = FaultyDisk(MemoryDisk([RUN]), at_nth("close", 0, Refuse(errno.ENOSPC)))
    appender = Files(disk).appending(RECORD)
    appender.append(b"1")
    with pytest.raises(StorageFailed, match="No space left"):
        appender.close()
    appender.close()


def test_a_replacement_that_need_not_last_syncs_nothing_and_is_whole_to_other_processes() -> None:
    disk = FaultyDisk(MemoryDisk([RUN]))
    Files(disk).replace(RECORD, b"old", scratch=".record")
    disk.operations.clear()
    Files(disk).replace(RECORD, b"new", scratch=".record", durable=False)
    assert not {"sync_file", "sync_directory"} & set(disk.names)
    assert tree(disk.inner, RUN) == {"record": b"new"}
