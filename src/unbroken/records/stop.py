"""Why a job stops, and where stop requests come from: signals, the flag file, the deadline, spot notices, the loop."""

import contextlib
import errno
import json
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Final, Literal, Protocol

from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.quoting import amounts
from unbroken.quoting.log import logger
from unbroken.records.layout import Layout
from unbroken.store.fields import as_whole, parsed

Kind = Literal["signal", "walltime", "spot", "flag", "asked", "done"]

_SCHEMA: Final = "unbroken.stop/1"
_LIMIT_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class StopReason:
    """Why a job ends; ``detail`` is the signal's name, the deadline, the notice, or who requested it."""

    kind: Kind
    detail: str = ""

    def sentence(self) -> str:
        """The reason in words."""
        words = {
            "signal": "signal received",
            "walltime": "walltime limit near",
            "spot": "spot interruption notice",
            "flag": "stop requested",
            "asked": "stopped by the training loop",
            "done": "the target is reached",
        }[self.kind]
        if self.kind == "done" and self.detail:
            return self.detail
        return f"{words} ({self.detail})" if self.detail else words


@dataclass(frozen=True)
class StopRequest:
    """What a flag file says: the job it is for, None for any, and who requested the stop."""

    job: int | None = None
    by: str = ""


def request_stop(layout: Layout, *, job: int, by: str, scratch: str, files: Files = LOCAL) -> None:
    """Request that a job stops at the edge of its next step.

    Raises:
        StorageFailed: an I/O error.
    """
    text = json.dumps({"schema": _SCHEMA, "job": job, "by": by}) + "\n"
    # crash here: no request, or a whole one.
    files.replace(layout.stop_request, text.encode(), scratch=scratch)


def read_request(layout: Layout, files: Files = LOCAL) -> StopRequest | None:
    """The stop request of a run, None if there is none; a file made by hand is for any job.

    Raises:
        StorageFailed: the file could not be read; that is not a request.
    """
    if files.find(layout.stop_request) is None:
        return None
    try:
        found: Any = parsed(files.read_bytes(layout.stop_request, limit_bytes=_LIMIT_BYTES))
    except ValueError:
        return StopRequest()
    except StorageFailed as refused:
        if refused.is_missing:
            # Removed between the look and the reading.
            return None
        cause = refused.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.EFBIG:
            # Not one of ours: somebody made a file of this name to stop the job.
            return StopRequest()
        raise
    if not isinstance(found, dict) or found.get("schema") != _SCHEMA:
        return StopRequest()
    by = found.get("by")
    return StopRequest(as_whole(found.get("job")), by if isinstance(by, str) else "")


def clear_requests(layout: Layout, *, job: int, files: Files = LOCAL) -> None:
    """Remove a request for an earlier job; one for this job, made just now, stays.

    One that cannot be read now may be for this job: it stays, and the job reads it again.

    Raises:
        StorageFailed: an I/O error.
    """
    try:
        found = read_request(layout, files)
    except StorageFailed:
        return
    if found is not None and (found.job is None or found.job < job):
        # crash here: the request is there or not; the next job removes it.
        files.remove_file(layout.stop_request)


def end_requests(layout: Layout, files: Files = LOCAL) -> None:
    """Remove the request that a job has followed.

    Raises:
        StorageFailed: an I/O error.
    """
    # crash here: the request is still there; it names a job that has ended, and the next one removes it.
    files.remove_file(layout.stop_request)


# ---- receiving requests ----

__all__ = [
    "LOOK_EVERY_S",
    "SECOND_AFTER_S",
    "SIGNALS",
    "Notices",
    "StopReason",
    "StopRequest",
    "StopSources",
    "clear_requests",
    "end_requests",
    "is_due",
    "read_request",
    "request_stop",
]

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
LOOK_EVERY_S: Final = 1.0
# One Ctrl-C reaches a rank from the terminal and again from its launcher; only a later one is meant a second time.
SECOND_AFTER_S: Final = 1.0
_log = logger(__name__)


def is_due(now_s: float, deadline_s: float | None, reserve_s: float) -> bool:
    """Whether the time left until the deadline is no more than a last save needs."""
    return deadline_s is not None and now_s + reserve_s >= deadline_s


class Notices(Protocol):
    """A source of spot interruption notices; called at every edge, so neither method may wait for anything."""

    @property
    def deadline_s(self) -> float | None:
        """When the machine goes, in seconds since 1970; None as long as it is not known."""

    def look(self) -> StopReason | None:
        """The notice, if there is one."""

    def end(self) -> None:
        """Stop listening."""


