"""Processes for trainings, forked from one that has imported the framework: importing it takes longer than training.

Run as a program it is that process: a line on stdin is a job, and each job gets a child of its own.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.patience import PATIENCE_S
from tests.ports import free_port
from unbroken.records.journal import Event, read_history
from unbroken.records.layout import Layout

ROOT = Path(__file__).resolve().parents[2]
# Importing pyarrow starts a thread of its memory allocator otherwise, and what forks should have none.
NO_THREAD_OF_ARROW = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


@dataclass(frozen=True)
class Ended:
    """How a job ended: rank 0's exit code, negative for a signal, what it printed, and its result if it has one."""

    code: int
    said: str
    result: dict[str, Any] | None

    @property
    def digest(self) -> str:
        assert self.result is not None, self.said
        return str(self.result["digest"])


class Jobs:
    """Starts jobs and waits for them."""

    def __init__(self, server: "subprocess.Popen[str]", folder: Path) -> None:
        self._server, self._folder, self._count = server, folder, 0

    def run(self, directory: Path, environ: Mapping[str, str] | None = None, **job: Any) -> Ended:  # noqa: ANN401
        """Do one job to its end."""
        self._count += 1
        result, log = self._folder / f"{self._count}.json", self._folder / f"{self._count}.log"
        asked = {"directory": str(directory), "result": str(result), "log": str(log), "environ": environ or {}, **job}
        asked_of, answered_by = self._pipes()
        asked_of.write(json.dumps(asked) + "\n")
        asked_of.flush()
        code = int(answered_by.readline())
        return Ended(code, log.read_text(), json.loads(result.read_text()) if result.exists() else None)

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._server.stdin is not None and self._server.stdout is not None
        return self._server.stdin, self._server.stdout


def events(run: Path, kind: str) -> list[Event]:
    """The events of a kind in the journal of a run."""
    return read_history(Layout(run)).of_kind(kind)


def resumed_from(run: Path) -> list[int | None]:
    """The step that each job of a run resumed from; 0 for one that started."""
    return [event.whole("step") for event in events(run, "resume")]


@contextlib.contextmanager
def forking(folder: Path, trainings: str = "tests.frameworks.trainings") -> Iterator[Jobs]:
    """A process that has imported what trainings need: the module of that name, whose ``train`` does a job."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **NO_THREAD_OF_ARROW}
    command = [sys.executable, "-m", "tests.frameworks.forking", trainings]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdin=pipe, stdout=pipe, text=True) as server:
        try:
            yield Jobs(server, folder)
        finally:
            server.kill()


def _serve() -> None:
    module = importlib.import_module(sys.argv[1])
    train: Callable[[dict[str, Any]], None] = module.train
    if hasattr(module, "SMALLEST"):
        _import_what_it_imports(train, module.SMALLEST)
    # What is here stays for good: a child's garbage collector need not look at it, nor copy its pages.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        children = []
        for environ in _environments(job.get("ranks", 1)):
            children.append(os.fork())
            if children[-1] == 0:
                signal.alarm(int(PATIENCE_S))
                log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.environ.update({**environ, **job["environ"]})
                _end(train, job)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        sys.stdout.write(f"{codes[0]}\n")
        sys.stdout.flush()


def _import_what_it_imports(train: Callable[[dict[str, Any]], None], job: Mapping[str, Any]) -> None:
    """Do the smallest job in a child, and import here what it did: frameworks import much when they are first used.

    Transformers' Trainer does so with DeepSpeed, if it is installed: 1.3 of the 1.4 s of a small training.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "names")
        child = os.fork()
        if child == 0:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            before = set(sys.modules)
            os.environ.update(job.get("environ", {}))
            with contextlib.suppress(BaseException):
                train({**job, "directory": folder, "result": f"{folder}/result"})
                names.write_text("\n".join(name for name in sys.modules if name not in before))
            os._exit(0)
        os.waitpid(child, 0)
        for name in names.read_text().split("\n") if names.exists() else ():
            # Some were made without an import, and cannot be imported: they are left to the trainings.
            with contextlib.suppress(Exception), contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads before a fork: it would take the locks they hold into every child"


def _end(train: Callable[[dict[str, Any]], None], job: dict[str, Any]) -> None:
    """Do a job and end as Python does, but without taking all modules apart: that takes longer than the training."""
    code = 0
    try:
        train(job)
    except BaseException as error:  # noqa: BLE001 - the top of a process; errors of DCP are not Exceptions
        sys.last_value = error
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _environments(ranks: int) -> list[dict[str, str]]:
    """What a launcher tells each rank; nothing where there is one."""
    if ranks == 1:
        return [{}]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


if __name__ == "__main__":
    _serve()
