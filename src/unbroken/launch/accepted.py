"""Changes accepted with ``--accept``: which names are valid, which are still unsaved, and the record of all of them.

An unknown name is an error before anything is started: a typo would otherwise show only when the change is rejected,
or never, if nothing has changed yet. ``accepted.json`` in the run directory records each accepted value.
"""

import difflib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from unbroken.config import Config
from unbroken.config.document import all_fields
from unbroken.config.fields import ResumeClass
from unbroken.errors import AcceptUnknown, RunRecordDamaged
from unbroken.files import LOCAL, Files
from unbroken.records.journal import Event, History
from unbroken.records.layout import Layout
from unbroken.store.envelope import opened, sealed
from unbroken.store.fields import Malformed, Table
from unbroken.store.names import scratch

# Fields of the numerics record of a checkpoint, on a CPU or on a GPU.
ARITHMETIC: Final = (
    *("lanes", "seed", "compute_dtype", "reduction"),
    *("torch", "torch_build", "device", "machine", "deterministic", "default_dtype", "inductor_deterministic"),
    *("instructions", "threads", "mkldnn"),
    *("gpu", "capability", "cuda", "hip", "cudnn", "cublas_workspace", "tf32_override", "matmul_fp32", "conv_fp32"),
    *("matmul_bf16_reduced", "matmul_fp16_reduced", "cudnn_benchmark", "cudnn_deterministic", "attention"),
)
# Items of a checkpoint; names below these are tensors.
ITEMS: Final = ("model", "optimizer", "ema", "scaler", "arithmetic", "data", "rng_state")
GROW: Final = "data.grow"
# Accepted if config.json is missing: the run continues with the config of the job.
CONFIG: Final = "config.json"
_TENSORS: Final = ("model.", "optimizer.", "ema.")
_NEAREST: Final = 3


def require_known(accept: Collection[str], tensors: Iterable[str] | None = None) -> None:
    """Pass if every name is one that can change.

    Args:
        accept: the names.
        tensors: the names of all tensors; None if not known yet, then any tensor name passes.

    Raises:
        AcceptUnknown: some are unknown; similar names are suggested.
    """
    known = {*all_fields(), *ARITHMETIC, *ITEMS, GROW, CONFIG}
    if tensors is not None:
        known |= {above for name in tensors for above in _above(name)}
    unknown = [
        name
        for name in dict.fromkeys(accept)
        if name not in known and not (tensors is None and name.startswith(_TENSORS))
    ]
    if unknown:
        names = sorted(known)
        nearest = ((name, tuple(difflib.get_close_matches(name, names, n=_NEAREST))) for name in unknown)
        raise AcceptUnknown(names=tuple(nearest))


def still_accepted(events: Sequence[Event]) -> tuple[str, ...]:
    """The names that earlier jobs accepted since the last commit.

    A job that is killed before it saves leaves the checkpoint unchanged, so its accepted changes stay accepted. From
    the next commit on the checkpoint holds the new state.
    """
    names: dict[str, None] = {}
    for event in events:
        listed, unmet = event.values.get("names"), event.values.get("unused")
        if event.kind == "accept" and isinstance(listed, list) and isinstance(unmet, list):
            names |= dict.fromkeys(name for name in listed if isinstance(name, str) and name not in unmet)
        elif event.kind in ("commit", "emergency-resume") or (event.kind == "resume" and event.values.get("abandoned")):
            names.clear()
    return tuple(names)


def _above(name: str) -> list[str]:
    """The name of a tensor and of all its parents."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


# ---- accepted.json ----

_FORMAT: Final = "unbroken.accepted/1"
_LIMIT_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class AcceptedValue:
    """One changed field: old and new value as JSON, and the job and step from which the new one applies."""

    field: str
    was: Any
    now: Any
    job: int
    step: int


def values_of(history: Iterable[AcceptedValue]) -> dict[str, Any]:
    """The current value of each field that was ever changed."""
    return {change.field: change.now for change in history}


def read_accepted(layout: Layout, files: Files = LOCAL) -> tuple[AcceptedValue, ...] | None:
    """All changes, oldest first; None if there is no record.

    Raises:
        RunRecordDamaged: the record is damaged, or was changed after it was written.
        StorageFailed: it could not be read.
    """
    path = layout.accepted
    if files.find(path) is None:
        return None
    found = opened(files.read_bytes(path, limit_bytes=_LIMIT_BYTES))
    if found is None or not found.is_verified or found.form != _FORMAT:
        raise RunRecordDamaged(
            path=path, complaint=f"it is not a {_FORMAT} record, or was changed after it was written"
        )
    try:
        rows = Table(json.loads(found.body), path.name).rows("changes")
        return tuple(_decoded(row) for row in rows)
    except (ValueError, RecursionError, Malformed) as wrong:
        raise RunRecordDamaged(path=path, complaint=" ".join(str(wrong).split())[:120]) from wrong


def rebuild_accepted(started: Config, history: History) -> tuple[AcceptedValue, ...]:
    """The same changes rebuilt from the journal, for a run without ``accepted.json``; ``started`` is its config.

    Each job journals all fields in which it differs from ``config.json``. A declared field is among them only if it
    was accepted; one that is no longer among them is back at its first value.
    """
    values, found = started.values(), list[AcceptedValue]()
    for event in history.of_kind("config"):
        if event.values.get("is_replaced"):
            # A start from scratch with a new config.
            found.clear()
            continue
        resumed = history.last("resume", job=event.job)
        step = (resumed.whole("step") if resumed is not None else None) or 0
        before, after = values_of(found), _declared(event, values)
        for field in dict.fromkeys((*before, *after)):
            section, _, name = field.partition(".")
            first = values[section][name]
            was, now = before.get(field, first), after.get(field, first)
            if was != now:
                found.append(AcceptedValue(field, was, now, event.job, step))
    return tuple(found)


def _declared(event: Event, values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The declared fields of a job whose values differ from ``values``, those of ``config.json``."""
    listed, fields = event.values.get("changes"), all_fields()
    found: dict[str, Any] = {}
    for name, pair in listed.items() if isinstance(listed, dict) else ():
        field = fields.get(name)
        if field is None or field.declaration.resume is not ResumeClass.DECLARED:
            continue
        if isinstance(pair, list) and len(pair) == 2 and pair[0] == values[field.section][field.name]:
            found[name] = pair[1]
    return found


def write_accepted(layout: Layout, history: Sequence[AcceptedValue], files: Files = LOCAL) -> None:
    """Replace the record.

    Raises:
        StorageFailed: it could not be written; the old record is intact.
    """
    # ASCII, as config.json: a path that is not UTF-8 contains lone surrogates.
    body = json.dumps({"changes": [asdict(change) for change in history]}, sort_keys=True, allow_nan=False).encode()
    # crash here: the old record or the new one; no step has been computed with the new values yet.
    files.replace(layout.accepted, sealed(body, _FORMAT), scratch=scratch("trainer", "accepted"))


def _decoded(row: Table) -> AcceptedValue:
    was, now = row.any("was"), row.any("now")
    return AcceptedValue(row.text("field"), was, now, row.whole("job"), row.whole("step"))
