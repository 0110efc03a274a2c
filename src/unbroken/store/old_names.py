"""Names that earlier versions wrote to disk, and what each is called today: one table per schema.

Only today's names are written. A reader passes what it has parsed through ``updated`` (or an event of the journal
through ``updated_event``) before it looks at a field, so that no other code knows an old name. A name that was given up
is never used again with another meaning, because the lines of a journal carry no version.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from unbroken.store.fields import Malformed

# Where in the document, the old name, the name of today; "*" is every row of a list. Applied in order.
_Renames = Sequence[tuple[str, str, str]]

_SCHEMAS: Final[Mapping[str, tuple[str, _Renames]]] = {
    "unbroken.checkpoint/1": (
        "unbroken.checkpoint/2",
        (
            ("", "facts", "metadata"),
            ("metadata", "world", "world_size"),
            ("metadata.emergency", "world", "world_size"),
        ),
    ),
    "unbroken.trainer-state/1": (
        "unbroken.trainer-state/2",
        (
            ("", "world", "world_size"),
            ("", "ranked", "per_rank"),
            ("per_rank", "generators", "rng_state"),
            ("values", "generators", "rng_state"),
        ),
    ),
    "unbroken.rank-state/1": ("unbroken.rank-state/2", (("values", "generators", "rng_state"),)),
    "unbroken.emergency/1": (
        "unbroken.emergency/2",
        (
            ("", "world", "world_size"),
            ("", "held", "tensors"),
            ("", "places", "locations"),
            ("", "own_values", "rank_values"),
            ("", "copies", "replica_digests"),
            ("", "sums", "fingerprint_sums"),
            ("", "share", "unreported_samples"),
            ("", "shares_generators", "shares_rng"),
            ("values", "generators", "rng_state"),
        ),
    ),
    "unbroken.emergency-pointer/1": ("unbroken.emergency-pointer/2", (("", "world", "world_size"),)),
    "unbroken.rewind/1": ("unbroken.rewind/2", (("", "asked", "requested"),)),
    "unbroken.stream/1": ("unbroken.stream/2", (("eras.*", "on_dry", "on_exhausted"),)),
}

_EVENT_KINDS: Final[Mapping[str, str]] = {
    "passed-over": "checkpoint-skipped",
    "skipped": "step-skipped",
    "let-go": "grace-too-short",
    "emergency-mirror": "emergency-copy",
}
# By the kind of today.
_EVENT_FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    "job-start": {"world": "world_size"},
    "resume": {"set_aside": "abandoned", "asked": "requested"},
    "accept": {"without_difference": "unused"},
    "commit": {"blocked_s": "paused_s"},
    "emergency-save": {"why": "reason"},
    "grace-too-short": {"left_s": "remaining_s"},
    "job-end": {"verdict": "class"},
}


def updated(value: Any, schema: str | None = None) -> Any:  # noqa: ANN401 -- whatever JSON held
    """A parsed document under the names of today; ``schema`` is its schema where the document does not hold it.

    A document of today, of an unknown schema, or that is not an object, is returned as it is.

    Raises:
        Malformed: it is of an old schema and has a name of today.
    """
    if not isinstance(value, dict):
        return value
    found = value.get("schema") if schema is None else schema
    if not isinstance(found, str) or found not in _SCHEMAS:
        return value
    today, renames = _SCHEMAS[found]
    for where, old, new in renames:
        value = _renamed(value, where.split(".") if where else [], old, new)
    return {**value, "schema": today} if "schema" in value else value


def updated_event(kind: str, fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind and the fields of a journal's event under the names of today; where both are there, today's counts."""
    kind = _EVENT_KINDS.get(kind, kind)
    names = _EVENT_FIELDS.get(kind, {})
    return kind, {names.get(name, name): value for name, value in fields.items() if names.get(name) not in fields}


def _renamed(value: Any, path: Sequence[str], old: str, new: str) -> Any:  # noqa: ANN401
    if path:
        head, *rest = path
        if head == "*" and isinstance(value, list):
            return [_renamed(each, rest, old, new) for each in value]
        if isinstance(value, dict) and head in value:
            return {**value, head: _renamed(value[head], rest, old, new)}
        return value
    if isinstance(value, list):
        return [new if each == old else each for each in value]
    if not isinstance(value, dict):
        return value
    if new in value:
        raise Malformed(f"it has {new!r}, which its format does not have")
    return {new if name == old else name: each for name, each in value.items()}
