"""Why a job ends, and the flag file by which it is asked to: what whoever asks and whoever is asked agree on."""

import errno
import json
from dataclasses import dataclass
from typing import Any, Final, Literal

from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.run.layout import Layout
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
