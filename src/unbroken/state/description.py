"""Rank 0 describes what all ranks have written, for this package and for stock DCP; reused while nothing changes.

The index in JSON (``index.py``) is all that we ever read; ``.metadata`` is what stock readers of distributed
checkpoints expect. A job of 512 ranks with 10,000 sharded tensors has five million pieces, which take rank 0 more than
a minute to describe. Where they lie depends on the plan of the save alone, so that a description is kept, compressed,
and written again as long as every rank reports the same places.
"""

import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from unbroken import torch_private
from unbroken.errors import EvidenceMissing
from unbroken.state.index import DTYPES, INDEX_PART, Box, Chunk, Index, TensorEntry, decode, encode
from unbroken.state.payload import METADATA_PART, NOT_WRITTEN, WriteReport, Written
from unbroken.state.pieces import SavePlan
from unbroken.store.commit import PartWriter
from unbroken.store.fields import Malformed
from unbroken.store.manifest import Part

# What torch's own writer puts there; before torch 2.7 there is no such field.
_VERSION: Final[Mapping[str, Any]] = {"version": "1.0.0"} if "version" in Metadata.__dataclass_fields__ else {}
_READ_BYTES: Final = 1 << 22

# Names and sizes of the parts of every rank, and where its pieces lie in them: all that a description says.
_Places = list[tuple[tuple[tuple[str, int], ...], bytes]]


class Describer:
    """Describes one save after the other on rank 0."""

    def __init__(self) -> None:
        self._plan: SavePlan | None = None
        self._places: _Places = []
        self._index = self._metadata = b""

    @property
    def kept_bytes(self) -> int:
        """What the description takes in memory between two saves."""
        return len(self._index) + len(self._metadata)

    def write(self, plan: SavePlan, reports: Sequence[WriteReport], draft: PartWriter) -> tuple[Part, ...]:
        """Write both descriptions of what the ranks report, a report for each rank of the plan.

        Raises:
            EvidenceMissing: a piece of the plan was not written, or not as planned.
            StorageFailed: I/O error; the draft can be given up.
        """
        places: _Places = [
            (tuple((part.name, part.size_bytes) for part in report.parts), report.layout) for report in reports
        ]
        if plan is not self._plan or places != self._places:
            self._plan = None
            index, metadata = describe(plan, reports, draft)
            self._index, self._metadata = zlib.compress(index, 1), zlib.compress(metadata, 1)
            self._plan, self._places = plan, places
        # crash here: a draft with all tensors and without a description; it is torn.
        return (
            draft.write_part(INDEX_PART, _unpacked(self._index)),
            draft.write_part(METADATA_PART, _unpacked(self._metadata)),
        )


def finish(plan: SavePlan, written: Sequence[Written], draft: PartWriter) -> tuple[Part, ...]:
    """Describe what was written by whomever, once; for rank 0, after it has heard from all ranks.

    Raises:
        EvidenceMissing: a piece of the plan was not written, or not as planned.
        StorageFailed: I/O error; the draft can be given up.
    """
    parts = tuple(part for one in written for part in one.parts)
    everything = Written(parts, {key: place for one in written for key, place in one.places.items()})
    return Describer().write(plan, [WriteReport.of(everything, pieces) for pieces in plan.pieces_by_rank], draft)


def describe(plan: SavePlan, reports: Sequence[WriteReport], draft: PartWriter) -> tuple[bytes, bytes]:
    """The index and the metadata of what the ranks report; nothing is written.

    Raises:
        EvidenceMissing: a piece of the plan was not written, or not as planned.
    """
    pieces = _by_tensor(plan, reports, draft)
    entries = {
        name: TensorEntry(DTYPES[planned.dtype], planned.shape, tuple(pieces[planned.same_as].chunks))
        for name, planned in plan.tensors.items()
    }
    encoded = encode(Index(entries))
    try:
        # What no reader would take must not become a checkpoint: it would be found out when it is needed.
        decode(encoded, {part.name: part.size_bytes for report in reports for part in report.parts})
    except Malformed as wrong:
        raise EvidenceMissing(path=draft.path, missing=(f"{INDEX_PART}: {wrong}",)) from wrong
    return encoded, pickle.dumps(_metadata(plan, pieces))


@dataclass
class _Pieces:
    """Where the pieces of one tensor lie, for the index; and begin and length of their blobs, for the metadata."""

    chunks: list[Chunk] = field(default_factory=list)
    blobs: list[tuple[int, int]] = field(default_factory=list)


def _by_tensor(plan: SavePlan, reports: Sequence[WriteReport], draft: PartWriter) -> dict[str, _Pieces]:
    found = {name: _Pieces() for name in plan.tensors}
    missing = []
    for pieces, report in zip(plan.pieces_by_rank, reports, strict=True):
        names = [part.name for part in report.parts]
        for (name, _, box), part, *blob, at in zip(pieces, *report.columns(), strict=True):
            if part == NOT_WRITTEN:
                missing.append(f"{name} at {list(box.offsets)}: planned and not written")
                continue
            its = found[name]
            its.chunks.append(Chunk(box, names[part], at))
            its.blobs.append((blob[0], blob[1]))
    if missing:
        raise EvidenceMissing(path=draft.path, missing=tuple(missing))
    return found


def _metadata(plan: SavePlan, pieces: Mapping[str, _Pieces]) -> Metadata:
    """The same facts for stock readers. Equal values are one object, which pickle writes once."""
    boxes: dict[Box, ChunkStorageMetadata] = {}
    files: dict[str, str] = {}
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, object] = {}
    for name, planned in plan.tensors.items():
        its = pieces[planned.same_as]
        cut = []
        for number, ((box, part, _), (blob_at, blob_bytes)) in enumerate(zip(its.chunks, its.blobs, strict=True)):
            if (known := boxes.get(box)) is None:
                known = boxes[box] = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            if (file := files.get(part)) is None:
                file = files[part] = part.removeprefix("state/")
            key = MetadataIndex(name, None, number)
            # Its constructor would make another ``torch.Size`` of the same offsets for every tensor.
            object.__setattr__(key, "offset", known.offsets)
            storage[key] = torch_private.StorageInfo(file, blob_at, blob_bytes)
            cut.append(known)
        properties = TensorProperties(dtype=DTYPES[planned.dtype])
        tensors[name] = TensorStorageMetadata(properties=properties, size=torch.Size(planned.shape), chunks=cut)
    paths = {name: _path(name, plan.tensors) for name in plan.tensors}
    return Metadata(state_dict_metadata=tensors, planner_data=paths, storage_data=storage, **_VERSION)


def _path(name: str, names: Mapping[str, object]) -> tuple[str, ...]:
    """How a stock tool that rebuilds a nested dict gets to a tensor: by its item, then by its name in it."""
    item, dot, rest = name.partition(".")
    return (item, rest) if dot and item not in names else (name,)


def _unpacked(data: bytes) -> Iterator[bytes]:
    unpacking = zlib.decompressobj()
    while data:
        yield unpacking.decompress(data, _READ_BYTES)
        data = unpacking.unconsumed_tail
    yield unpacking.flush()
