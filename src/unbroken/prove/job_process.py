"""One job as a child process that is watched from outside and ended in a chosen way.

Owns the processes below the command it started; none of them is left when the job is over: launcher, torchrun and every
rank are killed together. What the job did is read from the run's records, never from its output, which goes to a log.
"""

import json
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from unbroken.errors import StorageFailed
from unbroken.files import LOCAL
from unbroken.launch import processes
from unbroken.records.journal import Event, read_history
from unbroken.records.jsonl import job_file
from unbroken.records.layout import Layout
from unbroken.records.lease import Standing, read_current
from unbroken.records.outcome import EXIT_KILLED, Outcome, read_outcome
from unbroken.records.process import host_name, process_of, recorded_processes
from unbroken.records.stop import request_stop
from unbroken.store.names import scratch

if TYPE_CHECKING:
    import subprocess

POLL_S: Final = 0.02
_FREEZE_ROUNDS: Final = 50
_LINGER_S: Final = 60.0
# A line of metrics has a few hundred bytes; the last bytes of the file contain a whole one.
_TAIL_BYTES: Final = 1 << 16
# Torchrun's failure report: from its first line to the second of two bars.
_TORCHRUN: Final = b"torch/distributed/elastic/multiprocessing/api.py:"
_FAILED: Final = b"failed (exitcode:"
_BAR: Final = b"=" * 20
_BARS: Final = 2


@dataclass(frozen=True)
class JobEnd:
    """How a job ended: its exit code as a shell reports it, and its outcome in the run's records.

    ``outcome`` is None if the command never took the run's lease.
    """

    code: int
    outcome: Outcome | None


