"""A process of its own for every trial, without importing torch anew: forked from a server that has it.

What a trial does to itself is real: SIGKILL ends the child alone, and a fresh child resumes what it left.
"""

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.patience import PATIENCE_S
from unbroken.testing.worlds import preload, warm_context

preload("tests.exact.training", "tests.exact.orders")
_AT_ONCE = 2
# To start one child, multiprocessing looks at all others; what it reads of their ends can be read only once.
_LOCK = threading.Lock()
_LIMIT_S = PATIENCE_S


@dataclass(frozen=True)
class Ended:
    """How a child ended: with what it returned, with what it raised, or by a signal."""

    exit_code: int
    value: Any = None
    error: str = ""

    @property
    def is_killed(self) -> bool:
        return self.exit_code == -signal.SIGKILL

    def required(self) -> Any:  # noqa: ANN401 - whatever the child returned
        """What it returned, where it must have returned."""
        assert self.exit_code == 0, f"exit code {self.exit_code}\n{self.error}"
        return self.value


def _child(answer: Connection, action: Callable[..., Any], arguments: Sequence[Any]) -> None:
    # A group of its own: loader workers that outlive a killed child are ended with it.
    os.setpgid(0, 0)
    try:
        answer.send((action(*arguments), ""))
    except BaseException:  # noqa: BLE001 - the top of a process: whatever it is, the test is to see it
        answer.send((None, traceback.format_exc()))
        raise SystemExit(70) from None


def forked(action: Callable[..., Any], *arguments: object) -> Ended:
    """Run an action in a child and wait for its end."""
    with _LOCK:
        context = warm_context()
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(theirs, action, arguments))
        child.start()
    theirs.close()
    value, error = None, ""
    try:
        # Workers that outlive a killed child hold its end of the pipe open: that alone does not tell that it is gone.
        wait([ours, child.sentinel], _LIMIT_S)
        if ours.poll():
            value, error = ours.recv()
    except EOFError:
        pass  # it died before it could answer
    has_ended = bool(wait([child.sentinel], _LIMIT_S))
    with _LOCK:
        if not has_ended:
            child.kill()
        child.join()
    assert child.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    assert has_ended, f"{action.__name__}{arguments} did not end"
    assert child.exitcode is not None
    return Ended(child.exitcode, value, error)


def forked_each(action: Callable[..., Any], cases: Sequence[tuple[object, ...]]) -> list[Ended]:
    """Run an action for each case, two at a time."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda case: forked(action, *case), cases))
