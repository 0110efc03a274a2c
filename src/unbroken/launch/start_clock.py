"""How long a job takes to start: the seconds of each part, from the command to the end of the first step.

Parts follow one another, so that together they are the whole time. CPU time is counted beside wall time: a part that
takes much longer than it computes waits for a file system or for other ranks.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

LAUNCHED: Final = "UNBROKEN_LAUNCHED_AT"
_RESTARTS: Final = "TORCHELASTIC_RESTART_COUNT"
_START_TIME_FIELD: Final = 19
_DIGITS: Final = 3

LAUNCH: Final = "launch"
INTERPRETER: Final = "interpreter"
IMPORTS: Final = "imports"
PROCESS_GROUP: Final = "process_group"
DATA: Final = "data"
NUMERICS: Final = "numerics"
MODEL: Final = "model"
RESTORE: Final = "restore"
COMPILE: Final = "compile"
FIRST_STEP: Final = "first_step"
PARTS: Final[Mapping[str, str]] = {
    LAUNCH: "the launcher and torchrun, until they start the process of rank 0",
    INTERPRETER: "the process of rank 0 until its first line",
    IMPORTS: "torch, the trainer and the compiler",
    PROCESS_GROUP: "connecting the ranks",
    DATA: "the config of the run, the shards and their packing plans",
    NUMERICS: "deterministic kernels; the first time, the exact self-test",
    MODEL: "weights, optimizer, sums; compiled code of earlier jobs",
    RESTORE: "the lease, and the checkpoint if there is one",
    COMPILE: "compiling, or finding what was compiled before",
    FIRST_STEP: "the first step without compiling",
}


def uptime_s() -> float:
    """Seconds since this machine started, on the clock in which the kernel counts when a process began."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def process_began_s() -> float | None:
    """When this process began, on the same clock; None where the system does not tell."""
    try:
        stat = Path("/proc/self/stat").read_text(errors="replace")
        # The second field is the program's name in parentheses and may contain anything, so split after it.
        return int(stat.rpartition(")")[2].split()[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def launched_now(*, is_restart: bool) -> dict[str, str]:
    """The variable that tells a job when it was launched: with the command, or for a restart now."""
    began_s = None if is_restart else process_began_s()
    return {LAUNCHED: f"{uptime_s() if began_s is None else began_s:.3f}"}


class StartClock:
    """Measures the parts of one job's start, in one process.

    Args:
        clock: wall time in seconds, as ``uptime_s``.
        cpu: CPU time in seconds of this process and of the children it waited for.
    """

    def __init__(self, clock: Callable[[], float] = uptime_s, cpu: Callable[[], float] | None = None) -> None:
        self._clock, self._cpu = clock, cpu or _cpu_s
        self._last_s, self._last_cpu_s = self._clock(), self._cpu()
        self._seconds: dict[str, float] = {}
        self._cpu_seconds: dict[str, float] = {}

    @classmethod
    def of_process(cls, environ: Mapping[str, str]) -> "StartClock":
        """A clock that has counted since the command was given; to be made in the first line of a process."""
        found = cls()
        began_s = process_began_s()
        if began_s is None:
            return found
        found._seconds[INTERPRETER] = max(0.0, found._last_s - began_s)
        found._cpu_seconds[INTERPRETER] = found._last_cpu_s
        launched_s = _launched_s(environ)
        if launched_s is not None:
            found._seconds = {LAUNCH: max(0.0, began_s - launched_s), **found._seconds}
        return found

    def done(self, part: str) -> None:
        """A part has ended: it gets the time since the one before."""
        now_s, now_cpu_s = self._clock(), self._cpu()
        self._seconds[part] = self._seconds.get(part, 0.0) + now_s - self._last_s
        self._cpu_seconds[part] = self._cpu_seconds.get(part, 0.0) + now_cpu_s - self._last_cpu_s
        self._last_s, self._last_cpu_s = now_s, now_cpu_s

    def as_json(self) -> dict[str, object]:
        """The whole time, and that of each part in order."""
        order = {name: place for place, name in enumerate(PARTS)}
        names = sorted(self._seconds, key=lambda name: order.get(name, len(order)))
        return {
            "seconds": round(sum(self._seconds.values()), _DIGITS),
            "parts": {name: round(self._seconds[name], _DIGITS) for name in names},
            "cpu_parts": {name: round(self._cpu_seconds[name], _DIGITS) for name in names if name in self._cpu_seconds},
        }


def _launched_s(environ: Mapping[str, str]) -> float | None:
    # Where torchrun itself restarts its workers, the launch was that of an earlier job.
    if environ.get(_RESTARTS, "0") != "0":
        return None
    try:
        return float(environ[LAUNCHED])
    except (KeyError, ValueError):
        return None


def _cpu_s() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
