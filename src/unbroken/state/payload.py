"""Tensors to parts and back: the payload of a checkpoint.

A rank writes its pieces into files of its own, each piece as a blob that stock tools load; the copies staged in host
memory go to the kernel as they are, digested on the way. What it wrote, and where each piece lies, it reports to rank
0, which describes the whole (``description.py``).
"""

import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch

from unbroken.state.container import container
from unbroken.state.index import ALIGNMENT_BYTES, DTYPES, INDEX_PART, Box
from unbroken.state.pieces import LARGE_BYTES, SavePlan, number_of_files, part_name, plan_save
from unbroken.state.planners import Piece
from unbroken.state.read import read, read_index
from unbroken.state.stage import Staged, StagedPiece
from unbroken.store.commit import PartWriter
from unbroken.store.digest import BLOCK_BYTES
from unbroken.store.manifest import Part

__all__ = [
    "INDEX_PART",
    "METADATA_PART",
    "Location",
    "SavePlan",
    "WriteReport",
    "Written",
    "plan_save",
    "planned_parts",
    "read",
    "read_index",
    "share_out",
    "write",
    "write_bundles",
]

METADATA_PART: Final = "state/.metadata"


@dataclass(frozen=True)
class Location:
    """Where one piece lies: its blob in a part, and its elements in the blob."""

    part: str
    blob_at: int
    blob_bytes: int
    at: int


@dataclass(frozen=True)
class Written:
    """What one rank has written: the evidence for a commit, and where each piece lies."""

    parts: tuple[Part, ...]
    places: Mapping[tuple[str, Box], Location]


