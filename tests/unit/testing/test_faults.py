"""The disk that fails on request: it counts all, strikes what was planned, and a death is final for everybody."""

import contextlib
import errno
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from unbroken.disk import Disk
from unbroken.files import Files
from unbroken.testing import (
    ERRORS,
    KILLS,
    Fault,
    FaultyDisk,
    Ignore,
    Kill,
    Killed,
    MemoryDisk,
    Refuse,
    Shorten,
    always,
    at,
    at_nth,
    crash_points,
    tree,
)

RUN = Path("/run")


def fresh() -> MemoryDisk:
    return MemoryDisk([RUN])


def write_one(disk: Disk) -> None:
    Files(disk).write_new(RUN / "f", [b"abcd"])


# ---- counting ----


def test_every_operation_is_counted_with_the_path_its_handle_was_opened_with() -> None:
    faulty = FaultyDisk(fresh())
    write_one(faulty)
    Files(faulty).read_bytes(RUN / "f", limit_bytes=10)
    assert [(o.index, o.name, o.nth) for o in faulty.operations][:4] == [
        (0, "create", 0),
        (1, "write", 0),
        (2, "sync_file", 0),
        (3, "close", 0),
    ]
    assert {o.path for o in faulty.operations} == {RUN / "f"}
    assert [o.nth for o in faulty.operations if o.name == "close"] == [0, 1]


def test_operations_that_only_look_are_distinguished_from_those_that_change() -> None:
    faulty = FaultyDisk(fresh())
    write_one(faulty)
    files = Files(faulty)
    files.read_bytes(RUN / "f", limit_bytes=10)
    files.find(RUN)
    files.list_directory(RUN)
    files.read_link(RUN)
    files.space(RUN)
    assert faulty.names == ["create", "write", "sync_file", "close"]
    looks = {o.name for o in faulty.operations if not o.is_mutating}
    assert looks == {"status", "open", "read_at", "close", "list_directory", "read_link", "space"}


def test_a_rename_says_where_from() -> None:
    faulty = FaultyDisk(fresh())
    write_one(faulty)
    faulty.rename(RUN / "f", RUN / "g")
    assert str(faulty.operations[-1]) == "operation 4, rename /run/f -> /run/g"


