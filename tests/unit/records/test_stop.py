"""Who may ask a job to end: signals, the flag file, the deadline, the loop; and that nothing is ended here."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from unbroken.files import Files
from unbroken.records.layout import Layout
from unbroken.records.stop import (
    SECOND_AFTER_S,
    SIGNALS,
    StopReason,
    StopRequest,
    StopSources,
    clear_requests,
    end_requests,
    is_due,
    read_request,
    request_stop,
)
from unbroken.testing import FaultyDisk, MemoryDisk, Refuse, always


class Clock:
    """A clock that stands until it is told."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def _sources(run: Path, clock: Clock, deadline_s: float | None = None, reserve_s: float = 0.0) -> StopSources:
    return StopSources(Layout(run), job=3, clock=clock, deadline_s=deadline_s, reserve=lambda: reserve_s)


def test_without_a_stop_request_the_job_continues(tmp_path: Path) -> None:
    with _sources(tmp_path, Clock()) as sources:
        assert sources.look() is None


@pytest.mark.promise("G8")
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_noted_and_ends_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with _sources(tmp_path, Clock()) as sources:
        os.kill(os.getpid(), number)
        assert sources.look() == StopReason("signal", number.name)
        assert sources.look() == StopReason("signal", number.name)


def test_a_rank_that_does_not_read_the_flag_file_does_not_see_it(tmp_path: Path) -> None:
    request_stop(Layout(tmp_path), job=3, by="you", scratch="x")
    assert StopSources(Layout(tmp_path), job=3, clock=Clock(), reads_flag=False).look() is None
    assert StopSources(Layout(tmp_path), job=3, clock=Clock()).look() == StopReason("flag", "by you")


def test_the_first_signal_is_the_reason(tmp_path: Path) -> None:
    with _sources(tmp_path, Clock()) as sources:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert sources.look() == StopReason("signal", "SIGUSR1")


