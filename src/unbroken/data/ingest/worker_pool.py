"""A pool of processes that tokenize units, and its messages.

A worker is a new interpreter (a fork would inherit half of a tokenizer's threads). It reads one JSON line per unit,
answers with JSON lines, and exits when its standard input is closed, so that no worker outlives its parent. A worker
that dies is an error that names its unit and signal, never a hang. Why not a pool of the standard library:
docs/decisions/019.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from unbroken import errors
from unbroken.data.ingest.fast_engine import EnginesDiffer
from unbroken.data.ingest.tokenize_unit import UnitDone
from unbroken.errors import Bug, UnbrokenError, WorkerDied

_MODULE: Final = "unbroken.data.ingest.worker_process"
Message = dict[str, Any]


def error_to_json(error: UnbrokenError) -> Message:
    """An error as JSON: its class and its fields."""
    return {
        "class": type(error).__name__,
        "fields": {name: _plain(value) for name, value in error.values().items()},
    }


def error_from_json(found: Mapping[str, Any]) -> UnbrokenError:
    """An error of a worker, with all its fields."""
    made: UnbrokenError = getattr(errors, found["class"])(
        **{name: _fancy(value) for name, value in found["fields"].items()}
    )
    return made


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return {"path": str(value)}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _fancy(value: object) -> object:
    if isinstance(value, dict):
        return Path(value["path"])
    return tuple(_fancy(each) for each in value) if isinstance(value, list) else value


@dataclass(frozen=True)
class UnitTask:
    """A unit to tokenize: its number in the plan, its name for messages, and the bytes it reads."""

    number: int
    name: str
    size_bytes: int


Take = Callable[[], UnitTask | None]
Done = Callable[[UnitDone], None]


@dataclass
class WorkerPool:
    """Worker processes that share one list of units.

    Attributes:
        settings: the first message to every worker.
        count: the largest number of workers.
        command: the command that resumes after a worker died.
    """

    settings: Mapping[str, Any]
    count: int
    command: str
    _processes: list["subprocess.Popen[str]"] = field(default_factory=list)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _is_over: bool = False

    def run(self, take: Take, advance: Callable[[int], None], done: Done) -> None:
        """Tokenize units until ``take`` gives none.

        ``take``, ``advance`` with the bytes that were read, and ``done`` are called from any thread.

        Raises:
            EnginesDiffer: the fast engine gave other ids than the reference.
            WorkerDied: a worker was killed or exited.
            UnbrokenError: an error of a worker.
        """
        ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=self._lead, args=(take, ends, advance, done), name=f"unbroken-tokenize-{n}")
            for n in range(self.count)
        ]
        try:
            for thread in threads:
                thread.start()
            for _ in threads:
                if (problem := ends.get()) is not None:
                    raise problem
        finally:
            self._kill_all()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()

    def _kill_all(self) -> None:
        with self._guard:
            self._is_over = True
            for process in self._processes:
                process.kill()

    def _start(self) -> "subprocess.Popen[str] | None":
        # A worker must import the same package as this process, whatever its import path.
        home = str(Path(errors.__file__).parents[2])
        path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        with self._guard:
            if self._is_over:
                return None
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environ,
                text=True,
            )
            self._processes.append(process)
        return process

    def _lead(
        self,
        take: Take,
        ends: "queue.SimpleQueue[BaseException | None]",
        advance: Callable[[int], None],
        done: Done,
    ) -> None:
        """Run one worker, in a thread of this process."""
        problem: BaseException | None = None
        process = None
        try:
            # If the process cannot be started, the wait for it must end too.
            task = take()
            process = self._start() if task is not None else None
            if process is not None and task is not None:
                _Link(process, advance, self.command).give_units(dict(self.settings), task, take, done)
        # Any error of this thread is raised in the thread that waits.
        except BaseException as met:  # noqa: BLE001
            problem = met
        finally:
            if process is not None:
                _end(process)
            ends.put(problem)


@dataclass(frozen=True)
class _Link:
    """One worker process, as this process talks to it."""

    process: "subprocess.Popen[str]"
    advance: Callable[[int], None]
    command: str

    def give_units(self, settings: Message, first: UnitTask, take: Take, done: Done) -> None:
        requests = self.process.stdin
        if requests is None:
            raise Bug(cause="a worker was started without pipes")
        send(requests, settings)
        task: UnitTask | None = first
        while task is not None:
            send(requests, {"unit": task.number})
            done(self._wait_until_done(task))
            task = take()

    def _wait_until_done(self, task: UnitTask) -> UnitDone:
        for line in self.process.stdout or ():
            answer = json.loads(line)
            if "bytes" in answer:
                self.advance(answer["bytes"])
            else:
                return done_from_json(answer)
        raise WorkerDied(how=_how_it_ended(self.process.wait()), unit=task.name, command=self.command)


def done_from_json(answer: Message) -> UnitDone:
    """The end of a unit, as a worker told it.

    Raises:
        EnginesDiffer: the fast engine gave other ids than the reference.
        UnbrokenError: an error of the worker.
    """
    if "differ" in answer:
        raise EnginesDiffer(answer["differ"])
    if "error" in answer:
        raise error_from_json(answer["error"])
    return UnitDone(**answer["done"])


def _how_it_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            # Unsent messages to a dead worker do not matter.
            with suppress(BrokenPipeError):
                pipe.close()


def send(pipe: IO[str], message: Message) -> None:
    """Send one line; if the other side has died, the wait for its answer will show it."""
    with suppress(BrokenPipeError):
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()
