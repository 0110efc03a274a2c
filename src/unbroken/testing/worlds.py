"""Worlds of real processes for tests: ranks over gloo on this machine, that can be killed and never outlive a test.

    ended = spawn(4, train, "/runs/a")          # train() runs on every rank, with the process group made
    assert [each.value for each in ended] == [1, 1, 1, 1], logs(ended)

A function is named by its module and must be importable by another process. Torch is imported once, in a server that
forks the ranks before any thread exists, so that a world of four starts in the time of one import, and the next ones at
once. A rank that does not end in time gets a signal that writes every thread's traceback into its log, and is killed.
"""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final

# A busy machine may need more.
DEFAULT_TIMEOUT_S: Final = float(os.environ.get("UNBROKEN_TEST_TIMEOUT_S", "120"))
# An optimizer's first step imports torch._dynamo: half a second in every rank that was forked without it.
_PRELOADED: Final = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "unbroken.loop.run",
]
_FROZEN: Final = "unbroken.testing.frozen"
# One thread a rank: the ranks of a test share a few cores, and a server with threads could not be forked. Gloo asks the
# name service for this machine unless it is told the interface.
_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
# A rank that has written its traceback ends at once: only one that cannot is waited for so long.
_TRACE_WAIT_S: Final = 30.0


@dataclass(frozen=True)
class Ended:
    """How one rank ended: what its function returned, or what it raised, or the signal that ended it.

    Attributes:
        rank: its number.
        exit_code: of its process; negative: the signal that ended it.
        value: what its function returned.
        error: what its function raised.
        log: what it printed.
        is_late: whether it was killed after the timeout.
    """

    rank: int
    exit_code: int
    value: Any = None
    error: BaseException | None = None
    log: str = ""
    is_late: bool = False

    @property
    def is_good(self) -> bool:
        """Whether the function returned."""
        return self.exit_code == 0 and self.error is None and not self.is_late


class Ranks:
    """The processes of one world, running; leaving the ``with`` block kills those that still do."""

    def __init__(self, processes: Sequence[BaseProcess], directory: Path) -> None:
        self._processes = list(processes)
        self._directory = directory
        self._late: set[int] = set()
        self._ended_groups: set[int] = set()

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [process.pid or 0 for process in self._processes]

    def send(self, signal_number: int, *ranks: int) -> None:
        """Send a signal to some ranks, or to all; ranks that have ended are skipped."""
        for rank in ranks or range(len(self._processes)):
            process = self._processes[rank]
            if process.is_alive() and process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal_number)

    def is_over(self) -> bool:
        """Whether every rank has ended."""
        return not any(process.is_alive() for process in self._processes)

    def is_any_killed(self) -> bool:
        """Whether a signal ended some rank."""
        return any((process.exitcode or 0) < 0 for process in self._processes)

    def wait(self, timeout_seconds: float = DEFAULT_TIMEOUT_S) -> list[Ended]:
        """Wait until every rank has ended; after the timeout, the others write their tracebacks and are killed."""
        ends_at = time.monotonic() + timeout_seconds
        for process in self._processes:
            process.join(max(0.0, ends_at - time.monotonic()))
        self._late = {rank for rank, process in enumerate(self._processes) if process.is_alive()}
        self.end()
        return [self._ended(rank) for rank in range(len(self._processes))]

    def end(self) -> None:
        """Kill ranks that still run, and processes that ranks left behind."""
        if not self.is_over():
            self.send(signal.SIGABRT)
            ends_at = time.monotonic() + _TRACE_WAIT_S
            for process in self._processes:
                process.join(max(0.0, ends_at - time.monotonic()))
            self.send(signal.SIGKILL)
        for rank, process in enumerate(self._processes):
            process.join()
            if process.pid is None or rank in self._ended_groups:
                continue
            self._ended_groups.add(rank)
            # A rank that was killed leaves its loader's workers, which do not see it: their parent is a fork server.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _ended(self, rank: int) -> Ended:
        log_path, result_path = _log_path(self._directory, rank), _result_path(self._directory, rank)
        log = log_path.read_text(errors="replace") if log_path.exists() else ""
        value, error = pickle.loads(result_path.read_bytes()) if result_path.exists() else (None, None)  # noqa: S301
        code = self._processes[rank].exitcode
        return Ended(rank, -1 if code is None else code, value, error, log, rank in self._late)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        for process in self._processes:
            process.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def spawn(
    size: int,
    function: Callable[..., object],
    *args: object,
    timeout_seconds: float = DEFAULT_TIMEOUT_S,
    env: Mapping[str, str] | None = None,
    is_plain: bool = False,
) -> list[Ended]:
    """Run a function on every rank of a world; returns how each ended, by rank.

    Args:
        size: how many ranks.
        function: what each runs, after the process group was made; importable, as are the arguments' types.
        args: what it is given, the same on every rank.
        timeout_seconds: when a rank that has not ended is killed; by default after 120 seconds, or those in
            ``UNBROKEN_TEST_TIMEOUT_S``.
        env: variables that the ranks see beside those of this process.
        is_plain: make no process group and set no variables of one, as for a script that is started by itself.
    """
    with start(size, function, *args, env=env, is_plain=is_plain) as ranks:
        return ranks.wait(timeout_seconds)


