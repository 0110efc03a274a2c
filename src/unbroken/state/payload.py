"""Tensors to parts and back: the payload of a checkpoint.

A rank writes its pieces into files of its own, each piece as a blob that stock tools load; the copies staged in host
memory go to the kernel as they are, digested on the way. Rank 0 then writes two descriptions of the whole: an index in
JSON, which is all that we ever read, and the ``.metadata`` that stock readers of distributed checkpoints expect.
"""

import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from unbroken import torch_private
from unbroken.errors import EvidenceMissing
from unbroken.state import index as index_format
from unbroken.state.container import container
from unbroken.state.index import ALIGNMENT_BYTES, DTYPES, INDEX_PART, Box, Chunk, Entry, Index
from unbroken.state.pieces import SavePlan, part_name, plan_save
from unbroken.state.planners import Piece
from unbroken.state.read import read, read_index
from unbroken.state.stage import Staged, StagedPiece
from unbroken.store.commit import Draft
from unbroken.store.digest import BLOCK_BYTES
from unbroken.store.fields import Malformed
from unbroken.store.manifest import Part

__all__ = [
    "INDEX_PART",
    "METADATA_PART",
    "Location",
    "Report",
    "SavePlan",
    "Written",
    "finish",
    "plan_save",
    "planned_parts",
    "read",
    "read_index",
    "share_out",
    "write",
    "write_bundles",
]

METADATA_PART: Final = "state/.metadata"
# What torch's own writer puts there; before torch 2.7 there is no such field.
_VERSION: Final[Mapping[str, Any]] = {"version": "1.0.0"} if "version" in Metadata.__dataclass_fields__ else {}


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
class Report:
    """What a rank sends to rank 0 about what it wrote: its parts, and where the pieces of its plan lie, without names.

    Rank 0 knows the pieces in their order from the plan, so that ten thousand of them take a few kilobytes.
    """

    parts: tuple[Part, ...]
    layout: bytes

    @classmethod
    def of(cls, written: Written, pieces: Sequence[Piece]) -> "Report":
        """The report of a rank that has these pieces to write."""
        numbers = {part.name: number for number, part in enumerate(written.parts)}
        places = [written.places[piece.name, piece.box] for piece in pieces]
        rows = [[numbers[each.part], each.blob_at, each.blob_bytes, each.at] for each in places]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, _COLUMNS)
        # From each to the next, column by column: tensors of equal shapes are equally far apart, which compresses well.
        steps = table.diff(dim=0, prepend=table.new_zeros(1, _COLUMNS)).t().contiguous()
        return cls(written.parts, zlib.compress(steps.numpy().tobytes(), 1))

    def written(self, pieces: Sequence[Piece]) -> Written:
        """What the rank has written, with the names that rank 0 knows.

        Raises:
            ValueError: the report is about another number of pieces.
        """
        data = bytearray(zlib.decompress(self.layout))
        # A rank may have nothing to write, and torch makes no tensor of an empty buffer.
        steps = torch.frombuffer(data, dtype=torch.int64).view(_COLUMNS, -1) if data else torch.zeros(_COLUMNS, 0)
        rows = steps.cumsum(dim=1).t().tolist()
        places = {
            (piece.name, piece.box): Location(self.parts[part].name, blob_at, blob_bytes, at)
            for piece, (part, blob_at, blob_bytes, at) in zip(pieces, rows, strict=True)
        }
        return Written(self.parts, places)


_COLUMNS: Final = 4


def planned_parts(plan: SavePlan, *, files: int = 1) -> tuple[str, ...]:
    """Every part that a save by this plan must report before it can be committed."""
    return (*plan.part_names(files), INDEX_PART, METADATA_PART)


def write(staged: Staged, draft: Draft, rank: int, *, files: int = 1) -> Written:
    """Write what was staged, into so many files at the same time.

    Raises:
        StorageFailed: I/O error; the draft can be given up.
    """
    if files < 1:
        raise ValueError(f"a rank writes into at least one file, not {files}")
    staged.wait()
    return write_bundles(share_out(staged.pieces, files), draft, rank)


def write_bundles(bundles: Sequence[Sequence[StagedPiece]], draft: Draft, rank: int) -> Written:
    """Write each bundle into a file of its own, all at the same time.

    Raises:
        StorageFailed: I/O error; the draft can be given up.
    """
    places: dict[tuple[str, Box], Location] = {}

    def write_one(number: int, pieces: Sequence[StagedPiece]) -> Part:
        name = part_name(rank, number)
        # crash here: a draft with some of its parts; it is torn.
        return draft.write_part(name, _at_blocks(_blobs(pieces, name, places)))

    if len(bundles) < 2:
        parts = [write_one(number, pieces) for number, pieces in enumerate(bundles)]
    else:
        with ThreadPoolExecutor(len(bundles), thread_name_prefix="unbroken-write") as pool:
            parts = list(pool.map(write_one, range(len(bundles)), bundles))
    return Written(tuple(parts), places)


