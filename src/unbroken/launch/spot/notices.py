"""Parsing the responses of the metadata services into notices: pure functions."""

import datetime
import email.utils
from dataclasses import dataclass
from typing import Any, Final, Literal

from unbroken.store.fields import parsed

Cloud = Literal["aws", "gcp", "azure"]
CLOUDS: Final[tuple[Cloud, ...]] = ("aws", "gcp", "azure")
_NAMES: Final[dict[Cloud, str]] = {"aws": "AWS", "gcp": "Google Cloud", "azure": "Azure"}
# The machine is stopped 30 s after the notice; the response has no time.
GCP_WINDOW_S: Final = 30.0
# Not Freeze, which pauses a machine for some seconds.
_AZURE_ENDS: Final = ("Preempt", "Terminate", "Reboot", "Redeploy")


class Unreadable(ValueError):
    """A response that is not in the documented form."""


@dataclass(frozen=True)
class Notice:
    """A machine will be taken away: by which cloud, how, and when, in seconds since 1970, if known."""

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
    """Parse ``spot/instance-action``, which exists only once there is a notice.

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
        raise Unreadable(f"cannot parse the time of the notice: {time[:60]!r}") from None
    return Notice("aws", action, (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp())


def read_gcp(preempted: bytes, maintenance: bytes, *, now_s: float) -> Notice | None:
    """Parse ``instance/preempted`` and ``instance/maintenance-event``; a live migration is not a notice.

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
    """Parse the scheduled events of this machine; the list also has those of other machines in the same set.

    Raises:
        Unreadable: it is not a list of events.
    """
    events = _document(body).get("Events")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise Unreadable("the response has no list of events")
    ends = [event for event in events if event.get("EventType") in _AZURE_ENDS and machine in _resources(event)]
    found = [Notice("azure", str(event["EventType"]).lower(), _azure_time(event.get("NotBefore"))) for event in ends]
    # An event in progress has no time any more: it comes first.
    return min(found, key=lambda notice: notice.at_s or 0.0, default=None)


def _resources(event: dict[str, Any]) -> list[str]:
    named = event.get("Resources")
    # In a scale set the full name ends with the name of the machine.
    return [str(each).rpartition("/")[2] for each in named] if isinstance(named, list) else []


def _azure_time(text: object) -> float | None:
    if not isinstance(text, str) or not text:
        return None
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except ValueError:
        raise Unreadable(f"cannot parse the time of an event: {text[:60]!r}") from None


def _document(body: bytes) -> dict[str, Any]:
    try:
        found: Any = parsed(body)
    except ValueError:
        raise Unreadable("the response is not JSON") from None
    if not isinstance(found, dict):
        raise Unreadable("the response is not a JSON object")
    return found


def _text(body: bytes) -> str:
    return body.decode("ascii", errors="replace").strip()
