"""Rows of a batch from packed windows: tokens, labels and document ids.

``cut_pieces`` lays the windows of each row end to end and pads it, ``Pieces`` copies their bytes out of the
memory-mapped shards and builds the arrays, and ``TokenMaps`` keeps a bounded number of shards mapped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from unbroken.data.corpus.catalogue import Shard
from unbroken.data.corpus.shards import map_tokens
from unbroken.data.packing.bucket_plan import Slots

IGNORED: Final = -100
PADDING: Final = -1  # the shard number of padding (zeros) and the document number of padding
_slice_of: Final = cast("Callable[[memoryview, slice], memoryview]", getitem)
_TOKENS: Final[Mapping[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


@dataclass(frozen=True)
class Rows:
    """Whole sequences as arrays of ``[rows, max_length]``: tokens, labels, and each token's document, -1 on padding."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    doc_ids: NDArray[np.int32]


@dataclass(frozen=True)
class Pieces:
    """The pieces of many rows, ready to be copied; every row is filled to its last token.

    Attributes:
        bounds: the first piece of each row, and the end of the last.
        shards: the shard of each piece.
        begins: its first byte in the shard.
        ends: the byte after its last one.
        numbers: the number of its document in the row.
        lengths: its tokens.
        starts: its first token, counted over all rows.
        veil_bounds: the first of the veils of each row, and the end of the last.
        veil_starts: the first token of what is masked at the start of a piece, where that is more than one token.
        veil_stops: the token behind it.
    """

    max_length: int
    token_bytes: int
    bounds: list[int]
    shards: list[int]
    begins: list[int]
    ends: list[int]
    numbers: NDArray[np.int32]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    mask_bounds: list[int]
    mask_starts: list[int]
    mask_stops: list[int]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def raw(self, first: int, last: int, views: Mapping[int, memoryview]) -> bytes:
        """The bytes of the rows ``first`` to ``last``, as the shards hold them."""
        begin, end = self.bounds[first], self.bounds[last]
        # Slices are created as they are used: keeping thousands of them would trigger the garbage collector repeatedly.
        cuts = map(slice, self.begins[begin:end], self.ends[begin:end])
        return b"".join(map(_slice_of, map(views.__getitem__, self.shards[begin:end]), cuts))

    def rows(self, first: int, last: int, raw: bytes) -> Rows:
        """The rows ``first`` to ``last`` from their bytes."""
        begin, end = self.bounds[first], self.bounds[last]
        base, shape = first * self.max_length, (last - first, self.max_length)
        tokens = np.frombuffer(raw, _TOKENS[self.token_bytes]).astype(np.int64)
        labels = tokens.copy()
        labels[self.starts[begin:end] - base] = IGNORED
        for mask in range(self.mask_bounds[first], self.mask_bounds[last]):
            labels[self.mask_starts[mask] - base : self.mask_stops[mask] - base] = IGNORED
        doc_ids = np.repeat(self.numbers[begin:end], self.lengths[begin:end])
        return Rows(tokens.reshape(shape), labels.reshape(shape), doc_ids.reshape(shape))


def cut_pieces(slots: Slots, *, max_length: int, token_bytes: int) -> Pieces:
    """Lay windows end to end, with padding at the end of each row that is not full."""
    counts = slots.counts
    row = np.repeat(np.arange(len(counts)), counts)
    lacking = max_length - _sums(slots.length, counts)
    is_short = lacking > 0
    last = np.cumsum(counts + is_short)
    # Every earlier short row shifts a window by one piece, for its padding.
    places = np.arange(len(row)) + (np.cumsum(is_short) - is_short)[row]
    padded = _Places(places, last[is_short] - 1, len(row) + int(is_short.sum()))
    lengths = padded.fill(slots.length, lacking[is_short])
    starts = np.cumsum(lengths) - lengths
    offsets = padded.fill(slots.offset, 0) * token_bytes
    masked = padded.fill(slots.masked, lacking[is_short])
    masked_pieces = np.flatnonzero(masked > 1)
    bounds = np.concatenate([np.zeros(1, np.int64), last])
    return Pieces(
        max_length=max_length,
        token_bytes=token_bytes,
        bounds=bounds.tolist(),
        shards=padded.fill(slots.shard, PADDING).tolist(),
        begins=offsets.tolist(),
        ends=(offsets + lengths * token_bytes).tolist(),
        numbers=padded.fill(np.arange(len(row)) - (np.cumsum(counts) - counts)[row], PADDING).astype(np.int32),
        lengths=lengths,
        starts=starts,
        mask_bounds=np.searchsorted(masked_pieces, bounds).tolist(),
        mask_starts=starts[masked_pieces].tolist(),
        mask_stops=(starts + masked)[masked_pieces].tolist(),
    )


@dataclass(frozen=True)
class _Places:
    """The indexes of windows and padding among all pieces."""

    windows: NDArray[np.int64]
    padding: NDArray[np.int64]
    total: int

    def fill(self, values: NDArray[np.int64], padding: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """One value per piece."""
        filled = np.empty(self.total, np.int64)
        filled[self.windows] = values
        filled[self.padding] = padding
        return filled


def _sums(values: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of each row's values."""
    upto = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    ends = np.cumsum(counts)
    sums: NDArray[np.int64] = upto[ends] - upto[ends - counts]
    return sums


def in_order(parts: list[tuple[NDArray[np.int64], Slots]], rows: int) -> Slots:
    """Windows looked up in parts, in the order of rows; each part names its rows."""
    counts = np.empty(rows, np.int64)
    for members, slots in parts:
        counts[members] = slots.counts
    first = np.cumsum(counts) - counts
    total = int(counts.sum())
    shard, offset, length, masked = (np.empty(total, np.int64) for _ in range(4))
    for members, slots in parts:
        before = np.cumsum(slots.counts) - slots.counts
        places = np.arange(len(slots.shard)) + np.repeat(first[members] - before, slots.counts)
        shard[places], offset[places] = slots.shard, slots.offset
        length[places], masked[places] = slots.length, slots.masked
    return Slots(counts, shard, offset, length, masked)


# ---- mapped shards ----

# A map holds a file open, and many systems allow a process no more than 1,024.
MOST: Final = 256


class TokenMaps(dict[int, memoryview]):
    """A view of each shard's bytes by number; a missing one is mapped, and the oldest is dropped.

    A hit costs a plain dict look-up. A slice of a view keeps its map alive.
    """

    def __init__(self, shards: Sequence[Shard], max_length: int) -> None:
        super().__init__()
        self._shards = shards
        self._zeros = memoryview(bytes(max_length * max((shard.token_bytes for shard in shards), default=0)))

    def __missing__(self, number: int) -> memoryview:
        if number == PADDING:
            view = self._zeros
        else:
            shard = self._shards[number]
            view = map_tokens(shard.bin_path, shard.index).data.cast("B")
        while len(self) >= MOST:
            del self[next(iter(self))]
        self[number] = view
        return view
