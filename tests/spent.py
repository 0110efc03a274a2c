"""What every test costs in CPU seconds, with all processes that it starts: measured here, summed up at the end.

CPU seconds and not wall time, because those depend much less on what else the machine does.
"""

import contextlib
import multiprocessing.forkserver
import os
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers import SERVERS, Excess, Tiers, directory, over_budget

_PROPERTY, _SERVER_PROPERTY = "cpu_s", "server_cpu_s"
_SLOWEST = 30
# Names a file that gets a line for every test: its CPU seconds and its name.
_KEPT_IN = "UNBROKEN_CPU_FILE"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """CPU seconds of this process, of its children that were waited for, and of all that descend from it and live.

    A fork server is not waited for until the end, and the worlds of many tests are its children.
    """
    ours = sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    return ours + sum(_of_process(pid) for pid in _descendants(os.getpid()))


def server_s() -> float:
    """CPU seconds of the fork server itself, without those of its children."""
    pid = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)
    return 0.0 if pid is None else _of_process(pid, is_alone=True)


def _descendants(pid: int) -> Iterator[int]:
    # A process may end while it is looked at; what it took is then its parent's.
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in map(int, (thread / "children").read_text().split()):
                    yield child
                    yield from _descendants(child)


def _of_process(pid: int, *, is_alone: bool = False) -> float:
    with contextlib.suppress(OSError):
        # The name in brackets may hold anything; user, system, children's user and system time are fields 14 to 17.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11 : 13 if is_alone else 15])) * _TICK_S
    return 0.0


class Meter:
    """Measures in the process that runs the tests: every phase of a test takes what was used since the one before."""

    def __init__(self) -> None:
        self._before_s, self._server_before_s = cpu_s(), server_s()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._before_s, self._server_before_s = cpu_s(), server_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[assignment]
        now_s, server_now_s = cpu_s(), server_s()
        of_server_s = server_now_s - self._server_before_s
        report.user_properties.append((_SERVER_PROPERTY, of_server_s))
        report.user_properties.append((_PROPERTY, now_s - self._before_s - of_server_s))
        self._before_s, self._server_before_s = now_s, server_now_s
        return report  # type: ignore[return-value]


class Account:
    """Adds up in the process that reports; a directory far over its budget fails the run."""

    def __init__(self, tiers: Tiers, tier: str) -> None:
        self._tiers, self._tier = tiers, tier
        self._of_test_s: dict[str, float] = defaultdict(float)
        self._wall_s: dict[str, float] = defaultdict(float)
        self._of_servers_s = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._wall_s[report.nodeid] += report.duration
        for name, value in report.user_properties:
            if name == _PROPERTY and isinstance(value, float):
                self._of_test_s[report.nodeid] += value
            elif name == _SERVER_PROPERTY and isinstance(value, float):
                self._of_servers_s += value
        if _KEPT_IN in os.environ and report.when == "teardown":
            with Path(os.environ[_KEPT_IN]).open("a", encoding="utf-8") as kept:
                kept.write(f"{self._of_test_s[report.nodeid]:.3f}\t{report.nodeid}\n")

    def _of_directory_s(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for node, seconds in self._of_test_s.items():
            found[directory(node.partition("::")[0].removeprefix("tests/"))] += seconds
        return {**dict(sorted(found.items())), **({SERVERS: self._of_servers_s} if self._of_servers_s else {})}

    def _excess(self) -> list[Excess]:
        return over_budget(self._tiers, self._tier, self._of_directory_s().items())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and any(each.fails for each in self._excess()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write, by_directory = terminalreporter.write_line, self._of_directory_s()
        terminalreporter.section(f"CPU seconds, {self._tier} tier: {sum(by_directory.values()):.0f}")
        for name, seconds in by_directory.items():
            write(f"{seconds:8.1f}  {name if name == SERVERS else f'tests/{name}'}")
        for unit, of_test_s in (("CPU seconds", self._of_test_s), ("seconds on the wall clock", self._wall_s)):
            slowest = sorted(of_test_s.items(), key=lambda each: -each[1])[:_SLOWEST]
            terminalreporter.section(f"the {len(slowest)} slowest, in {unit}")
            for node, seconds in slowest:
                write(f"{seconds:8.1f}  {node}")
        for each in self._excess():
            write(f"{'FAR OVER' if each.fails else 'over'} budget: {each.said}", red=each.fails, yellow=not each.fails)
