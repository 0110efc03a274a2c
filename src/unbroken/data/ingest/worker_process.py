"""The main program of one worker process of a ``WorkerPool``: tokenizes units until its standard input ends."""

import json
import os
import queue
import signal
import sys
import threading
from dataclasses import asdict
from typing import IO, Any

from unbroken.data.ingest.fast_engine import EnginesDiffer
from unbroken.data.ingest.workbench import BenchSettings, open_bench
from unbroken.data.ingest.worker_pool import error_to_json, send
from unbroken.errors import UnbrokenError

_SEND_EVERY_BYTES = 1 << 20


class _ProgressSender:
    """Sends the number of bytes read, at most once per MiB."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._unsent = 0

    def __call__(self, amount: int) -> None:
        self._unsent += amount
        if self._unsent >= _SEND_EVERY_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the bytes not sent yet."""
        send(self._pipe, {"bytes": self._unsent})
        self._unsent = 0


def _work(orders: "queue.SimpleQueue[dict[str, Any]]", pipe: IO[str]) -> None:
    bench = open_bench(BenchSettings.from_json(orders.get()))
    progress = _ProgressSender(pipe)
    while True:
        done = bench.do(orders.get()["unit"], progress)
        progress.flush()
        send(pipe, {"done": asdict(done)})


def main() -> int:
    """Tokenize units until standard input is closed."""
    # Ctrl-C goes to every process of a terminal; the parent decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = os.fdopen(os.dup(1), "w")
    # Output of libraries must not mix with messages.
    os.dup2(2, 1)
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    try:
        _work(orders, pipe)
    except EnginesDiffer as difference:
        send(pipe, {"differ": str(difference)})
    except UnbrokenError as error:
        send(pipe, {"error": error_to_json(error)})
    return 0


def _listen(orders: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    # The parent is gone. Nothing more may be written: the user may start the command again at once.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
