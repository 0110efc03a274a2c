"""What the clouds' answers mean: pure functions from the bytes of an answer to a notice, or none."""

import datetime
import email.utils
from dataclasses import dataclass
from typing import Any, Final, Literal

from unbroken.store.fields import parsed

Cloud = Literal["aws", "gcp", "azure"]
CLOUDS: Final[tuple[Cloud, ...]] = ("aws", "gcp", "azure")
_NAMES: Final[dict[Cloud, str]] = {"aws": "AWS", "gcp": "Google Cloud", "azure": "Azure"}
# The machine goes on 30 s after it is told so; the answer itself names no time.
GCP_WINDOW_S: Final = 30.0
# A Freeze pauses a machine for some seconds and takes nothing away.
_AZURE_ENDS: Final = ("Preempt", "Terminate", "Reboot", "Redeploy")


class Unreadable(ValueError):
    """An answer that is none in the cloud's own form."""


@dataclass(frozen=True)
class Notice:
    """A machine will be taken away: by whom, how, and when, in seconds since 1970, where that is said."""

    cloud: Cloud
    action: str
    at_s: float | None

    def sentence(self) -> str:
        """The notice in words: ``AWS: terminate at 2026-11-15 08:22:00 UTC``."""
        if self.at_s is None:
            return f"{_NAMES[self.cloud]}: {self.action}"
        when = datetime.datetime.fromtimestamp(self.at_s, datetime.UTC)
        return f"{_NAMES[self.cloud]}: {self.action} at {when:%Y-%m-%d %H:%M:%S} UTC"


def read_aws(body: bytes) -> Notice:
    """What ``spot/instance-action`` says; it exists only once there is a notice.

    Raises:
        Unreadable: it has no action or no time.
    """
    found = _document(body)
    action, time = found.get("action"), found.get("time")
    if not isinstance(action, str) or not isinstance(time, str):
        raise Unreadable("the notice has no action or no time")
    try:
        at = datetime.datetime.fromisoformat(time)
    except ValueError:
        raise Unreadable(f"the time of the notice cannot be read: {time[:60]!r}") from None
    return Notice("aws", action, (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp())


def read_gcp(preempted: bytes, maintenance: bytes, *, now_s: float) -> Notice | None:
    """What ``instance/preempted`` and ``instance/maintenance-event`` say; a live migration is no end.

    Raises:
        Unreadable: the first is neither TRUE nor FALSE.
    """
    said = _text(preempted).upper()
    if said not in ("TRUE", "FALSE"):
        raise Unreadable(f"instance/preempted is neither TRUE nor FALSE but {said[:60]!r}")
    if said == "TRUE":
        return Notice("gcp", "preempt", now_s + GCP_WINDOW_S)
    if _text(maintenance).upper().startswith("TERMINATE"):
        return Notice("gcp", "terminate for host maintenance", None)
    return None


def read_azure(body: bytes, machine: str) -> Notice | None:
    """What the scheduled events say about this machine; they tell about its neighbours in the same set too.

    Raises:
        Unreadable: it is no list of events.
    """
    events = _document(body).get("Events")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise Unreadable("the answer has no list of events")
    ends = [event for event in events if event.get("EventType") in _AZURE_ENDS and machine in _resources(event)]
    found = [Notice("azure", str(event["EventType"]).lower(), _azure_time(event.get("NotBefore"))) for event in ends]
    # One that has begun names no time any more: nothing is nearer.
    return min(found, key=lambda notice: notice.at_s or 0.0, default=None)


def _resources(event: dict[str, Any]) -> list[str]:
    named = event.get("Resources")
    # Of a machine in a scale set the name in full ends with its own.
    return [str(each).rpartition("/")[2] for each in named] if isinstance(named, list) else []


def _azure_time(text: object) -> float | None:
    if not isinstance(text, str) or not text:
        return None
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except ValueError:
        raise Unreadable(f"the time of an event cannot be read: {text[:60]!r}") from None


def _document(body: bytes) -> dict[str, Any]:
    try:
        found: Any = parsed(body)
    except ValueError:
        raise Unreadable("the answer is no JSON") from None
    if not isinstance(found, dict):
        raise Unreadable("the answer is no JSON object")
    return found


def _text(body: bytes) -> str:
    return body.decode("ascii", errors="replace").strip()
