"""One thing that was looked at, and what was found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

# The kinds with a page of their own. Others are kinds of errors, which have theirs.
KINDS: Final = frozenset(
    {
        *("clock-differs", "gloo-unreachable", "gpu-missing", "in-container", "in-memory", "no-directory-fsync"),
        *("no-hard-links", "no-symlinks", "not-a-directory", "not-measured", "not-writable", "rename-broken"),
        *("python-untested", "self-test-unfinished", "torch-broken", "torch-untested"),
    }
)


class Severity(Enum):
    """How much a finding matters."""

    OK = "ok"
    # Worth knowing: something works in another way, or is not as good as it could be.
    NOTE = "note"
    # Training, saving or exactness does not work here.
    PROBLEM = "problem"


@dataclass(frozen=True)
class CheckResult:
    """What was found about one subject.

    Attributes:
        subject: what was looked at, in one or two words.
        text: what is true, in one sentence.
        level: how much it matters.
        kind: the page of ``unbroken explain`` about it; None if all is well.
        details: further sentences.
        values: the same as numbers and names, for JSON.
    """

    subject: str
    text: str
    level: Severity = Severity.OK
    kind: str | None = None
    details: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


def note(subject: str, kind: str, text: str, *details: str, **values: Any) -> CheckResult:  # noqa: ANN401 -- JSON is any
    """A finding that is worth knowing."""
    return CheckResult(subject, text, Severity.NOTE, kind, details, values)


def problem(subject: str, kind: str, text: str, *details: str, **values: Any) -> CheckResult:  # noqa: ANN401
    """A finding that must be dealt with."""
    return CheckResult(subject, text, Severity.PROBLEM, kind, details, values)