@pytest.mark.promise("G8")
def test_a_second_ctrl_c_leaves_at_once_and_the_echo_of_the_first_does_not(tmp_path: Path) -> None:
    clock = Clock()
    with _sources(tmp_path, clock) as sources:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert sources.look() == StopReason("signal", "SIGINT")
        clock.now_s += SECOND_AFTER_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_second_signal_of_another_kind_changes_nothing(tmp_path: Path) -> None:
    clock = Clock()
    with _sources(tmp_path, clock) as sources:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(os.getpid(), number)
            clock.now_s += 10
        assert sources.look() == StopReason("signal", "SIGTERM")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_that_stood_before_are_put_back_and_not_called_meanwhile(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with _sources(tmp_path, Clock()):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_a_signal_stops_every_job_of_the_process_whichever_ends_first(tmp_path: Path, first_to_end: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    jobs = [_sources(tmp_path / name, Clock()) for name in "ab"]
    for each in jobs:
        each.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert [each.look() for each in jobs] == [StopReason("signal", "SIGUSR1")] * 2
    jobs.pop(first_to_end).restore()
    again = _sources(tmp_path / "c", Clock())
    again.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert again.look() == StopReason("signal", "SIGTERM"), "the other one has ended, and this one listens"
    jobs[0].restore()
    again.restore()
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_signals_are_left_alone_and_that_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[bool] = []
    sources = _sources(tmp_path, Clock())

    def hold() -> None:
        found.append(sources.install())
        sources.restore()

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert found == [False] and [each.name for each in caplog.records] == ["unbroken.records.stop"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


HANGING = """
import sys, time
from pathlib import Path
from unbroken.records.layout import Layout
from unbroken.records.stop import StopSources
with StopSources(Layout(Path(sys.argv[1])), job=1, clock=time.time) as sources:
    print("ready", flush=True)
    while sources.signalled is None:
        time.sleep(0.05)
    print("noted", flush=True)
    while True:
        time.sleep(0.05)
"""


@pytest.mark.promise("G8")
def test_a_process_that_gets_ctrl_c_twice_ends_as_one_that_was_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGINT)
        # The time between the two counts from when the first was handled, which may be long after it was sent.
        assert job.stdout.readline() == "noted\n"
        time.sleep(SECOND_AFTER_S + 0.2)
        assert job.poll() is None
        job.send_signal(signal.SIGINT)
        # What a shell reports as 130.
        assert job.wait() == -signal.SIGINT


def test_the_loop_may_ask_itself(tmp_path: Path) -> None:
    sources = _sources(tmp_path, Clock())
    sources.ask("early stopping")
    sources.ask("again")
    assert sources.look() == StopReason("asked", "early stopping")
    assert StopReason("asked", "early stopping").sentence() == "stopped by the training loop (early stopping)"


@pytest.mark.promise("G9")
def test_a_request_is_seen_within_a_second_and_the_file_is_looked_at_no_more_often(tmp_path: Path) -> None:
    clock, layout = Clock(), Layout(tmp_path)
    sources = _sources(tmp_path, clock)
    assert sources.look() is None
    request_stop(layout, job=3, by="login-1", scratch=".scratch-a")
    clock.now_s += 0.9
    assert sources.look() is None
    clock.now_s += 0.1
    assert sources.look() == StopReason("flag", "by login-1")


def test_a_clock_that_is_set_back_does_not_close_our_eyes(tmp_path: Path) -> None:
    clock = Clock()
    sources = _sources(tmp_path, clock)
    assert sources.look() is None
    (tmp_path / ".shutdown_requested").write_text("")
    clock.now_s -= 3600
    assert sources.look() == StopReason("flag", ".shutdown_requested")


@pytest.mark.parametrize("content", [b"", b"stop", b"[]", b"\xff", b'{"schema": "other", "job": 1}', b'{"job": 1}'])
def test_a_flag_file_made_by_hand_is_for_any_job(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".shutdown_requested").write_bytes(content)
    assert read_request(Layout(tmp_path)) == StopRequest()
    assert _sources(tmp_path, Clock()).look() == StopReason("flag", ".shutdown_requested")


def test_a_request_for_an_earlier_job_stops_no_later_one(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    request_stop(layout, job=2, by="x", scratch=".scratch-a")
    assert _sources(tmp_path, Clock()).look() is None
    clear_requests(layout, job=3)
    assert read_request(layout) is None
    request_stop(layout, job=3, by="x", scratch=".scratch-a")
    clear_requests(layout, job=3)
    assert read_request(layout) == StopRequest(3, "x")
    end_requests(layout)
    assert read_request(layout) is None
    (tmp_path / ".shutdown_requested").write_text("by hand, for the job before")
    clear_requests(layout, job=3)
    assert read_request(layout) is None


def test_a_storage_that_does_not_answer_ends_no_job(caplog: pytest.LogCaptureFixture) -> None:
    disk = FaultyDisk(MemoryDisk(["/run"]), always("status", Refuse(errno.EIO)))
    sources = StopSources(Layout(Path("/run")), job=1, clock=Clock(), files=Files(disk))
    assert sources.look() is None and [each.name for each in caplog.records] == ["unbroken.records.stop"]


@pytest.mark.parametrize("operation", ["status", "open", "read_at"])
def test_a_flag_file_that_cannot_be_read_is_no_request_and_is_reported_once(
    caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    layout, clock, memory = Layout(Path("/run")), Clock(), MemoryDisk(["/run"])
    request_stop(layout, job=1, by="login-1", scratch=".scratch-a", files=Files(memory))
    broken = Files(FaultyDisk(memory, always(operation, Refuse(errno.EIO))))
    sources = StopSources(layout, job=1, clock=clock, files=broken)
    for _ in range(3):
        assert sources.look() is None
        clock.now_s += 1
    assert caplog.text.count("could not read the stop flag file") == 1
    # It may be for the job that begins: it is not taken away unread, and followed when it can be read.
    clear_requests(layout, job=1, files=broken)
    healed = StopSources(layout, job=1, clock=clock, files=Files(memory))
    assert healed.look() == StopReason("flag", "by login-1")


def test_a_flag_that_is_larger_than_any_request_was_made_by_hand(tmp_path: Path) -> None:
    (tmp_path / ".shutdown_requested").write_bytes(bytes(1 << 17))
    assert read_request(Layout(tmp_path)) == StopRequest()


@pytest.mark.parametrize(
    ("now_s", "deadline_s", "reserve_s", "due"),
    [
        (0.0, None, 1e9, False),
        (0.0, 100.0, 10.0, False),
        (89.9, 100.0, 10.0, False),
        (90.0, 100.0, 10.0, True),
        (99.0, 100.0, 0.0, False),
        (101.0, 100.0, 0.0, True),
        (0.0, 100.0, 500.0, True),
    ],
)
def test_a_deadline_is_due_when_only_the_reserve_is_left(
    now_s: float, deadline_s: float | None, reserve_s: float, due: bool
) -> None:
    assert is_due(now_s, deadline_s, reserve_s) is due


@pytest.mark.promise("G7")
def test_the_deadline_stops_the_job_with_the_reserve_to_spare(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    sources = _sources(tmp_path, clock, deadline_s=1100.0, reserve_s=30.0)
    assert sources.look() is None
    clock.now_s = 1070.0
    assert sources.look() == StopReason("walltime", "30 s left, 30 s kept for a last save")


def test_a_deadline_says_when_the_kill_comes_until_it_is_over(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    sources = _sources(tmp_path, clock, deadline_s=1100.0)
    assert sources.left_s(30.0) == 100.0
    clock.now_s = 1101.0
    # Nobody was killed, so that there is time nobody knows the end of.
    assert sources.left_s(30.0) is None