def test_no_operation_is_missed_when_threads_run_side_by_side() -> None:
    faulty = FaultyDisk(fresh())

    def many(number: int) -> None:
        for each in range(50):
            faulty.make_directory(RUN / f"{number}-{each}")

    threads = [threading.Thread(target=many, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [o.index for o in faulty.operations] == list(range(200))
    assert sorted(o.nth for o in faulty.operations) == list(range(200))
    assert len(tree(faulty.inner, RUN)) == 200


# ---- striking ----


def test_a_refused_operation_is_not_done_and_the_next_one_is() -> None:
    faulty = FaultyDisk(fresh(), at(0, Refuse(errno.EDQUOT)))
    with pytest.raises(OSError) as refusal:
        faulty.make_directory(RUN / "d")
    assert (refusal.value.errno, refusal.value.filename) == (errno.EDQUOT, "/run/d")
    assert faulty.struck is faulty.operations[0]
    faulty.make_directory(RUN / "d")
    assert tree(faulty.inner, RUN) == {"d": None}


def test_a_refused_close_gives_the_handle_back_all_the_same() -> None:
    faulty = FaultyDisk(fresh(), always("close", Refuse(errno.EIO)))
    handle = faulty.create(RUN / "f")
    with pytest.raises(OSError, match="Input/output error"):
        faulty.close(handle)
    with pytest.raises(OSError, match="Bad file descriptor"):
        faulty.inner.close(handle)


def test_a_short_write_can_be_followed_by_a_refusal() -> None:
    faulty = FaultyDisk(fresh(), at_nth("write", 0, Shorten(3, then=errno.ENOSPC)))
    handle = faulty.create(RUN / "f")
    assert faulty.write(handle, memoryview(b"abcdef")) == 3
    with pytest.raises(OSError) as refusal:
        faulty.write(handle, memoryview(b"def"))
    assert refusal.value.errno == errno.ENOSPC
    assert tree(faulty.inner, RUN) == {"f": b"abc"}


def test_faults_strike_only_what_they_fit() -> None:
    for fault in (Shorten(0), Kill("during"), Ignore()):
        faulty = FaultyDisk(fresh(), always("make_directory", fault))
        faulty.make_directory(RUN / "d")
        assert tree(faulty.inner, RUN) == {"d": None}
        assert faulty.struck is None


# ---- dying ----


@pytest.mark.parametrize(
    ("fault", "left"), [(Kill("before"), b""), (Kill("during"), b"ab"), (Kill("after"), b"abcd")], ids=str
)
def test_a_kill_comes_before_during_or_after_the_write(fault: Fault, left: bytes) -> None:
    faulty = FaultyDisk(fresh(), always("write", fault))
    with pytest.raises(Killed):
        write_one(faulty)
    assert tree(faulty.inner, RUN) == {"f": left}


def test_the_dead_do_nothing_more_whoever_asks() -> None:
    faulty = FaultyDisk(fresh(), at(0, Kill("after")))
    with pytest.raises(Killed) as first:
        faulty.make_directory(RUN / "d")
    for _ in range(2):
        with pytest.raises(Killed) as again, contextlib.suppress(OSError):
            faulty.status(RUN)
        assert again.value is first.value

    deaths: list[BaseException] = []

    def in_another_thread() -> None:
        try:
            faulty.unlink(RUN / "d")
        except Killed as death:
            deaths.append(death)

    thread = threading.Thread(target=in_another_thread)
    thread.start()
    thread.join()
    assert deaths == [first.value]
    assert len(faulty.operations) == 1


def test_death_is_neither_an_exception_nor_a_refusal_of_storage() -> None:
    assert not issubclass(Killed, Exception)
    assert not issubclass(Killed, OSError)


def test_cleanup_in_the_code_under_test_does_not_hide_where_it_died() -> None:
    for operation in range(4):
        faulty = FaultyDisk(fresh(), at(operation, Kill()))
        with pytest.raises(Killed) as death:
            write_one(faulty)
        assert death.value.operation.index == operation
        assert len(faulty.operations) == operation + 1


def test_a_real_kill_ends_the_process_at_once(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from unbroken.disk import LocalDisk\n"
        "from unbroken.files import Files\n"
        "from unbroken.testing import FaultyDisk, Kill, always\n"
        f"here = Path({str(tmp_path)!r})\n"
        "disk = FaultyDisk(LocalDisk(), always('rename', Kill('before', really=True)))\n"
        "Files(disk).replace(here / 'f', b'new', scratch='.f')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {".f": b"new"}


# ---- driving ----


def test_an_action_is_tried_undisturbed_and_then_with_each_fault_at_each_change() -> None:
    trials = list(crash_points(fresh, write_one))
    assert [str(trial) for trial in trials[:2]] == [
        "no fault",
        "Kill(moment='before', really=False) at operation 0, create /run/f",
    ]
    assert [trial.is_finished for trial in trials] == [True, False, False, False, False, False]
    assert [tree(trial.disk, RUN).get("f") for trial in trials] == [b"abcd", None, b"", b"ab", b"abcd", b"abcd"]


def test_what_the_dead_held_open_is_closed_for_them() -> None:
    for trial in crash_points(lambda: MemoryDisk([RUN], capacity_bytes=10), write_one):
        Files(trial.disk).remove_file(RUN / "f")
        assert trial.disk.space(RUN).free_bytes == 10, str(trial)


def test_refusals_leave_an_error_and_a_short_write_alone_does_not() -> None:
    ends = [(trial.fault, type(trial.raised).__name__) for trial in crash_points(fresh, write_one, ERRORS)]
    assert ends[0] == (None, "NoneType")
    assert {end for fault, end in ends if isinstance(fault, Refuse)} == {"StorageFailed"}
    assert (Shorten(1), "NoneType") in ends


def test_reads_are_struck_on_request() -> None:
    def look(disk: Disk) -> object:
        return Files(disk).find(RUN)

    assert len(list(crash_points(fresh, look, ERRORS))) == 1
    struck = [trial.operation and trial.operation.name for trial in crash_points(fresh, look, ERRORS, with_reads=True)]
    assert struck == [None, "status", "status", "status"]


def test_an_action_that_does_not_repeat_is_reported() -> None:
    runs = 0

    def changing(disk: Disk) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            disk.make_directory(RUN / "d")

    with pytest.raises(RuntimeError, match="not repeatable"):
        list(crash_points(fresh, changing, KILLS))


def test_a_bug_in_the_action_is_not_taken_for_a_crash() -> None:
    def buggy(disk: Disk) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(crash_points(fresh, buggy))
