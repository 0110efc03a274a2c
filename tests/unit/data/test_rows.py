"""Windows become rows: what stands where, what is learned, and what is left out."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from unbroken.data.packing.bucket_plan import Slots
from unbroken.data.packing.rows import IGNORED, PADDING, Pieces, Rows, cut_pieces, in_order

X = IGNORED
SHARDS = {0: np.arange(100, 140, dtype=np.uint16), 1: np.arange(200, 240, dtype=np.uint16)}


def _views(dtype: type[np.unsignedinteger] = np.uint16) -> dict[int, memoryview]:
    views = {number: memoryview(tokens.astype(dtype).tobytes()) for number, tokens in SHARDS.items()}
    return {**views, PADDING: memoryview(bytes(64))}


def _slots(*rows: list[tuple[int, int, int, int]]) -> Slots:
    """Rows of windows, each (shard, offset, length, masked)."""
    columns = np.array([window for row in rows for window in row], np.int64).reshape(-1, 4).T
    return Slots(np.array([len(row) for row in rows], np.int64), *columns)


def _read(pieces: Pieces, first: int, last: int, dtype: type[np.unsignedinteger] = np.uint16) -> Rows:
    return pieces.rows(first, last, pieces.raw(first, last, _views(dtype)))


def _lists(array: NDArray[np.generic]) -> list[list[int]]:
    found: list[list[int]] = array.tolist()
    return found


@dataclass(frozen=True)
class Case:
    title: str
    windows: list[tuple[int, int, int, int]]
    tokens: list[int]
    labels: list[int]
    doc_ids: list[int]

    def __str__(self) -> str:
        return self.title


CASES = [
    Case("a whole document: its first token follows nothing", [(0, 3, 6, 0)],
         [103, 104, 105, 106, 107, 108], [X, 104, 105, 106, 107, 108], [0, 0, 0, 0, 0, 0]),
    Case("an overlap is masked, and the token behind it is learned", [(0, 3, 6, 2)],
         [103, 104, 105, 106, 107, 108], [X, X, 105, 106, 107, 108], [0, 0, 0, 0, 0, 0]),
    Case("an overlap of one is the first token", [(0, 3, 6, 1)],
         [103, 104, 105, 106, 107, 108], [X, 104, 105, 106, 107, 108], [0, 0, 0, 0, 0, 0]),
    Case("the token after a document's end begins another", [(0, 0, 2, 0), (1, 5, 4, 0)],
         [100, 101, 205, 206, 207, 208], [X, 101, X, 206, 207, 208], [0, 0, 1, 1, 1, 1]),
    Case("an overlap in the middle of a row", [(0, 0, 2, 0), (1, 5, 4, 3)],
         [100, 101, 205, 206, 207, 208], [X, 101, X, X, X, 208], [0, 0, 1, 1, 1, 1]),
    Case("padding is no document and is not learned", [(0, 0, 2, 0), (1, 5, 1, 0)],
         [100, 101, 205, 0, 0, 0], [X, 101, X, X, X, X], [0, 0, 1, -1, -1, -1]),
    Case("one token of padding", [(0, 0, 5, 0)],
         [100, 101, 102, 103, 104, 0], [X, 101, 102, 103, 104, X], [0, 0, 0, 0, 0, -1]),
    Case("documents of one token", [(0, 0, 1, 0), (0, 7, 1, 0), (1, 0, 4, 0)],
         [100, 107, 200, 201, 202, 203], [X, X, X, 201, 202, 203], [0, 1, 2, 2, 2, 2]),
]  # fmt: skip


@pytest.mark.promise("G15", "G16")
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_has_its_tokens_its_labels_and_its_documents(case: Case, dtype: type[np.unsignedinteger]) -> None:
    pieces = cut_pieces(_slots(case.windows), max_length=6, token_bytes=np.dtype(dtype).itemsize)
    rows = _read(pieces, 0, 1, dtype)
    assert (_lists(rows.tokens), _lists(rows.labels), _lists(rows.doc_ids)) == (
        [case.tokens],
        [case.labels],
        [case.doc_ids],
    )
    assert [rows.tokens.dtype.name, rows.labels.dtype.name, rows.doc_ids.dtype.name] == ["int64", "int64", "int32"]


def test_any_rows_of_many_are_those_they_would_be_alone() -> None:
    pieces = cut_pieces(_slots(*(case.windows for case in CASES)), max_length=6, token_bytes=2)
    for first in range(len(CASES)):
        for last in range(first + 1, len(CASES) + 1):
            rows = _read(pieces, first, last)
            assert _lists(rows.tokens) == [case.tokens for case in CASES[first:last]]
            assert _lists(rows.labels) == [case.labels for case in CASES[first:last]]
            assert _lists(rows.doc_ids) == [case.doc_ids for case in CASES[first:last]]


def test_windows_looked_up_in_parts_stand_in_the_order_of_their_rows() -> None:
    rows = [case.windows for case in CASES]
    parts = [
        (np.array(members, np.int64), _slots(*(rows[member] for member in members)))
        for members in ([6, 1], [0, 2, 7], [5, 4, 3])
    ]
    whole, found = _slots(*rows), in_order(parts, len(rows))
    for name in ("counts", "shard", "offset", "length", "masked"):
        assert getattr(found, name).tolist() == getattr(whole, name).tolist()


def test_rows_can_be_changed_without_changing_what_they_were_read_from() -> None:
    pieces = cut_pieces(_slots(CASES[0].windows), max_length=6, token_bytes=2)
    rows = _read(pieces, 0, 1)
    rows.tokens[:] = 7
    assert _lists(rows.labels) == [CASES[0].labels] and _lists(_read(pieces, 0, 1).tokens) == [CASES[0].tokens]
