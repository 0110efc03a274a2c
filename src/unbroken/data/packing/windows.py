"""Cut entries into windows: the place and the masked part of each window. No token is read or copied.

Windows of an entry start ``max_length - overlap`` tokens apart. With an overlap of at least one token every token but
the first of an entry follows another one in some window, so that it is trained. Every token after an entry's masked
prefix is fresh (unmasked) in exactly one window; a window without a fresh token is not made, and an entry without one
is dropped and counted. Only the last window of an entry reaches its end, so only it can contain EOD.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# Packing makes a histogram of window lengths: without a bound a typo would allocate terabytes.
MOST_TOKENS: Final = 1 << 24
# An index has two bytes for the masked prefix of an entry.
MOST_PREFIX: Final = (1 << 16) - 1


@dataclass(frozen=True)
class Windows:
    """Windows by entry and start: entry, start in it, length, and number of masked tokens at the start."""

    entry: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    masked: NDArray[np.int64]
    dropped_entries: int


def require_cuttable(max_length: int, overlap: int) -> None:
    """Raise unless windows can have this length and overlap.

    Raises:
        ValueError: windows of fewer than 2 tokens or of too many, or an overlap of more than half a window.
    """
    if max_length < 2:
        raise ValueError(f"max_length is {max_length}; a window has at least 2 tokens")
    if max_length > MOST_TOKENS:
        raise ValueError(f"max_length is {max_length}; a window has at most {MOST_TOKENS} tokens")
    if not 0 <= overlap <= max_length // 2:
        raise ValueError(f"overlap is {overlap}; it lies between 0 and half of max_length {max_length}")


def require_bakeable(max_length: int, overlap: int) -> None:
    """Raise unless windows of this length and overlap can be written into shards.

    Raises:
        ValueError: they cannot be cut, or the overlap is more than an index can hold.
    """
    require_cuttable(max_length, overlap)
    if overlap > MOST_PREFIX:
        # The index would truncate a larger one, and the repeated tokens would be trained twice.
        raise ValueError(f"overlap is {overlap}; an index holds at most {MOST_PREFIX} for a baked window")


def cut(
    lengths: NDArray[np.int64],
    prefixes: NDArray[np.unsignedinteger[Any]],
    max_length: int,
    overlap: int | NDArray[np.int64],
) -> Windows:
    """Cut entries of these lengths, whose first ``prefixes`` tokens are masked, into windows.

    ``overlap`` is one number for all entries, or one for each.

    Raises:
        ValueError: windows of fewer than 2 tokens, or an overlap of more than half a window.
    """
    each_overlap = np.broadcast_to(np.asarray(overlap, np.int64), lengths.shape)
    for bound in (each_overlap.min(initial=max_length // 2), each_overlap.max(initial=0)):
        require_cuttable(max_length, int(bound))
    stride = max_length - each_overlap
    counts = 1 + -(-np.maximum(lengths - max_length, 0) // stride)
    entry = np.repeat(np.arange(lengths.size), counts)
    shared = each_overlap[entry]
    number = np.arange(entry.size) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * stride[entry]
    length = np.minimum(lengths[entry] - start, max_length)
    # A prefix can be longer than its window; the rest of it is masked in the next one.
    masked = np.maximum(prefixes.astype(np.int64)[entry] - start, np.where(number > 0, shared, 0))
    is_fresh = masked < length
    if is_fresh.all():
        return Windows(entry, start, length, masked, 0)
    kept = entry[is_fresh]
    dropped_entries = int(lengths.size - np.count_nonzero(np.diff(kept, prepend=-1)))
    return Windows(kept, start[is_fresh], length[is_fresh], masked[is_fresh], dropped_entries)