def start(
    size: int,
    function: Callable[..., object],
    *args: object,
    env: Mapping[str, str] | None = None,
    is_plain: bool = False,
) -> Ranks:
    """Start a world and return while it runs, to send it signals and to wait for it; use it as a context manager."""
    context = warm_context()
    directory = Path(tempfile.mkdtemp(prefix="unbroken-world-"))
    processes: list[BaseProcess] = []
    ranks = Ranks(processes, directory)
    try:
        for rank in range(size):
            seen = {**os.environ, **_ENVIRONMENT, **(env or {})}
            result = (rank, None if is_plain else size, str(directory), seen, function, args)
            process = context.Process(target=_run_rank, args=result, name=f"rank-{rank}", daemon=True)
            process.start()
            ranks._processes.append(process)
    except BaseException:
        ranks.end()
        raise
    return ranks


def preload(*modules: str) -> None:
    """Have the server import these too; no effect on one that runs already. None of them may start a thread."""
    _PRELOADED.extend(module for module in modules if module not in _PRELOADED)


def warm_context() -> ForkServerContext:
    """The context of multiprocessing whose processes have torch already; starts the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, _FROZEN])
    with _environment(_ENVIRONMENT):
        # The server takes its environment from here, and torch looks at it once.
        multiprocessing.forkserver.ensure_running()
    return context


def logs(ended: Sequence[Ended], *, last: int = 3000) -> str:
    """What every rank wrote, for an assertion's message."""
    said = [f"--- rank {each.rank}, exit {each.exit_code}, {each.error!r}\n{each.log[-last:]}" for each in ended]
    return "\n".join(said)


def _log_path(directory: Path, rank: int) -> Path:
    return directory / f"{rank}.log"


def _result_path(directory: Path, rank: int) -> Path:
    return directory / f"{rank}.result"


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run_rank(
    rank: int,
    size: int | None,
    directory: str,
    environment: Mapping[str, str],
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    # A group of its own, by which all that a rank has started is found when it is gone.
    os.setsid()
    log = os.open(_log_path(Path(directory), rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(all_threads=True)
    os.environ.clear()
    os.environ.update(environment)
    # Ours end with the test that started them; a loader's workers, which end with their rank, it may have.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        value = function(*args) if size is None else _in_group(rank, size, directory, function, args)
        result: tuple[object, BaseException | None] = (value, None)
    except BaseException as error:  # noqa: BLE001 - a process's top: whatever it is, the test is to hear it
        traceback.print_exc()
        result = (None, error)
    _write_result(_result_path(Path(directory), rank), result)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by returning: threads of a group whose other ranks are gone may never end.
    os._exit(0 if result[1] is None else 1)


def _in_group(
    rank: int, size: int, directory: str, function: Callable[..., object], args: tuple[object, ...]
) -> object:
    import torch
    import torch.distributed as dist

    from unbroken.connection import init_gloo
    from unbroken.torch_private import FileStore

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    # A child of the server has the server's generator, so that all ranks would draw alike by accident.
    torch.manual_seed(rank)
    store = FileStore(f"{directory}/meeting", size)
    init_gloo(store, rank, size, DEFAULT_TIMEOUT_S)
    value = function(*args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def _write_result(path: Path, result: tuple[object, BaseException | None]) -> None:
    try:
        data = pickle.dumps(result)
        pickle.loads(data)  # noqa: S301
    except Exception as refused:  # noqa: BLE001 - pickling an exception of the user may fail in any way
        value, error = result
        data = pickle.dumps((None, RuntimeError(f"{error if error is not None else value!r} ({refused})")))
    scratch = path.with_suffix(".scratch")
    scratch.write_bytes(data)
    scratch.replace(path)
