"""Ports on loopback that a test gives to programs which bind them later themselves."""

import contextlib
import itertools
import os
import socket

# Below those that the system gives to whoever asks for any: one that is free now is still free a moment later.
_FIRST, _WORKERS, _PER_WORKER = 10_000, 20, 1_000
_asked = itertools.count()


def free_port(count: int = 1) -> int:
    """The first of so many ports that are free, side by side; each worker of pytest has ports of its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    for _ in range(_PER_WORKER):
        at = (os.getpid() * 7 + next(_asked) * count) % (_PER_WORKER - count)
        port = _FIRST + worker * _PER_WORKER + at
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for each in range(count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port + each))
            return port
    raise AssertionError(f"no {count} ports side by side are free")
