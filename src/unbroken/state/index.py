"""Where every tensor of a checkpoint lies: our own JSON, the only description of the payload that we ever read.

An index has for each tensor its dtype, its global shape, and the boxes it is cut into, each with the part and the byte
at which its elements begin, row by row. Decoding treats the file as hostile: every box must lie inside its tensor, no
two may overlap, together they must fill it, and every byte range must lie inside its part. Nothing here is code.
"""

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Final, NamedTuple

import torch

from unbroken.store.envelope import canonical
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


@cache
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


class Chunk(NamedTuple):
    """A box of a tensor and where its bytes lie; a large job has millions of them."""

    box: Box
    part: str
    at: int


@dataclass(frozen=True)
class TensorEntry:
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

    tensors: Mapping[str, TensorEntry]


def encode(index: Index) -> bytes:
    """The index as canonical JSON.

    Raises:
        ValueError: a name is not valid Unicode.
    """
    parts = sorted({chunk.part for entry in index.tensors.values() for chunk in entry.chunks})
    number = {name: position for position, name in enumerate(parts)}
    # Tensors are cut in a few ways only, so that each box is spelled once; the rest is written as it is read.
    boxes: dict[Box, str] = {}
    spelled = [_spelled(name, index.tensors[name], number, boxes) for name in sorted(index.tensors)]
    head = canonical({"byteorder": sys.byteorder, "format": FORMAT, "parts": parts})
    return b'%s,"tensors":{%s}}' % (head[:-1], ",".join(spelled).encode())


def _spelled(name: str, entry: TensorEntry, number: Mapping[str, int], boxes: dict[Box, str]) -> str:
    rows = []
    for box, part, at in sorted(entry.chunks, key=_offsets):
        if (text := boxes.get(box)) is None:
            text = boxes[box] = f"[{_numbers(box.offsets)},{_numbers(box.sizes)},"
        rows.append(f"{text}{number[part]},{at}]")
    name_text = json.dumps(name, ensure_ascii=False)
    dtype = dtype_name(entry.dtype)
    return f'{name_text}:{{"chunks":[{",".join(rows)}],"dtype":"{dtype}","shape":{_numbers(entry.shape)}}}'


def _offsets(chunk: Chunk) -> tuple[int, ...]:
    return chunk.box.offsets


def _numbers(values: Sequence[int]) -> str:
    return f"[{','.join(map(str, values))}]"


def decode(data: bytes, part_sizes: Mapping[str, int]) -> Index:
    """The index in a part's bytes; ``part_sizes`` are the sizes in the manifest of the parts it may name.

    Raises:
        Malformed: it is not what a save wrote.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as wrong:
        raise Malformed(f"not valid JSON: {' '.join(str(wrong).split())[:120]}") from wrong
    body = Table(found, "index")
    if body.text("format") != FORMAT:
        raise Malformed(f"its format is {body.text('format')!r}")
    body.only(_BODY)
    if body.text("byteorder") != sys.byteorder:
        raise Malformed(f"its bytes are {body.text('byteorder')} endian")
    parts = body.texts("parts")
    if unknown := [name for name in parts if name not in part_sizes]:
        raise Malformed(f"it names {unknown[0]!r}, which is no part of the checkpoint")
    cuts: _Cuts = {}
    room = [part_sizes[part] for part in parts]
    entries = {name: _entry(value, name, parts, room, cuts) for name, value in body.table("tensors").items()}
    # Two readers must never see two values in the same bytes. By now nothing in it is nested more deeply than a chunk.
    if canonical(found) != data:
        raise Malformed("it is not canonical")
    return Index(entries)


# The ways in which tensors are cut: for a shape and the offsets and sizes of all chunks, the boxes and what is wrong
# with them. There are a few, and each is checked once.
_Rows = tuple[tuple[int, ...], ...]
_Cuts = dict[tuple[tuple[int, ...], _Rows, _Rows], tuple[tuple[Box, ...], str | None]]


def _entry(value: object, name: str, parts: Sequence[str], room: Sequence[int], cuts: _Cuts) -> TensorEntry:
    match value:
        case {"chunks": [*rows], "dtype": str(dtype_text), "shape": [*shape_values], **others} if not others:
            pass
        case _:
            raise Malformed(f"tensor {name!r} is not an object of chunks, dtype and shape")
    dtype = DTYPES.get(dtype_text)
    if dtype is None:
        raise Malformed(f"tensor {name!r} has the unknown dtype {dtype_text!r}")
    shape = _whole_numbers(shape_values, name)
    offsets, sizes, numbers, starts = _columns(rows, name, parts)
    cut = cuts.get((shape, offsets, sizes))
    if cut is None:
        boxes = tuple(map(Box, offsets, sizes))
        cut = cuts[shape, offsets, sizes] = boxes, coverage_complaint(shape, boxes)
    boxes, complaint = cut
    for box, number, start in zip(boxes, numbers, starts, strict=True):
        end = start + box.elements * dtype.itemsize
        if start % ALIGNMENT_BYTES or end > room[number]:
            raise Malformed(f"tensor {name!r} has bytes {start} to {end}, which {parts[number]} does not have")
    if complaint:
        raise Malformed(f"tensor {name!r}: {complaint}")
    return TensorEntry(dtype, shape, tuple(map(Chunk, boxes, map(parts.__getitem__, numbers), starts)))


def _columns(
    rows: Sequence[object], name: str, parts: Sequence[str]
) -> tuple[_Rows, _Rows, tuple[int, ...], tuple[int, ...]]:
    """The chunks of a tensor by column, all of them numbers that are in range."""
    if not rows:
        return (), (), (), ()
    if set(map(type, rows)) == {list} and set(map(len, rows)) == {4}:  # type: ignore[arg-type]
        offsets, sizes, part_values, start_values = zip(*rows, strict=True)
        if set(map(type, (*offsets, *sizes))) == {list}:
            _whole_numbers([*chain.from_iterable(offsets), *chain.from_iterable(sizes)], name)
            numbers, starts = _whole_numbers(part_values, name), _whole_numbers(start_values, name)
            if max(numbers) < len(parts):
                return tuple(map(tuple, offsets)), tuple(map(tuple, sizes)), numbers, starts
    raise Malformed(f"tensor {name!r} has a chunk that is not [offsets, sizes, part, at]")


def _whole_numbers(values: Sequence[object], name: str) -> tuple[int, ...]:
    # ``True`` is not 1 here: types are compared, not looked up.
    if set(map(type, values)) <= {int}:
        whole: tuple[int, ...] = tuple(values)  # type: ignore[arg-type]
        if not whole or (min(whole) >= 0 and max(whole) < _LARGEST):
            return whole
    raise Malformed(f"tensor {name!r} has a number that is none")


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
