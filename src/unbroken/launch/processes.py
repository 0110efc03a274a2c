"""The processes below the launcher: started, found in ``/proc`` and signalled by id, so that none is left behind.

torchrun gives each worker its own session, so neither a process group nor Ctrl-C reaches all of them. The launcher is
a subreaper: orphans become its children and stay visible.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

# From <sys/prctl.h>; Python has no constants for them.
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LIBC: Final = ctypes.CDLL(None)

_KILL_ROUND_S: Final = 0.02
_KILL_ROUNDS: Final = 250


@dataclass(frozen=True)
class Process:
    """One running process, from ``/proc``."""

    pid: int
    parent: int
    session: int


def adopt_orphans() -> None:
    """Make this process the subreaper of its descendants, so that orphans can still be found."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: IO[str] | None,
    stderr: IO[str] | None = None,
    cwd: Path | None = None,
) -> "subprocess.Popen[str]":
    """Start a job in its own process group, so that Ctrl-C in a terminal reaches only the launcher.

    Signals that the launcher blocks are unblocked in the child. If the launcher is killed, the child gets SIGTERM: it
    saves and exits instead of training on without a parent.
    """
    launcher = os.getpid()

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        # The launcher may have died before the line above took effect.
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)

    return subprocess.Popen(
        command,
        env=environment,
        stdout=stdout,
        stderr=stderr,
        cwd=cwd,
        process_group=0,
        preexec_fn=begin,
        text=True,
    )


def living() -> dict[int, Process]:
    """All running processes of this machine."""
    found: dict[int, Process] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 -- names alone, thousands of them
        if not name.isdecimal():
            continue
        try:
            stat = Path(f"/proc/{name}/stat").read_text(errors="replace")
        except OSError:
            continue
        # The second field is the program name in parentheses and may contain anything, so split after it.
        state, parent, _, session, *_ = stat.rpartition(")")[2].split()
        if state not in ("Z", "X"):
            found[int(name)] = Process(int(name), int(parent), int(session))
    return found


def below(pid: int, among: Mapping[int, Process]) -> list[int]:
    """The ids of all descendants of a process, parents before children."""
    children: dict[int, list[int]] = {}
    for process in among.values():
        children.setdefault(process.parent, []).append(process.pid)
    found = list(children.get(pid, ()))
    for each in found:
        found += children.get(each, ())
    return found


def child_ranks(torchrun: int, among: Mapping[int, Process]) -> list[int]:
    """The workers of torchrun: its children that lead a session; its helper processes do not."""
    return [each.pid for each in among.values() if each.parent == torchrun and each.session == each.pid]


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes by id; one that has just exited is not an error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_below(pid: int) -> None:
    """Kill all descendants of a process, including those started meanwhile."""
    for _ in range(_KILL_ROUNDS):
        victims = below(pid, living())
        if not victims:
            return
        send(victims, signal.SIGKILL)
        # A process in an uninterruptible system call dies when the call returns; it is not waited for longer than that.
        time.sleep(_KILL_ROUND_S)
