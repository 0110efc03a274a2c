"""Why a job ends, who may ask it to, and whether somebody has: signals, the flag file, the deadline."""

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
    """Why a job ends; ``detail`` is the signal's name, the deadline, the notice, who asked."""

    kind: Kind
    detail: str = ""

    def sentence(self) -> str:
        """The reason in words."""
        words = {
            "signal": "a signal came",
            "walltime": "its time is nearly over",
            "spot": "the machine will be taken away",
            "flag": "it was asked to stop",
            "asked": "the training loop asked for it",
            "done": "the target is reached",
        }[self.kind]
        if self.kind == "done" and self.detail:
            return self.detail
        return f"{words} ({self.detail})" if self.detail else words


@dataclass(frozen=True)
class StopRequest:
    """What a flag file says: the job it is meant for, None for any, and who asked."""

    job: int | None = None
    by: str = ""


def request_stop(layout: Layout, *, job: int, by: str, scratch: str, files: Files = LOCAL) -> None:
    """Ask a job to end at the edge of its next step.

    Raises:
        StorageFailed: the system refused.
    """
    text = json.dumps({"schema": _SCHEMA, "job": job, "by": by}) + "\n"
    # crash here: no request, or a whole one.
    files.replace(layout.stop_request, text.encode(), scratch=scratch)


def read_request(layout: Layout, files: Files = LOCAL) -> StopRequest | None:
    """The request that stands in a run, None if there is none; a file that a person made by hand is meant for any job.

    Raises:
        StorageFailed: the system refused to say; that is no request.
    """
    if files.find(layout.stop_request) is None:
        return None
    try:
        found: Any = parsed(files.read_bytes(layout.stop_request, limit_bytes=_LIMIT_BYTES))
    except ValueError:
        return StopRequest()
    except StorageFailed as refused:
        cause = refused.__cause__
        if isinstance(cause, FileNotFoundError):
            # Removed between the look and the reading.
            return None
        if isinstance(cause, OSError) and cause.errno == errno.EFBIG:
            # Not one of ours; whoever made it wanted a file to be there.
            return StopRequest()
        raise
    if not isinstance(found, dict) or found.get("schema") != _SCHEMA:
        return StopRequest()
    by = found.get("by")
    return StopRequest(as_whole(found.get("job")), by if isinstance(by, str) else "")


def clear_requests(layout: Layout, *, job: int, files: Files = LOCAL) -> None:
    """Remove a request that was meant for an earlier job; one for this very job, made just now, stays.

    One that cannot be read now may be for this job: it stays, and the job looks at it again.

    Raises:
        StorageFailed: the system refused.
    """
    try:
        found = read_request(layout, files)
    except StorageFailed:
        return
    if found is not None and (found.job is None or found.job < job):
        # crash here: the request stands or is gone; the next job removes it.
        files.remove_file(layout.stop_request)


def end_requests(layout: Layout, files: Files = LOCAL) -> None:
    """Remove the request that a job has followed.

    Raises:
        StorageFailed: the system refused.
    """
    # crash here: the request stands; it names a job that has ended, and the next one removes it.
    files.remove_file(layout.stop_request)


# ---- listening ----

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
    """Whether what is left until the deadline is no more than what a last save needs."""
    return deadline_s is not None and now_s + reserve_s >= deadline_s


class Notices(Protocol):
    """Who hears when a machine is to be taken away; asked at every edge, so neither may wait for anything."""

    @property
    def deadline_s(self) -> float | None:
        """When it goes, in seconds since 1970; None as long as nobody says."""

    def look(self) -> StopReason | None:
        """The notice, if there is one."""

    def end(self) -> None:
        """Listen no more."""


class StopSources:
    """Notes who asks a job to end; a context manager around the loop.

    Args:
        job: the job's number; a request for an earlier one is not for it.
        clock: seconds since 1970, as the deadline is told.
        deadline_s: when the job's time is over; None for never.
        reserve: how many seconds before that a last save must begin.
        look_every_s: the flag file is read no more often than this.
        reads_flag: whether this rank reads the flag file; one rank does, the others learn of it by the ranks' vote.
        is_speaking: whether to answer the first Ctrl-C in the log.
        notices: who hears that the machine is to be taken away; ended by ``restore``.
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
        """Listen to signals; False, and said in the log, outside the main thread, where Python does not let us."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning("the run is not held by the main thread: signals will not stop it; the flag file still does")
            return False
        for each in SIGNALS:
            self._previous[each] = signal.signal(each, self._note)
        return True

    def restore(self) -> None:
        """Put back the handlers that stood before, and listen to no notices any more."""
        if self._notices is not None:
            self._notices.end()
        while self._ended_with:
            self._ended_with.pop()()
        while self._previous:
            number, previous = self._previous.popitem()
            # None: a handler that C code installed; Python can neither name it nor put it back.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal, self._signalled_at_s = number, self._clock()
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
        """Answer the first Ctrl-C at once: whoever sees nothing presses again, and loses the step."""
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
        """Take another deadline, from any thread: the scheduler told it late, or has moved it."""
        self._deadline_s = at_s

    def ask(self, detail: str = "") -> None:
        """Let the loop itself ask for an end."""
        self._asked = self._asked or StopReason("asked", detail)

    @property
    def deadline_s(self) -> float | None:
        """When the job's time is over by all that is known now: its own limit, or the machine's if that is nearer."""
        told_s = (self._deadline_s, self._notices.deadline_s if self._notices is not None else None)
        return min((each for each in told_s if each is not None), default=None)

    def left_s(self, grace_s: float | None) -> float | None:
        """Seconds until the kill, as far as it is known: a grace window after a signal, or the deadline if nearer."""
        now_s, deadline_s = self._clock(), self.deadline_s
        # Who outlives his deadline was not killed by it: then it no longer says when he will be.
        gone_at_s = [deadline_s] if deadline_s is not None and deadline_s > now_s else []
        if self._signalled_at_s is not None and grace_s is not None:
            gone_at_s.append(self._signalled_at_s + grace_s)
        return min(gone_at_s) - now_s if gone_at_s else None

    def look(self) -> StopReason | None:
        """Whether anybody asks for an end; a few microseconds, but for one look at the flag file a second."""
        if self._signal is not None:
            return self.signalled
        if self._asked is not None:
            return self._asked
        if self._notices is not None and (notice := self._notices.look()) is not None:
            return notice
        now_s = self._clock()
        if is_due(now_s, self._deadline_s, reserve_s := self._reserve() if self._deadline_s is not None else 0.0):
            left_s = max(0.0, (self._deadline_s or 0.0) - now_s)
            detail = f"{amounts.duration(left_s)} left, {amounts.duration(reserve_s)} kept for a last save"
            return StopReason("walltime", detail)
        return self._flag(now_s) if self._reads_flag else None

    def _flag(self, now_s: float) -> StopReason | None:
        last_s = self._looked_at_s
        # A clock that is set back must not close our eyes for an hour.
        if last_s is not None and 0 <= now_s - last_s < self._look_every_s:
            return None
        self._looked_at_s = now_s
        try:
            found = read_request(self._layout, self._files)
        except StorageFailed as refusal:
            # A storage that does not answer this moment is no reason to end a job; the next look asks again.
            if not self._is_refusal_told:
                _log.warning("the flag file could not be looked at: %s; it is tried again every second", refusal)
            self._is_refusal_told = True
            return None
        self._is_refusal_told = False
        if found is None or (found.job is not None and found.job < self._job):
            return None
        return StopReason("flag", f"by {found.by}" if found.by else self._layout.stop_request.name)