@dataclass(frozen=True)
class WriteReport:
    """What a rank sends to rank 0 about what it wrote: its parts, and where the pieces of its plan lie, without names.

    Rank 0 knows the pieces in their order from the plan, so that ten thousand of them take a few kilobytes.
    """

    parts: tuple[Part, ...]
    layout: bytes

    @classmethod
    def of(cls, written: Written, pieces: Sequence[Piece]) -> "WriteReport":
        """The report of a rank that has these pieces to write; for one that it did not write, ``NOT_WRITTEN``."""
        numbers = {part.name: number for number, part in enumerate(written.parts)}
        # One row of numbers: a list for each piece would be looked at by the garbage collector again and again.
        rows = array("q")
        for piece in pieces:
            each = written.places.get((piece.name, piece.box))
            rows.extend((numbers[each.part], each.blob_at, each.blob_bytes, each.at) if each else _NOWHERE)
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, _COLUMNS)
        # From each to the next, column by column: tensors of equal shapes are equally far apart, which compresses well.
        steps = table.diff(dim=0, prepend=table.new_zeros(1, _COLUMNS)).t().contiguous()
        return cls(written.parts, zlib.compress(steps.numpy().tobytes(), 1))

    def columns(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """For each piece the number of its part, and ``blob_at``, ``blob_bytes`` and ``at`` as in ``Location``."""
        data = bytearray(zlib.decompress(self.layout))
        if not data:
            # A rank may have nothing to write, and torch makes no tensor of an empty buffer.
            return [], [], [], []
        part, blob_at, blob_bytes, at = torch.frombuffer(data, dtype=torch.int64).view(_COLUMNS, -1).cumsum(1).tolist()
        return part, blob_at, blob_bytes, at


NOT_WRITTEN: Final = -1
_NOWHERE: Final = (NOT_WRITTEN, 0, 0, 0)
_COLUMNS: Final = 4
_SMALL_BYTES: Final = 4096
_GATHERED_BYTES: Final = 1 << 18


def planned_parts(plan: SavePlan, *, files: int | None = None) -> tuple[str, ...]:
    """Every part that a save by this plan must report before it can be committed."""
    return (*plan.part_names(files), INDEX_PART, METADATA_PART)


def write(staged: Staged, draft: PartWriter, rank: int, *, files: int | None = None) -> Written:
    """Write what was staged, into so many files at the same time; None: as many as its size is worth.

    Raises:
        StorageFailed: I/O error; the draft can be given up.
    """
    staged.wait()
    number = number_of_files([one.piece for one in staged.pieces], files)
    return write_bundles(share_out(staged.pieces, number), draft, rank)


def write_bundles(bundles: Sequence[Sequence[StagedPiece]], draft: PartWriter, rank: int) -> Written:
    """Write each bundle into a file of its own, all at the same time.

    Raises:
        StorageFailed: I/O error; the draft can be given up.
    """
    places: dict[tuple[str, Box], Location] = {}

    def write_one(number: int, pieces: Sequence[StagedPiece]) -> Part:
        name = part_name(rank, number)
        is_large = sum(staged.piece.size_bytes for staged in pieces) >= LARGE_BYTES
        # crash here: a draft with some of its parts; it is torn.
        return draft.write_part(name, _Blobs(pieces, name, places), is_large=is_large)

    if len(bundles) < 2:
        parts = [write_one(number, pieces) for number, pieces in enumerate(bundles)]
    else:
        with ThreadPoolExecutor(len(bundles), thread_name_prefix="unbroken-write") as pool:
            parts = list(pool.map(write_one, range(len(bundles)), bundles))
    return Written(tuple(parts), places)


def share_out(pieces: Sequence[StagedPiece], files: int) -> list[list[StagedPiece]]:
    """As many bundles as there are files, of about the same size, each in the order of the plan, small pieces first.

    What is replicated is mostly small (an optimizer's step counts) and is read by every rank. At the front it lies in
    one block; among the shards every rank would read all blocks of another rank's part.
    """
    bundles: list[list[int]] = [[] for _ in range(min(files, len(pieces)))]
    load = [0] * len(bundles)
    for number in sorted(range(len(pieces)), key=lambda n: -pieces[n].piece.size_bytes):
        smallest = load.index(min(load))
        bundles[smallest].append(number)
        # A blob has some bytes even where the tensor has none, so that no file stays without one.
        load[smallest] += max(pieces[number].piece.size_bytes, 1)
    return [
        [pieces[number] for number in sorted(bundle, key=lambda n: (pieces[n].piece.size_bytes > _SMALL_BYTES, n))]
        for bundle in bundles
    ]


@dataclass(frozen=True)
class _Blobs:
    """The bytes of a part; they can be gone through again, by a writer that has to send them again."""

    pieces: Sequence[StagedPiece]
    part: str
    places: dict[tuple[str, Box], Location]

    def __iter__(self) -> Iterator[memoryview]:
        return _at_blocks(_gathered(_blobs(self.pieces, self.part, self.places)))


def _blobs(
    pieces: Sequence[StagedPiece], part: str, places: dict[tuple[str, Box], Location]
) -> Iterator[bytes | memoryview]:
    position = 0
    for staged in pieces:
        name, dtype, box = staged.piece
        around = container(DTYPES[dtype], box.sizes)
        size_bytes = staged.piece.size_bytes
        # The elements are to be aligned; where they begin in the blob is the container's affair.
        padding = -(position + (len(around.head) if size_bytes else 0)) % ALIGNMENT_BYTES
        blob_at = position + padding
        blob_bytes = len(around.head) + size_bytes + len(around.tail)
        places[name, box] = Location(part, blob_at, blob_bytes, blob_at + (len(around.head) if size_bytes else 0))
        yield bytes(padding) + around.head
        yield from staged.views()
        yield around.tail
        position = blob_at + blob_bytes


def _gathered(chunks: Iterator[bytes | memoryview]) -> Iterator[bytes | bytearray | memoryview]:
    """The same bytes, small chunks put together: to write each of a hundred thousand takes longer than its bytes do."""
    waiting = bytearray()
    for chunk in chunks:
        if len(chunk) >= _SMALL_BYTES:
            if waiting:
                yield waiting
                waiting = bytearray()
            yield chunk
            continue
        waiting += chunk
        if len(waiting) >= _GATHERED_BYTES:
            # Another one from here on: this one is in use until it is written.
            yield waiting
            waiting = bytearray()
    if waiting:
        yield waiting


def _at_blocks(chunks: Iterator[bytes | bytearray | memoryview]) -> Iterator[memoryview]:
    """The same bytes, cut where the blocks of a part end: a whole block is digested at once, without the lock."""
    room = BLOCK_BYTES
    for chunk in chunks:
        rest = memoryview(chunk)
        while len(rest):
            piece, rest = rest[:room], rest[room:]
            yield piece
            room = room - len(piece) or BLOCK_BYTES
