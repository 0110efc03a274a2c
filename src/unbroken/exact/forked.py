"""Ranks forked from a process that has imported torch once and has neither threads nor a CUDA context.

Only for such a process, which ``python -m unbroken.exact.self_test`` is: forking any other one would copy locked locks.
A forked rank answers with one JSON document over a pipe. One that hangs is killed.
"""

import contextlib
import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import torch.distributed as dist

from unbroken.connection import init_gloo
from unbroken.errors import UnbrokenError

# The store's name is public; torch's types do not export it.
_dist: Any = dist
_PIECE_BYTES: Final = 1 << 16


class Forked:
    """One forked process; ``answer`` is what its action returned, ``error`` why there is no answer.

    Args:
        action: what it runs; returns what JSON can hold.
        limit_s: after so many seconds a signal ends it, whoever waits for it or not.
    """

    def __init__(self, action: Callable[[], Any], *, limit_s: float) -> None:
        self.answer: Any = None
        self.error: str | None = None
        self._text, self._is_over = b"", False
        self.pipe, theirs = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self.pipe)
            _act(theirs, action, limit_s)
        os.close(theirs)

    def read(self) -> bool:
        """Read what has arrived; says whether there may be more."""
        piece = os.read(self.pipe, _PIECE_BYTES)
        self._text += piece
        self._is_over = not piece
        return not self._is_over

    def end(self) -> None:
        """Kill it if it still runs, and take its answer."""
        os.close(self.pipe)
        is_late = not self._is_over
        if is_late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if is_late:
            self.error = "it did not answer in time"
        elif self._text:
            self.answer, self.error = json.loads(self._text)
        elif code < 0:
            self.error = f"it was ended by {signal.Signals(-code).name}"
        else:
            self.error = f"it ended with exit code {code}"


def in_one_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    if isinstance(error, UnbrokenError):
        return ": ".join(filter(None, (error.headline(), error.at())))
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _act(pipe: int, action: Callable[[], Any], limit_s: float) -> NoReturn:
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        result: tuple[Any, str | None] = (action(), None)
    except BaseException as error:  # noqa: BLE001 - a process's top: the parent is to hear whatever it is
        result = (None, in_one_line(error))
    with contextlib.suppress(OSError):
        data = json.dumps(result).encode()
        while data:
            data = data[os.write(pipe, data) :]
    # Not by returning: threads of a group whose other ranks are gone may never end.
    os._exit(0)


def collect(processes: Sequence[Forked], *, limit_s: float) -> None:
    """Wait until every process has answered or ended, and kill those that have not within the limit."""
    ends_at = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process.pipe, selectors.EVENT_READ, process)
        while selector.get_map() and (left_s := ends_at - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                if not key.data.read():
                    selector.unregister(key.fd)
    for process in processes:
        process.end()


def world(
    size: int, action: Callable[[int], Any], *, folder: Path, limit_s: float, interface: str | None = None
) -> list[Forked]:
    """Fork the ranks of a gloo world; each runs the action with its rank.

    Args:
        size: how many ranks.
        action: what each runs, in the process group.
        folder: an empty folder of its own, in which the ranks find each other.
        limit_s: when a rank that has not ended is killed.
        interface: the network interface that gloo uses; None for the one it finds or is told by the environment.
    """

    def rank(number: int) -> Callable[[], Any]:
        def run() -> Any:  # noqa: ANN401 - whatever the action returns
            if interface is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = interface
            init_gloo(_dist.FileStore(f"{folder}/meeting", size), number, size, limit_s)
            return action(number)

        return run

    return [Forked(rank(number), limit_s=limit_s) for number in range(size)]
