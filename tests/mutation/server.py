"""Forks a pytest for every mutation from one process that has torch already; started as a script, by `children.py`.

It imports what takes long and nothing of ours: neither `unbroken` nor a test. So a child that puts a copy of the
package first on its path imports that copy and no other. One request is a line of JSON on standard input, its answer
a line on standard output. Nothing here may start a thread: a fork would take the locks it holds into every child.
"""

import array
import contextlib
import gc
import importlib
import json
import multiprocessing.util
import os
import select
import signal
import socket
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

# What is slow to import in most tests that catch mutations. Not pyarrow: it starts a thread when it is imported.
HEAVY = (
    "asyncio",
    "click.testing",
    "gigatoken",
    "hypothesis.stateful",
    "numpy",
    "rich.progress",
    "safetensors.torch",
    "tokenizers",
    "torch",
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "torch.distributed.checkpoint.format_utils",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.attention.flex_attention",
    "torch.nn.parallel",
    "torch.optim.swa_utils",
    "torchdata.stateful_dataloader",
    "xdist.plugin",
    "xxhash",
    "yaml",
    "zstandard",
)
_UNUSED_PLUGINS = ("anyio", "cacheprovider", "xdist")
OPTIONS = (
    # Plain asserts: with CI set, pytest shows how two values differ in full, which takes minutes for megabytes.
    *("-x", "-q", "--tb=short", "--assert=plain"),
    *(option for name in _UNUSED_PLUGINS for option in ("-p", f"no:{name}")),
    # Hypothesis is a plugin, and is imported already.
    *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
)
_FORK_SERVER = "from multiprocessing.forkserver import main"


def run(source: str, log: str, temporary: str, nodes: Sequence[str], timeout_s: float, patience_s: float) -> int | None:
    """Run tests against the package below `source` in a child; its exit code, or None if it took too long."""
    pid = os.fork()
    if pid == 0:
        os.environ["UNBROKEN_TEST_TIMEOUT_S"] = str(patience_s)
        _run_child(source, log, temporary, nodes)
    watched = os.pidfd_open(pid)
    has_ended = bool(select.select([watched], [], [], timeout_s)[0])
    os.close(watched)
    # What a test left behind ends with it; multiprocessing's tracker ignores this one and cleans up first.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM if has_ended else signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if has_ended else None


def _run_child(source: str, log: str, temporary: str, nodes: Sequence[str]) -> NoReturn:
    code = 70
    try:
        os.setsid()
        _redirect(log)
        # A path that begins with the copy, here and in all processes that a test starts.
        os.environ["PYTHONPATH"] = source
        sys.path.insert(0, source)
        # The children of multiprocessing run their parent's main module: that would be this file.
        sys.modules["__main__"] = types.ModuleType("__main__")
        _lend_fork_server()
        sys.argv = ["pytest", *OPTIONS, f"--basetemp={temporary}", *nodes]
        code = int(pytest.main(sys.argv[1:]))
    except BaseException:  # noqa: BLE001 - a process's top: no child may continue in the server's loop
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by returning: that would answer the server's requests.
        os._exit(code)


def _redirect(log: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(nothing)
    os.close(out)


def _lend_fork_server() -> None:
    """Let multiprocessing's fork server be a process that has torch too, forked now, while there is no thread.

    It waits until the tests ask for a fork server, and becomes that one. A second one is started as usual.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_fork_server(theirs)
    theirs.close()
    usual = multiprocessing.util.spawnv_passfds
    waiting = [pid]

    def start(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        code = args[-1]
        if not (waiting and isinstance(code, str) and code.startswith(_FORK_SERVER)):
            return usual(path, args, passfds)
        numbers = list(passfds)
        results = {"code": code, "fds": numbers, "env": dict(os.environ), "cwd": os.getcwd()}
        ours.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))])
        ours.sendall(json.dumps(results).encode() + b"\n")
        ours.close()
        return waiting.pop()

    multiprocessing.util.spawnv_passfds = start


def _become_fork_server(asked: socket.socket) -> NoReturn:
    code = 70
    try:
        begun, fds, _, _ = socket.recv_fds(asked, 1, 16)
        if begun:
            with asked, asked.makefile("rb") as lines:
                results = json.loads(lines.readline())
            _place(fds, results["fds"])
            os.environ.clear()
            os.environ.update(results["env"])
            os.chdir(results["cwd"])
            sys.path.insert(0, "")
            sys.argv = ["-c"]
            exec(results["code"], {"__name__": "__main__"})  # what a new interpreter would have been given
        code = 0
    except SystemExit:
        code = 0  # the way in which a fork server ends when nobody needs it any more
    except BaseException:  # noqa: BLE001 - a process's top
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give received descriptors the numbers that they have in the process that sent them."""
    above = max(*fds, *numbers, 2) + 1
    for place, fd in enumerate(fds):
        os.dup2(fd, above + place)
        os.close(fd)
    for place, number in enumerate(numbers):
        os.dup2(above + place, number)
        os.close(above + place)


def main() -> None:
    # The folder of this file, which Python put first: its modules are no one's top-level names.
    sys.path.remove(str(Path(__file__).parent))
    for name in HEAVY:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    ours = sorted(name for name in sys.modules if name.partition(".")[0] in ("unbroken", "tests"))
    if threads != 1 or ours:
        raise SystemExit(f"{threads} threads and {ours} before the first fork; both would be in every child")
    # What is here stays for good: a child's garbage collector need not look at it, nor copy its pages.
    gc.collect()
    gc.freeze()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
