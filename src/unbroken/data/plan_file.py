"""The bytes of plans: one binary table for each group, one small summary for a bucket.

Both prove themselves by a digest over all that follows it, so that a reader can tell a whole file from a torn, flipped
or foreign one; what does not prove itself is ``PlanDamaged`` and can be built again from the shards.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unbroken.data.groups import Group, Span
from unbroken.data.pack import Layout
from unbroken.store.digest import DIGEST_BYTES, HEX_LENGTH, digest_bytes

FORMAT: Final = 1
_MAGIC: Final = b"UNBPLAN1"
_HEADER: Final = struct.Struct("<9q")
_BODY: Final = len(_MAGIC) + DIGEST_BYTES
_WORD: Final[np.dtype[Any]] = np.dtype("<i8")
_UNSIGNED: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}

Unsigned = NDArray[np.unsignedinteger[Any]]


class PlanDamaged(Exception):
    """A cached plan does not prove itself; nothing is lost, for it is built again."""


@dataclass(frozen=True)
class Counts:
    """How much a plan has."""

    sequences: int
    windows: int
    fresh_tokens: int
    masked_tokens: int
    dropped_entries: int


@dataclass(frozen=True)
class GroupPlan:
    """One group packed: its windows, longest first, and the strategies that lay them into sequences.

    ``position`` counts tokens over the group's spans laid end to end.
    """

    counts: Counts
    layout: Layout
    position: Unsigned
    masked: Unsigned


def narrowest(largest: int, *, from_bytes: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds a number."""
    return next(_UNSIGNED[size] for size in sorted(_UNSIGNED) if size >= from_bytes and largest < 1 << 8 * size)


def encode_plan(plan: GroupPlan) -> bytes:
    """The bytes of one group's plan."""
    layout = plan.layout
    header = _HEADER.pack(
        *astuple(plan.counts),
        layout.base.size,
        layout.cumulative.size,
        plan.position.dtype.itemsize,
        plan.masked.dtype.itemsize,
    )
    words = (layout.base, layout.length, layout.first, layout.cumulative)
    parts = [header, *(array.astype(_WORD, copy=False).tobytes() for array in words)]
    parts += [
        array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in (plan.position, plan.masked)
    ]
    body = b"".join(parts)
    return _MAGIC + digest_bytes(body) + body


def decode_plan(data: memoryview) -> GroupPlan:
    """One group's plan as arrays over its bytes.

    Raises:
        PlanDamaged: the bytes are not those of a whole plan.
    """
    if len(data) < _BODY + _HEADER.size or bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise PlanDamaged("it is too short, or no plan")
    if bytes(data[len(_MAGIC) : _BODY]) != digest_bytes(data[_BODY:]):
        raise PlanDamaged("its digest is another")
    *counts, slots, bounds, position_bytes, masked_bytes = _HEADER.unpack(data[_BODY : _BODY + _HEADER.size])
    found = Counts(*counts)
    kinds = [(_WORD, slots), (_WORD, slots), (_WORD, bounds), (_WORD, bounds)]
    kinds += [(_UNSIGNED[position_bytes], found.windows), (_UNSIGNED[masked_bytes], found.windows)]
    base, length, first, cumulative, position, masked = _arrays(data[_BODY + _HEADER.size :], kinds)
    return GroupPlan(found, Layout(base, length, first, cumulative), position, masked)


def _arrays(data: memoryview, kinds: Iterable[tuple[np.dtype[Any], int]]) -> list[NDArray[Any]]:
    arrays, start = [], 0
    for dtype, size in kinds:
        arrays.append(np.frombuffer(data, dtype, count=size, offset=start) if size else np.empty(0, dtype))
        start += dtype.itemsize * size
    return arrays


@dataclass(frozen=True)
class GroupSummary:
    """One group as a bucket's summary has it: its spans, where its plan is kept, what the plan has."""

    spans: Group
    digest: str
    counts: Counts


def encode_summary(groups: Sequence[GroupSummary]) -> bytes:
    """The bytes of a bucket's summary: a digest, a line end, and JSON."""
    rows = [[group.digest, [astuple(span) for span in group.spans], astuple(group.counts)] for group in groups]
    body = json.dumps({"schema": f"unbroken.plan/{FORMAT}", "groups": rows}, separators=(",", ":")).encode()
    return digest_bytes(body).hex().encode() + b"\n" + body


def decode_summary(data: bytes) -> list[GroupSummary]:
    """The groups of a bucket.

    Raises:
        PlanDamaged: the bytes are not those of a whole summary.
    """
    body = data[HEX_LENGTH + 1 :]
    if data[: HEX_LENGTH + 1] != digest_bytes(body).hex().encode() + b"\n":
        raise PlanDamaged("its digest is another")
    rows = json.loads(body)["groups"]
    return [
        GroupSummary(tuple(Span(*span) for span in spans), digest, Counts(*counts)) for digest, spans, counts in rows
    ]
