"""Loader workers and stop signals: a signal that stops a job must not kill the processes that load its data.

A signal to the whole process group, as schedulers and shells send it, reaches the workers of torch's loaders too. They
die of it, and torch raises that in the training loop. While a run is entered, workers that are started ignore the
signals that the run handles, by any start method. They still end when torch ends them, when their parent dies, and by
SIGKILL where torch would have used SIGTERM as its last resort. The death of a worker that was started before is not
raised while a stop is pending: the loop gets to the end of its step, where it stops.
"""

import functools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, process, resource_tracker
from types import FrameType
from typing import Any, Final

from unbroken.quoting.log import logger
from unbroken.records.stop import SIGNALS
from unbroken.torch_private import WORKER_LOOP, worker_signals

_log = logger(__name__)
# A signal to a group reaches one process after the other.
_SIGNAL_ARRIVES_WITHIN_S: Final = 1.0
_LOADERS: Final = ("torch", "torchdata")
_LOADING: Final = ("torch.utils.data.", "torchdata.")
_pending: list[Callable[[], bool]] = []
_undo: list[Callable[[], None]] = []


def shield_workers(is_stopping: Callable[[], bool]) -> Callable[[], None]:
    """Make workers ignore stop signals from now on; returns what ends it. ``is_stopping``: a signal was received."""
    if not _pending:
        _install()
    _pending.append(is_stopping)

    def end() -> None:
        _pending.remove(is_stopping)
        while not _pending and _undo:
            _undo.pop()()

    return end


def is_worker_death(error: BaseException) -> bool:
    """Whether an error says that a worker of a loader is gone: in torch's words, or by a broken connection to it."""
    if isinstance(error, RuntimeError):
        return "DataLoader worker" in str(error)
    frames = traceback.walk_tb(error.__traceback__) if isinstance(error, OSError | EOFError) else ()
    return any(str(frame.f_globals.get("__name__")).startswith(_LOADING) for frame, _ in frames)


def _install() -> None:
    watched: Any = worker_signals()
    if watched is None:
        # Then a signal to the process group ends the workers, as it does without a run.
        _log.warning("loader workers of this torch do not ignore stop signals")
        return
    start, check = process.BaseProcess.start, watched._error_if_any_worker_fails

    def undo() -> None:
        process.BaseProcess.start = start  # type: ignore[method-assign]
        watched._error_if_any_worker_fails = check

    def start_shielded(each: process.BaseProcess) -> None:
        _start(each, start)

    process.BaseProcess.start = start_shielded  # type: ignore[method-assign,assignment]
    # Called by torch's handler of SIGCHLD, at any line of the loop.
    watched._error_if_any_worker_fails = functools.partial(_check, check)
    _undo.append(undo)


def _start(worker: Any, start: Callable[[Any], None]) -> None:  # noqa: ANN401 -- what it is started with is private
    target = worker._target
    if getattr(target, "__name__", "") != WORKER_LOOP or target.__module__.split(".")[0] not in _LOADERS:
        start(worker)
        return
    worker._target, worker._args = serve, (target, *worker._args)
    method = worker._start_method or multiprocessing.get_start_method()
    if method != "fork":
        # Starting it lets signals through again, which must not happen below.
        resource_tracker.ensure_running()
    if method == "forkserver":
        # It must not hold signals back: the script's own processes come from it too.
        forkserver.ensure_running()
    # Held back from the first instant; ``serve`` lets them through once they do no harm.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        start(worker)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # torch, and Python at its exit, end a worker that hangs by SIGTERM and then wait for it.
    worker._popen.terminate = worker._popen.kill


def _check(check: Callable[[], None]) -> None:
    try:
        check()
    except RuntimeError as died:
        if not _is_stop_pending(str(died)):
            raise
        _log.warning("a loader worker was killed while the run is being stopped: %s", str(died).strip())


def _is_stop_pending(said: str) -> bool:
    is_killed_by_one = any(f"signal: {signal.strsignal(each)}" in said for each in SIGNALS)
    until_s = time.monotonic() + (_SIGNAL_ARRIVES_WITHIN_S if is_killed_by_one else 0.0)
    while not any(is_stopping() for is_stopping in _pending):
        if time.monotonic() >= until_s:
            return False
        time.sleep(0.01)
    return True


# ---- in the worker ----


def serve(target: Callable[..., None], *args: object) -> None:
    """Run a worker's loop, ignoring the signals that stop a run."""
    watched: Any = worker_signals()
    set_handlers, ignore = watched._set_worker_signal_handlers, functools.partial(_ignore, os.getppid())

    def set_handlers_and_ignore() -> None:
        # torch's own handlers come first, and one of them ends the worker. Handlers, and not SIG_IGN or a mask: a
        # program that the dataset starts does not inherit them.
        set_handlers()
        for each in SIGNALS:
            signal.signal(each, ignore)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    watched._set_worker_signal_handlers = set_handlers_and_ignore
    target(*args)


def _ignore(parent: int, number: int, frame: FrameType | None) -> None:
    trainer = multiprocessing.parent_process()
    # One that was forked by a server has another parent, which may have died of the very signal.
    is_needed = os.getppid() == parent
    if trainer is not None and trainer.pid != parent:
        is_needed = trainer.is_alive()
    if is_needed:
        return
    # The process that it loads data for is gone: now a signal is meant for the worker.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
