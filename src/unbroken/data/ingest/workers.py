"""Processes that tokenize units for another one, and the way both speak to each other.

A worker is a fresh interpreter (a fork would inherit half the threads of a tokenizer). It reads one JSON line for each
unit, answers with lines, and ends when its standard input does, so that no worker outlives the one it works for. A
worker that dies is an error that names its unit, never a wait without end.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Final

from unbroken import errors
from unbroken.data.ingest.accelerate import EnginesDiffer
from unbroken.errors import Bug, UnbrokenError, WorkerDied

_MODULE: Final = "unbroken.data.ingest.worker_main"
Answer = dict[str, Any]


def error_to_json(error: UnbrokenError) -> Answer:
    """An error as plain data: its class and its fields."""
    return {
        "class": type(error).__name__,
        "fields": {each.name: _plain(getattr(error, each.name)) for each in fields(error)},
    }


def error_from_json(found: Mapping[str, Any]) -> UnbrokenError:
    """The error that a worker met, with all its fields."""
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
class Job:
    """A unit to be done: its number in the plan, and words that name it."""

    number: int
    words: str


@dataclass
class Crew:
    """Some workers over one list of jobs.

    Attributes:
        terms: what every worker is told first.
        count: how many there are.
        command: what goes on after a worker died.
        inherited: open files that must stay open as long as any worker lives.
    """

    terms: Mapping[str, Any]
    count: int
    command: str
    inherited: Sequence[int] = ()
    _processes: list["subprocess.Popen[str]"] = field(default_factory=list)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _is_over: bool = False

    def run(self, jobs: Sequence[Job], advance: Callable[[int], None]) -> None:
        """Have every job done; ``advance`` is told bytes as they are read, from any thread.

        Raises:
            EnginesDiffer: a worker saw the faster engine give other ids than the reference.
            WorkerDied: a worker was killed or ended by itself.
            UnbrokenError: whatever a worker met.
        """
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        count = min(self.count, len(jobs))
        threads = [
            threading.Thread(target=self._lead, args=(waiting, ends, advance), name=f"unbroken-tokenize-{n}")
            for n in range(count)
        ]
        try:
            for thread in threads:
                thread.start()
            for _ in threads:
                if (problem := ends.get()) is not None:
                    raise problem
        finally:
            self._dismiss()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()

    def _dismiss(self) -> None:
        with self._guard:
            self._is_over = True
            for process in self._processes:
                process.kill()

    def _start(self) -> "subprocess.Popen[str] | None":
        # A worker finds the package where this process found it, whatever path it was started with.
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
                pass_fds=tuple(self.inherited),
            )
            self._processes.append(process)
        return process

    def _lead(
        self,
        waiting: "queue.SimpleQueue[Job]",
        ends: "queue.SimpleQueue[BaseException | None]",
        advance: Callable[[int], None],
    ) -> None:
        """One worker's life, in a thread of this process."""
        problem: BaseException | None = None
        process = None
        try:
            # A system that refuses another process must end the wait for it too.
            process = self._start()
            if process is not None:
                _have_done(process, dict(self.terms), waiting, advance, self.command)
        # Whatever ends this thread is raised in the one that waits for it.
        except BaseException as met:  # noqa: BLE001
            problem = met
        finally:
            if process is not None:
                _end(process)
            ends.put(problem)


def _have_done(
    process: "subprocess.Popen[str]",
    terms: Answer,
    waiting: "queue.SimpleQueue[Job]",
    advance: Callable[[int], None],
    command: str,
) -> None:
    talk_in, talk_out = process.stdin, process.stdout
    if talk_in is None or talk_out is None:
        raise Bug(cause="a worker was started without pipes")
    say(talk_in, terms)
    while True:
        try:
            job = waiting.get_nowait()
        except queue.Empty:
            return
        say(talk_in, {"unit": job.number})
        _await(process, talk_out, job, advance, command)


def _await(
    process: "subprocess.Popen[str]", talk: IO[str], job: Job, advance: Callable[[int], None], command: str
) -> None:
    for line in talk:
        answer = json.loads(line)
        if "bytes" in answer:
            advance(answer["bytes"])
        elif "differ" in answer:
            raise EnginesDiffer(answer["differ"])
        elif "error" in answer:
            raise error_from_json(answer["error"])
        else:
            return
    raise WorkerDied(how=_how(process.wait()), unit=job.words, command=command)


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended by itself with exit code {code}"


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            # What was not said to a worker that is dead need not be said.
            with suppress(BrokenPipeError):
                pipe.close()


def say(talk: IO[str], words: Answer) -> None:
    """Send one line; to one that has died it goes nowhere, which shows when the answer is awaited."""
    with suppress(BrokenPipeError):
        talk.write(json.dumps(words) + "\n")
        talk.flush()
