"""Where every tensor of a checkpoint lies: our own JSON, the only description of the payload that we ever read.

An index has for each tensor its dtype, its global shape, and the boxes it is cut into, each with the part and the byte
at which its elements begin, row by row. Decoding treats the file as hostile: every box must lie inside its tensor, no
two may overlap, together they must fill it, and every byte range must lie inside its part. Nothing here is code.
"""

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from unbroken.store.envelope import canonical, from_canonical
from unbroken.store.fields import Malformed, Table

FORMAT: Final = "unbroken.index/1"
INDEX_PART: Final = "state/index.json"
# No element of any dtype crosses such a boundary, nor does a block of a part end within one.
ALIGNMENT_BYTES: Final = 64
_LARGEST: Final = 1 << 62
_BODY: Final = frozenset({"byteorder", "format", "parts", "tensors"})

# Quantized dtypes carry scales beside their bytes, and those of less than a byte cannot be saved by torch itself.
_NOT_KEPT: Final = re.compile(r"torch\.(q|bits|u?int[1-7]\b).*")
DTYPES: Final[Mapping[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not _NOT_KEPT.fullmatch(str(dtype))
}


def dtype_name(dtype: torch.dtype) -> str:
    """How a dtype is called in an index: ``float32``."""
    return str(dtype).removeprefix("torch.")


class Box(NamedTuple):
    """A block of a tensor: where it begins and how far it reaches in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and where its bytes lie."""

    box: Box
    part: str
    at: int


@dataclass(frozen=True)
class Entry:
    """One tensor: what it is and where its chunks lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def elements(self) -> int:
        """How many elements the whole tensor has."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """How many bytes the whole tensor has."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Index:
    """All tensors of a checkpoint by name. Two names of one tensor point at the same bytes."""

    tensors: Mapping[str, Entry]


def encode(index: Index) -> bytes:
    """The index as canonical JSON.

    Raises:
        ValueError: a name is not valid Unicode.
    """
    parts = sorted({chunk.part for entry in index.tensors.values() for chunk in entry.chunks})
    number = {name: position for position, name in enumerate(parts)}
    body = {
        "byteorder": sys.byteorder,
        "format": FORMAT,
        "parts": parts,
        "tensors": {
            name: {
                "chunks": [
                    [list(chunk.box.offsets), list(chunk.box.sizes), number[chunk.part], chunk.at]
                    for chunk in sorted(entry.chunks, key=lambda chunk: chunk.box.offsets)
                ],
                "dtype": dtype_name(entry.dtype),
                "shape": list(entry.shape),
            }
            for name, entry in index.tensors.items()
        },
    }
    return canonical(body)


def decode(data: bytes, part_sizes: Mapping[str, int]) -> Index:
    """The index in a part's bytes; ``part_sizes`` are the sizes in the manifest of the parts it may name.

    Raises:
        Malformed: it is not what a save wrote.
    """
    try:
        found = from_canonical(data)
    except (ValueError, RecursionError) as wrong:
        raise Malformed(f"it is no JSON: {' '.join(str(wrong).split())[:120]}") from wrong
    body = Table(found, "index")
    if body.text("format") != FORMAT:
        raise Malformed(f"its format is {body.text('format')!r}")
    body.only(_BODY)
    if body.text("byteorder") != sys.byteorder:
        raise Malformed(f"its bytes are {body.text('byteorder')} endian")
    parts = body.texts("parts")
    if unknown := [name for name in parts if name not in part_sizes]:
        raise Malformed(f"it names {unknown[0]!r}, which is no part of the checkpoint")
    entries = {name: _entry(value, name, parts, part_sizes) for name, value in body.table("tensors").items()}
    return Index(entries)


def _entry(value: object, name: str, parts: Sequence[str], part_sizes: Mapping[str, int]) -> Entry:
    match value:
        case {"chunks": [*rows], "dtype": str(dtype_text), "shape": [*sizes], **others} if not others:
            pass
        case _:
            raise Malformed(f"tensor {name!r} is not an object of chunks, dtype and shape")
    dtype = DTYPES.get(dtype_text)
    if dtype is None:
        raise Malformed(f"tensor {name!r} has the unknown dtype {dtype_text!r}")
    shape = _whole_numbers(sizes, name)
    chunks = tuple(_chunk(row, name, parts) for row in rows)
    for chunk in chunks:
        end = chunk.at + chunk.box.elements * dtype.itemsize
        if chunk.at % ALIGNMENT_BYTES or end > part_sizes[chunk.part]:
            raise Malformed(f"tensor {name!r} has bytes {chunk.at} to {end}, which {chunk.part} does not have")
    if complaint := coverage_complaint(shape, [chunk.box for chunk in chunks]):
        raise Malformed(f"tensor {name!r}: {complaint}")
    return Entry(dtype, shape, chunks)


def _chunk(row: object, name: str, parts: Sequence[str]) -> Chunk:
    match row:
        case [[*offsets], [*sizes], part, at]:
            number, start = _whole_numbers([part, at], name)
            if number < len(parts):
                return Chunk(Box(_whole_numbers(offsets, name), _whole_numbers(sizes, name)), parts[number], start)
    raise Malformed(f"tensor {name!r} has a chunk that is not [offsets, sizes, part, at]")


def _whole_numbers(values: Sequence[object], name: str) -> tuple[int, ...]:
    whole = tuple(value for value in values if type(value) is int and 0 <= value < _LARGEST)
    if len(whole) != len(values):
        raise Malformed(f"tensor {name!r} has a number that is none")
    return whole


def coverage_complaint(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why boxes do not fill a tensor of a shape exactly once; None if they do."""
    for box in boxes:
        if not len(box.offsets) == len(box.sizes) == len(shape):
            return f"a chunk has {len(box.offsets)} dimensions and the tensor {len(shape)}"
        if any(start + size > limit for start, size, limit in zip(box.offsets, box.sizes, shape, strict=True)):
            return f"the chunk at {list(box.offsets)} of {list(box.sizes)} leaves the shape {list(shape)}"
    filled = [box for box in boxes if box.elements]
    covered, wanted = sum(box.elements for box in filled), math.prod(shape)
    if covered != wanted:
        return f"its chunks hold {covered:,} elements and it has {wanted:,}"
    for one, other in _overlaps(filled):
        return f"its chunks at {list(one.offsets)} and {list(other.offsets)} overlap"
    return None


def _overlaps(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs that share an element, by a sweep along the dimension in which the boxes begin at the most places."""
    if len(boxes) < 2:
        return
    dimensions = range(len(boxes[0].offsets))
    if not dimensions:
        yield boxes[0], boxes[1]
        return
    along = max(dimensions, key=lambda d: len({box.offsets[d] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[along]):
        start = box.offsets[along]
        open_boxes = [other for other in open_boxes if other.offsets[along] + other.sizes[along] > start]
        for other in open_boxes:
            if all(
                box.offsets[d] < other.offsets[d] + other.sizes[d] and other.offsets[d] < box.offsets[d] + box.sizes[d]
                for d in dimensions
            ):
                yield other, box
        open_boxes.append(box)
