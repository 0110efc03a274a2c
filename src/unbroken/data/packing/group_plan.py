"""The plan of one group: entries cut into windows, windows packed into sequences; and its file format."""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unbroken.data.corpus.shards import open_index
from unbroken.data.order.keyed import Permutation, subkey
from unbroken.data.packing.best_fit import BinLayout, best_fit, lay_out, one_each
from unbroken.data.packing.groups import Counted, Group, OpenIndex, Span
from unbroken.data.packing.windows import Windows, cut
from unbroken.store.digest import DIGEST_BYTES, HEX_LENGTH, digest_bytes

# ---- the bytes of a plan ----

FORMAT: Final = 1
_MAGIC: Final = b"UNBPLAN1"
_HEADER: Final = struct.Struct("<9q")
_BODY: Final = len(_MAGIC) + DIGEST_BYTES
_WORD: Final[np.dtype[Any]] = np.dtype("<i8")
_UNSIGNED: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}

Unsigned = NDArray[np.unsignedinteger[Any]]


class PlanDamaged(Exception):
    """A cached plan is damaged; it is rebuilt."""


@dataclass(frozen=True)
class Counts:
    """The counts of a plan."""

    sequences: int
    windows: int
    fresh_tokens: int
    masked_tokens: int
    dropped_entries: int


@dataclass(frozen=True)
class GroupPlan:
    """One packed group: its windows, longest first, and the strategies that place them into sequences.

    ``position`` counts tokens over the group's spans laid end to end.
    """

    counts: Counts
    layout: BinLayout
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
        raise PlanDamaged("it is too short, or not a plan")
    if bytes(data[len(_MAGIC) : _BODY]) != digest_bytes(data[_BODY:]):
        raise PlanDamaged("its digest is another")
    *counts, slots, bounds, position_bytes, masked_bytes = _HEADER.unpack(data[_BODY : _BODY + _HEADER.size])
    found = Counts(*counts)
    kinds = [(_WORD, slots), (_WORD, slots), (_WORD, bounds), (_WORD, bounds)]
    kinds += [(_UNSIGNED[position_bytes], found.windows), (_UNSIGNED[masked_bytes], found.windows)]
    base, length, first, cumulative, position, masked = _arrays(data[_BODY + _HEADER.size :], kinds)
    return GroupPlan(found, BinLayout(base, length, first, cumulative), position, masked)


def _arrays(data: memoryview, kinds: Iterable[tuple[np.dtype[Any], int]]) -> list[NDArray[Any]]:
    arrays, start = [], 0
    for dtype, size in kinds:
        arrays.append(np.frombuffer(data, dtype, count=size, offset=start) if size else np.empty(0, dtype))
        start += dtype.itemsize * size
    return arrays


@dataclass(frozen=True)
class GroupSummary:
    """One group in a bucket's summary: its spans, the name of its plan, its counts."""

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


# ---- building one ----

_TIES: Final = subkey(0, "windows of one length")


@dataclass(frozen=True)
class Recipe:
    """The settings that decide a plan, besides the shards."""

    max_length: int
    overlap: int
    packing: bool

    @property
    def stride(self) -> int:
        """Tokens from window to window of an entry."""
        return self.max_length - self.overlap

    def digest_of(self, purpose: str, ingredients: Iterable[object]) -> str:
        """A digest of the settings and of ``ingredients``, as a file name."""
        return digest_bytes(json.dumps([purpose, FORMAT, astuple(self), list(ingredients)]).encode()).hex()


def build_group(group: Group, shards: Sequence[Counted], recipe: Recipe, index_of: OpenIndex = open_index) -> GroupPlan:
    """Cut and pack the entries of one group.

    Raises:
        ShardDamaged: an index is damaged.
        StorageFailed: an I/O error.
    """
    begins, lengths, prefixes, before = [], [], [], 0
    for span in group:
        index = index_of(shards[span.shard].idx_path)
        offsets = index.offsets(span.first, span.last)
        begins.append(offsets[:-1] + (before - span.start_token))
        lengths.append(np.diff(offsets))
        prefixes.append(index.prefixes(span.first, span.last))
        before += span.tokens
    windows = cut(np.concatenate(lengths), np.concatenate(prefixes), recipe.max_length, recipe.overlap)
    position = np.concatenate(begins)[windows.entry] + windows.start
    return _packed(windows, position, before, recipe)


def _packed(windows: Windows, position: NDArray[np.int64], tokens: int, recipe: Recipe) -> GroupPlan:
    histogram = np.bincount(windows.length, minlength=recipe.max_length + 1)
    strategies = best_fit(histogram, recipe.max_length) if recipe.packing else one_each(histogram)
    masked_tokens = int(windows.masked.sum())
    counts = Counts(
        sequences=sum(strategy.sequences for strategy in strategies),
        windows=windows.length.size,
        fresh_tokens=int(windows.length.sum()) - masked_tokens,
        masked_tokens=masked_tokens,
        dropped_entries=windows.dropped_entries,
    )
    order = longest_first(windows.length, recipe.max_length)
    return GroupPlan(
        counts,
        lay_out(strategies, histogram),
        position[order].astype(narrowest(tokens, from_bytes=4)),
        windows.masked[order].astype(narrowest(recipe.max_length, from_bytes=2)),
    )


def longest_first(lengths: NDArray[np.int64], max_length: int) -> NDArray[np.int64]:
    """The windows by length, the longest first, those of one length in a keyed order.

    The order of ties keeps neighbours in a shard from ending up side by side in every sequence. The sort is stable, so
    every machine and every version of NumPy gives the same result.
    """
    if not lengths.size:
        return np.empty(0, np.int64)
    shuffled = Permutation(lengths.size, _TIES)(np.arange(lengths.size))
    shortfall = (max_length - lengths[shuffled]).astype(narrowest(max_length, from_bytes=2))
    return shuffled[np.argsort(shortfall, kind="stable")]