class StopSources:
    """Collects stop requests for a job; a context manager around the loop.

    Args:
        job: the job's number; a request for an earlier one is not for it.
        clock: seconds since 1970, as the deadline is given.
        deadline_s: the job's walltime limit; None for no limit.
        reserve: how many seconds before that a last save must begin.
        look_every_s: the flag file is read no more often than this.
        reads_flag: whether this rank reads the flag file; one rank does, the others learn of it by the ranks' vote.
        is_speaking: whether the first Ctrl-C is answered in the log.
        notices: the source of spot interruption notices; ended by ``restore``.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        job: int,
        clock: Callable[[], float],
        deadline_s: float | None = None,
        reserve: Callable[[], float] = lambda: 0.0,
        look_every_s: float = LOOK_EVERY_S,
        files: Files = LOCAL,
        reads_flag: bool = True,
        notices: Notices | None = None,
        is_speaking: bool = False,
    ) -> None:
        self._notices, self._is_speaking = notices, is_speaking
        self._ended_with: list[Callable[[], None]] = []
        self._layout, self._job, self._files = layout, job, files
        self._clock, self._deadline_s, self._reserve = clock, deadline_s, reserve
        self._look_every_s, self._reads_flag = look_every_s, reads_flag
        self._looked_at_s: float | None = None
        self._is_refusal_told = False
        self._signal: int | None = None
        self._signalled_at_s: float | None = None
        self._interrupted_at_s: float | None = None
        self._asked: StopReason | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSources":
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def install(self) -> bool:
        """Install the signal handlers; False, with a warning, outside the main thread, where Python forbids it."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning("Run is not used from the main thread: signals cannot stop it; `unbroken stop` still does")
            return False
        for each in SIGNALS:
            self._previous[each] = signal.signal(each, self._note)
        _installed.append(self)
        return True

    def install_again(self) -> None:
        """Install the handlers over those that were installed since; nothing where none of ours were."""
        for each in self._previous:
            signal.signal(each, self._note)

    def restore(self) -> None:
        """Restore the previous signal handlers, and stop listening for notices."""
        if self._notices is not None:
            self._notices.end()
        while self._ended_with:
            self._ended_with.pop()()
        if self in _installed:
            _installed.remove(self)
        while self._previous:
            number, previous = self._previous.popitem()
            over = next((each for each in _installed if each._previous.get(number) == self._note), None)
            if over is not None:
                # Another job of this process was opened later and still listens.
                over._previous[number] = previous
                continue
            # None: a handler that C code installed; Python can neither name it nor put it back.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The process ends, and with it every job that it has open.
        for each in (self, *_installed):
            if each._signal is None:
                each._signal, each._signalled_at_s = number, each._clock()
        if number != signal.SIGINT:
            return
        now_s = self._clock()
        if self._interrupted_at_s is None:
            self._interrupted_at_s = now_s
            self._say_interrupted()
        elif now_s - self._interrupted_at_s >= SECOND_AFTER_S:
            raise KeyboardInterrupt

    @property
    def signalled(self) -> StopReason | None:
        """The signal that came, if one did."""
        return None if self._signal is None else StopReason("signal", signal.Signals(self._signal).name)

    def _say_interrupted(self) -> None:
        """Answer the first Ctrl-C at once: a user who sees nothing presses again, and loses the step."""
        if not self._is_speaking:
            return
        # A handler may run while a line is being written; then this one is left out.
        with contextlib.suppress(RuntimeError):
            _log.warning(
                "SIGINT: finishing this step, then saving; Ctrl-C again ends at once and loses what is not saved"
            )

    def end_with(self, end: Callable[[], None]) -> None:
        """Let something that serves these sources end with them, in ``restore``."""
        self._ended_with.append(end)

    def move_deadline(self, at_s: float | None) -> None:
        """Set another deadline, from any thread: the scheduler announced it late, or has moved it."""
        self._deadline_s = at_s

    def ask(self, detail: str = "") -> None:
        """Note a stop request by the loop itself."""
        self._asked = self._asked or StopReason("asked", detail)

    @property
    def deadline_s(self) -> float | None:
        """The nearest known limit: the job's own, or the machine's."""
        known_s = (self._deadline_s, self._notices.deadline_s if self._notices is not None else None)
        return min((each for each in known_s if each is not None), default=None)

    def left_s(self, grace_s: float | None) -> float | None:
        """Seconds until the kill, as far as it is known: a grace window after a signal, or the deadline if nearer."""
        now_s, deadline_s = self._clock(), self.deadline_s
        # A job that outlives its deadline was not killed by it: then the deadline says nothing about the kill.
        gone_at_s = [deadline_s] if deadline_s is not None and deadline_s > now_s else []
        if self._signalled_at_s is not None and grace_s is not None:
            gone_at_s.append(self._signalled_at_s + grace_s)
        return min(gone_at_s) - now_s if gone_at_s else None

    def look(self) -> StopReason | None:
        """The stop request, if there is one; a few microseconds, but for one read of the flag file a second."""
        if self._signal is not None:
            return self.signalled
        if self._asked is not None:
            return self._asked
        if self._notices is not None and (notice := self._notices.look()) is not None:
            return notice
        now_s = self._clock()
        # Read once: another thread may move it.
        deadline_s = self._deadline_s
        if deadline_s is not None and is_due(now_s, deadline_s, reserve_s := self._reserve()):
            left_s = max(0.0, deadline_s - now_s)
            detail = f"{amounts.duration(left_s)} left, {amounts.duration(reserve_s)} kept for a last save"
            return StopReason("walltime", detail)
        last_s = self._looked_at_s
        # A clock that is set back must not stop the reads for an hour.
        if not self._reads_flag or (last_s is not None and 0 <= now_s - last_s < self._look_every_s):
            return None
        self._looked_at_s = now_s
        return self._flag()

    def _flag(self) -> StopReason | None:
        try:
            found = read_request(self._layout, self._files)
        except StorageFailed as refusal:
            # Storage that fails for a moment is no reason to stop a job; the next look reads again.
            if not self._is_refusal_told:
                _log.warning("could not read the stop flag file: %s; retrying every second", refusal)
            self._is_refusal_told = True
            return None
        self._is_refusal_told = False
        if found is None or (found.job is not None and found.job < self._job):
            return None
        return StopReason("flag", f"by {found.by}" if found.by else self._layout.stop_request.name)


# Whose handlers are installed, in the order of their installation.
_installed: list[StopSources] = []