def share_out(pieces: Sequence[StagedPiece], files: int) -> list[list[StagedPiece]]:
    """As many bundles as there are files, of about the same size, each in the order of the plan."""
    bundles: list[list[int]] = [[] for _ in range(min(files, len(pieces)))]
    load = [0] * len(bundles)
    for number in sorted(range(len(pieces)), key=lambda n: -pieces[n].piece.size_bytes):
        smallest = load.index(min(load))
        bundles[smallest].append(number)
        # A blob has some bytes even where the tensor has none, so that no file stays without one.
        load[smallest] += max(pieces[number].piece.size_bytes, 1)
    return [[pieces[number] for number in sorted(bundle)] for bundle in bundles]


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


def _at_blocks(chunks: Iterator[bytes | memoryview]) -> Iterator[memoryview]:
    """The same bytes, cut where the blocks of a part end: a whole block is digested at once, without the lock."""
    room = BLOCK_BYTES
    for chunk in chunks:
        rest = memoryview(chunk)
        while len(rest):
            piece, rest = rest[:room], rest[room:]
            yield piece
            room = room - len(piece) or BLOCK_BYTES


def finish(plan: SavePlan, written: Sequence[Written], draft: Draft) -> tuple[Part, ...]:
    """Describe what all ranks have written; for rank 0, after it has heard from all of them.

    Raises:
        EvidenceMissing: a piece of the plan was not written, or not as planned.
        StorageFailed: I/O error; the draft can be given up.
    """
    places = {key: place for one in written for key, place in one.places.items()}
    sizes = {part.name: part.size_bytes for one in written for part in one.parts}
    chunks: dict[str, list[tuple[Box, Location]]] = {name: [] for name in plan.tensors}
    missing = []
    for pieces in plan.pieces_by_rank:
        for piece in pieces:
            place = places.get((piece.name, piece.box))
            if place is None:
                missing.append(f"{piece.name} at {list(piece.box.offsets)}: planned and not written")
            else:
                chunks[piece.name].append((piece.box, place))
    if missing:
        raise EvidenceMissing(path=draft.path, missing=tuple(missing))
    lying = {name: chunks[planned.same_as] for name, planned in plan.tensors.items()}
    encoded = index_format.encode(_index(plan, lying))
    try:
        # What no reader would take must not become a checkpoint: it would be found out when it is needed.
        index_format.decode(encoded, sizes)
    except Malformed as wrong:
        raise EvidenceMissing(path=draft.path, missing=(f"{INDEX_PART}: {wrong}",)) from wrong
    # crash here: a draft with all tensors and without a description; it is torn.
    return (
        draft.write_part(INDEX_PART, [encoded]),
        draft.write_part(METADATA_PART, [pickle.dumps(_metadata(plan, lying))]),
    )


def _index(plan: SavePlan, lying: Mapping[str, Sequence[tuple[Box, Location]]]) -> Index:
    return Index(
        {
            name: Entry(
                DTYPES[planned.dtype],
                planned.shape,
                tuple(Chunk(box, place.part, place.at) for box, place in lying[name]),
            )
            for name, planned in plan.tensors.items()
        }
    )


def _metadata(plan: SavePlan, lying: Mapping[str, Sequence[tuple[Box, Location]]]) -> Metadata:
    """The same facts for stock readers."""
    return Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[planned.dtype]),
                size=torch.Size(planned.shape),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
                    for box, _ in lying[name]
                ],
            )
            for name, planned in plan.tensors.items()
        },
        planner_data={name: _path(name, plan.tensors) for name in plan.tensors},
        storage_data={
            MetadataIndex(name, box.offsets, number): torch_private.StorageInfo(
                place.part.removeprefix("state/"), place.blob_at, place.blob_bytes
            )
            for name in plan.tensors
            for number, (box, place) in enumerate(lying[name])
        },
        **_VERSION,
    )


def _path(name: str, names: Mapping[str, object]) -> tuple[str, ...]:
    """How a stock tool that rebuilds a nested dict gets to a tensor: by its item, then by its name in it."""
    item, dot, rest = name.partition(".")
    return (item, rest) if dot and item not in names else (name,)
