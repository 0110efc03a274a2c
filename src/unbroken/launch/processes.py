"""The processes below the launcher: started so that none outlives it unseen, found and signalled by their ids.

Reads ``/proc``. torchrun gives each worker a session of its own, so neither a process group nor a terminal's Ctrl-C
reaches all of them; being the reaper of orphans keeps every one of them below the launcher.
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

# From <sys/prctl.h>; Python has no name for them.
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LIBC: Final = ctypes.CDLL(None)

_KILL_ROUND_S: Final = 0.02
_KILL_ROUNDS: Final = 250


@dataclass(frozen=True)
class Process:
    """One living process, as the kernel tells of it."""

    pid: int
    parent: int
    session: int


def adopt_orphans() -> None:
    """Become the parent of whatever loses its own below this process, so that it can still be found."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: IO[str] | None,
    stderr: IO[str] | None = None,
    cwd: Path | None = None,
) -> "subprocess.Popen[str]":
    """Start a job in a process group of its own, so that a terminal's Ctrl-C reaches the launcher alone.

    Signals that the launcher holds back are let through in the child. If the launcher is killed, the child gets
    SIGTERM, as if it had been passed on: it saves and ends instead of training on with nobody to answer for it.
    """
    launcher = os.getpid()

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        # The launcher may have died before the line above took effect; then nobody would tell.
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
    """Every process of this machine that has not ended."""
    found: dict[int, Process] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 -- names alone, thousands of them
        if not name.isdecimal():
            continue
        try:
            stat = Path(f"/proc/{name}/stat").read_text(errors="replace")
        except OSError:
            continue
        # The second field is the program's name in parentheses and may hold anything, so count from behind it.
        state, parent, _, session, *_ = stat.rpartition(")")[2].split()
        if state not in ("Z", "X"):
            found[int(name)] = Process(int(name), int(parent), int(session))
    return found


def below(pid: int, among: Mapping[int, Process]) -> list[int]:
    """The ids of all that descend from a process, parents before children."""
    children: dict[int, list[int]] = {}
    for process in among.values():
        children.setdefault(process.parent, []).append(process.pid)
    found = list(children.get(pid, ()))
    for each in found:
        found += children.get(each, ())
    return found


def workers_of(torchrun: int, among: Mapping[int, Process]) -> list[int]:
    """The workers of torchrun: those of its children that lead a session; its service processes do not."""
    return [each.pid for each in among.values() if each.parent == torchrun and each.session == each.pid]


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal processes by id; one that has just ended is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_below(pid: int) -> None:
    """Kill everything that descends from a process, also what is being started meanwhile."""
    for _ in range(_KILL_ROUNDS):
        victims = below(pid, living())
        if not victims:
            return
        send(victims, signal.SIGKILL)
        # A process in an uninterruptible system call dies when it returns; after some seconds it is left to that.
        time.sleep(_KILL_ROUND_S)