class JobProcess:
    """A running command; as a context manager it leaves no process behind."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path, run: Path, before: int) -> None:
        self.pid = process.pid
        self.log = log
        self._process, self._layout, self._before = process, Layout(run), before

    @classmethod
    def started(
        cls, command: Sequence[str], *, env: Mapping[str, str], log: Path, run: Path, cwd: Path | None = None
    ) -> Self:
        """Start a command in a process group of its own; its output is appended to a log.

        Args:
            command: the program and its arguments.
            env: its whole environment.
            log: the file of its output; parent folders are created.
            run: the run directory of the job, as seen from here; it need not exist.
            cwd: its working directory; by default the current one.

        Raises:
            StorageFailed: the log or the run could not be opened.
            OSError: there is no such program.
        """
        # Orphans below this process can still be found.
        processes.adopt_orphans()
        LOCAL.make_directory(log.parent)
        lease = read_current(run)
        try:
            output = log.open("a")
        except OSError as refusal:
            cause = refusal.strerror or str(refusal)
            raise StorageFailed(operation="open", path=log, cause=cause) from refusal
        with output:
            process = processes.start(command, env, stdout=output, stderr=output, cwd=cwd)
        return cls(process, log, run, lease.number if lease else 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_running:
            self.kill()
            self._process.wait()

    @property
    def is_running(self) -> bool:
        """Whether the command is still running."""
        return self._process.poll() is None

    def number(self) -> int | None:
        """The number of this job in its run; None before it takes the lease."""
        lease = read_current(self._layout.run)
        return lease.number if lease is not None and lease.number > self._before else None

    def step(self) -> int | None:
        """The last step whose metrics the job has written; None before the first."""
        number = self.number()
        if number is None:
            return None
        tail = _tail(job_file(self._layout.metrics, number))
        return next((step for line in reversed(tail) if (step := _step_of(line)) is not None), None)

    def has_lost_holder(self) -> bool:
        """Whether the rank that holds the lease died without recording an outcome."""
        lease = read_current(self._layout.run)
        is_ours = lease is not None and lease.number > self._before and not lease.is_released
        return is_ours and lease is not None and lease.standing(process_of) is Standing.GONE

    def last_event(self, kind: str) -> Event | None:
        """The last journal event of a kind that this job has written.

        Raises:
            StorageFailed: an I/O error.
        """
        number = self.number()
        return None if number is None else read_history(self._layout).last(kind, job=number)

    def steps(self, timeout_s: float) -> Iterator[int]:
        """The last written step, polled until the job ends or the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while self.is_running and time.monotonic() < deadline_s:
            yield self.step() or 0
            time.sleep(POLL_S)
        # It may have written more after the last poll.
        yield self.step() or 0

    def wait_for_step(self, step: int, timeout_s: float) -> bool:
        """Wait until the job is past a step; False if it ended before, or at the timeout."""
        return any(at >= step for at in self.steps(timeout_s))

    def stop(self, timeout_s: float) -> bool:
        """Request a stop, as ``unbroken stop`` does; False if the job did not take its lease in time.

        Raises:
            StorageFailed: an I/O error.
        """
        deadline_s = time.monotonic() + timeout_s
        # The event, not only the lease: a request that exists while a job starts may be treated as an old one.
        while self.last_event("job-start") is None:
            if not self.is_running or time.monotonic() >= deadline_s:
                return False
            time.sleep(POLL_S)
        beside = scratch(f"stop_{os.getpid()}_{secrets.token_hex(4)}", "request")
        request_stop(self._layout, job=self.number() or 0, by=host_name(), scratch=beside)
        return True

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the command only, as a scheduler does."""
        if self.is_running:
            processes.send([self.pid], number)

    def kill(self) -> None:
        """SIGKILL to every process of the job: the command, its descendants, and those named in the journal."""
        victims = self._frozen()
        recorded = [pid for pid in self._recorded() if pid not in victims]
        # Children first: no parent may react to the loss of a child, and no child to that of its parent.
        processes.send([*recorded, *reversed(victims)], signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> JobEnd:
        """Wait for the end, and make sure no process of the job is left.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
            StorageFailed: the run's records could not be read.
        """
        code = self._process.wait(timeout_s)
        self._outlive_ranks()
        outcome = read_outcome(self._layout, now_s=time.time(), process_of=process_of)
        is_ours = outcome is not None and outcome.job is not None and outcome.job > self._before
        return JobEnd(EXIT_KILLED - code if code < 0 else code, outcome if is_ours else None)

    def said(self, lines: int) -> tuple[str, ...]:
        """The last lines of its log, without torchrun's failure report."""
        return tuple(line.decode(errors="replace") for line in own_words(_tail(self.log)))[-lines:]

    def _outlive_ranks(self) -> None:
        """Wait for ranks without a launcher: they save and exit, or are killed."""
        deadline_s = time.monotonic() + _LINGER_S
        while left := self._recorded():
            if time.monotonic() >= deadline_s:
                processes.send(left, signal.SIGKILL)
            time.sleep(POLL_S)

    def _frozen(self) -> list[int]:
        """Every process of the command, stopped from the top down, so that none starts another meanwhile."""
        frozen: list[int] = []
        for _ in range(_FREEZE_ROUNDS):
            tree = [self.pid, *processes.below(self.pid, processes.living())] if self.is_running else []
            new = [pid for pid in tree if pid not in frozen]
            if not new:
                break
            processes.send(new, signal.SIGSTOP)
            frozen += new
        return frozen

    def _recorded(self) -> list[int]:
        """The processes in the job's journal that are still alive on this machine."""
        number = self.number()
        named = () if number is None else recorded_processes(self._layout, number)
        # Pids are reused; only the process with the recorded start time may be killed.
        living = [each for each in named if process_of(each) == each.process_started]
        return [each.pid for each in living if each.pid > 1 and each.pid != os.getpid()]


def own_words(lines: Sequence[bytes]) -> list[bytes]:
    """The lines without torchrun's failure report, which is long, comes last and hides the rank's output."""
    kept: list[bytes] = []
    bars = _BARS
    for line in lines:
        if _TORCHRUN in line:
            bars = 0 if _FAILED in line else bars
        elif bars < _BARS:
            bars += line.startswith(_BAR)
        else:
            kept.append(line)
    return kept or list(lines)


def _tail(path: Path) -> list[bytes]:
    """The last whole lines of a file; none where there is no file yet."""
    try:
        with path.open("rb") as source:
            size_bytes = source.seek(0, os.SEEK_END)
            source.seek(max(0, size_bytes - _TAIL_BYTES))
            lines = source.read().splitlines()
    except OSError:
        return []
    return lines[1:] if size_bytes > _TAIL_BYTES else lines


def _step_of(line: bytes) -> int | None:
    try:
        found: Any = json.loads(line)
    except ValueError:
        return None
    step = found.get("step") if isinstance(found, dict) else None
    return step if type(step) is int else None
