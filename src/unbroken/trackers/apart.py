"""Runs a tracker's library in a process of its own, so that it cannot disturb the training.

These libraries draw from Python's global random number generator, at import and whenever they repeat a request; in the
process of the training each draw would change its bits. The process reads commands as lines of JSON from its standard
input and answers each with one line. It dies with the thread that started it: a killed job sends nothing more.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

from unbroken.records.metrics import Row
from unbroken.trackers.named import TrackerName, adapter
from unbroken.trackers.tracker import Ending, TrackedRun, Tracker

_DIE_WITH_PARENT: Final = 1
_END_WAIT_S: Final = 10.0


class TrackerError(Exception):
    """An error of a tracker's library in its process, with the library's own message."""


class TrackerApart:
    """A tracker whose library is in another process; that process is started with the first call."""

    def __init__(self, name: TrackerName) -> None:
        self._name = name
        self._run: TrackedRun | None = None
        self._process: subprocess.Popen[str] | None = None

    @property
    def name(self) -> str:
        """What it is and where it shows the run."""
        return str(self._name)

    def start(self, run: TrackedRun) -> None:
        """Start the process, and the run in it.

        Raises:
            TrackerError: the library refused, or the process ended.
        """
        self._run = run
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = self._started()
        self._ask("start", run.id, run.name, str(run.directory), dict(run.config), run.is_resumed)

    def last_step(self) -> int | None:
        """The last step that is stored.

        Raises:
            TrackerError: the library refused, or the process ended.
        """
        answer = self._ask("last_step")
        return answer if isinstance(answer, int) else None

    def log(self, rows: Sequence[Row]) -> None:
        """Send some steps.

        Raises:
            TrackerError: the library refused, or the process ended.
        """
        self._ask("log", [[row.step, dict(row.values)] for row in rows])

    def finish(self, ending: Ending) -> None:
        """Finish the run, and end the process.

        Raises:
            TrackerError: the library refused, or the process ended.
        """
        self._ask("finish", ending)
        self._end()

    def _end(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            # A process that is gone does not take what is still unwritten.
            with contextlib.suppress(BrokenPipeError):
                cast("IO[str]", pipe).close()
        process.wait(_END_WAIT_S)

    def _started(self) -> "subprocess.Popen[str]":
        # -P: a file of the script's folder must not take the place of a library.
        command = [sys.executable, "-P", "-m", __name__, self._name.kind, self._name.target]
        # A session of its own: a signal to the job's group is for the training, which then ends this process.
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def _ask(self, method: str, *values: object) -> object:
        process = self._process
        if process is None or process.poll() is not None:
            # It ended by itself since: its run is continued in a new one.
            if self._run is None or method == "start":
                raise TrackerError("its process has ended")
            self.start(self._run)
            process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([method, *values], default=str) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise TrackerError(f"its process ended with exit code {process.wait(_END_WAIT_S)}")
        answer = json.loads(line)
        if answer["error"] is not None:
            raise TrackerError(answer["error"])
        return answer["value"]


# ---- the process ----


def serve(tracker: Tracker, asked: IO[str], answers: IO[str]) -> None:
    """Carry out the commands, one per line, until the input ends."""
    for line in asked:
        method, *values = json.loads(line)
        value, error = None, None
        try:
            value = _call(tracker, method, values)
        except Exception as raised:  # noqa: BLE001 - whatever a library raises is told to the one who asked
            error = f"{type(raised).__name__}: {raised}"
        answers.write(json.dumps({"value": value, "error": error}) + "\n")
        answers.flush()


def _call(tracker: Tracker, method: str, values: Sequence[Any]) -> object:
    if method == "start":
        run_id, name, directory, config, is_resumed = values
        tracker.start(TrackedRun(run_id, name, Path(directory), config, is_resumed=is_resumed))
        return None
    if method == "last_step":
        return tracker.last_step()
    if method == "log":
        tracker.log([_row(step, shown) for step, shown in values[0]])
        return None
    tracker.finish(values[0])
    return None


def _row(step: int, values: Mapping[str, int | float]) -> Row:
    return Row(step, 0, values, {})


def main() -> None:
    """Serve the tracker that the command line names."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    # What a library prints goes where the job's messages go, and not among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Nothing is sent to the makers of MLflow, unless the user has said so.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    kind, target = sys.argv[1:]
    serve(adapter(TrackerName(kind, target)), sys.stdin, answers)


if __name__ == "__main__":
    main()
