"""The index: the same bytes for the same facts, and refusal of everything that is not what a save writes."""

import json
from typing import Any

import pytest
import torch

from unbroken.state.index import Box, Chunk, Index, TensorEntry, coverage_complaint, decode, encode
from unbroken.store.fields import Malformed

SIZES = {"state/__0_0.distcp": 4096, "state/__1_0.distcp": 4096}


def index() -> Index:
    return Index(
        {
            "model.a": TensorEntry(
                torch.float32,
                (4, 6),
                (
                    Chunk(Box((0, 0), (2, 6)), "state/__0_0.distcp", 704),
                    Chunk(Box((2, 0), (2, 6)), "state/__1_0.distcp", 704),
                ),
            ),
            "n": TensorEntry(torch.int64, (), (Chunk(Box((), ()), "state/__0_0.distcp", 1024),)),
        }
    )


def body() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode(index()))
    return found


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_an_index_is_these_bytes() -> None:
    assert encode(index()) == (
        b'{"byteorder":"little","format":"unbroken.index/1","parts":["state/__0_0.distcp","state/__1_0.distcp"],'
        b'"tensors":{"model.a":{"chunks":[[[0,0],[2,6],0,704],[[2,0],[2,6],1,704]],"dtype":"float32","shape":[4,6]},'
        b'"n":{"chunks":[[[],[],0,1024]],"dtype":"int64","shape":[]}}}'
    )


def test_what_was_encoded_is_decoded() -> None:
    assert decode(encode(index()), SIZES) == index()


def test_names_of_any_text_survive() -> None:
    odd = Index({'a".é\n🙂': TensorEntry(torch.bool, (0,), ())})
    assert decode(encode(odd), {}) == odd


def changed(path: list[str | int], value: object) -> bytes:
    """The index with one value replaced."""
    whole = body()
    place: Any = whole
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return canonical(whole)


CHUNKS: list[str | int] = ["tensors", "model.a", "chunks"]


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (["format"], "unbroken.index/2", "its format is 'unbroken.index/2'"),
        (["byteorder"], "big", "its bytes are big endian"),
        (["extra"], 1, "index has an unknown member 'extra'"),
        (["parts"], {}, "'parts' in index is not a list of texts"),
        (["parts", 0], "../../etc/passwd", "which is no part of the checkpoint"),
        (["tensors"], [], "'tensors' in index is not an object"),
        (["tensors", "model.a", "dtype"], "load", "has the unknown dtype 'load'"),
        (["tensors", "model.a", "dtype"], "qint8", "has the unknown dtype 'qint8'"),
        (["tensors", "model.a", "dtype"], 3, "is not an object of chunks, dtype and shape"),
        (["tensors", "model.a", "more"], 3, "is not an object of chunks, dtype and shape"),
        (["tensors", "model.a", "shape"], [4, -6], "has a number that is none"),
        (["tensors", "model.a", "shape"], [4, True], "has a number that is none"),
        (["tensors", "model.a", "shape"], [4, 6.0], "has a number that is none"),
        (["tensors", "model.a", "shape"], [4, 1 << 70], "has a number that is none"),
        (["tensors", "model.a", "shape"], [4, 7], "its chunks hold 24 elements and it has 28"),
        (["tensors", "model.a", "shape"], [4], "a chunk has 2 dimensions and the tensor 1"),
        ([*CHUNKS, 0], [[0, 0], [2, 6], 0], "has a chunk that is not [offsets, sizes, part, at]"),
        ([*CHUNKS, 0, 2], 2, "has a chunk that is not [offsets, sizes, part, at]"),
        ([*CHUNKS, 0, 3], 4032, "has bytes 4032 to 4080"),
        ([*CHUNKS, 0, 3], 4096, "has bytes 4096 to 4144, which state/__0_0.distcp does not have"),
        ([*CHUNKS, 0, 3], 705, "has bytes 705 to 753"),
        ([*CHUNKS, 1, 0], [3, 0], "leaves the shape [4, 6]"),
        ([*CHUNKS, 1, 0], [1, 0], "its chunks at [0, 0] and [1, 0] overlap"),
        ([*CHUNKS, 1, 1], [2, 5], "its chunks hold 22 elements and it has 24"),
        (CHUNKS, [], "its chunks hold 0 elements and it has 24"),
        (["tensors", "n", "chunks"], [[[], [], 0, 0], [[], [], 0, 0]], "its chunks hold 2 elements and it has 1"),
    ],
)
def test_an_index_that_no_save_wrote_is_refused(path: list[str | int], value: object, complaint: str) -> None:
    sizes = {**SIZES, "state/__0_0.distcp": 4070} if value == 4032 else SIZES
    with pytest.raises(Malformed) as refused:
        decode(changed(path, value), sizes)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        encode(index()) + b"\n",
        encode(index()).replace(b'"byteorder"', b' "byteorder"'),
        encode(index()).replace(b'"shape":[]}', b'"shape":[],"shape":[]}'),
        encode(index()).replace(b"1024", b"NaN"),
    ],
    ids=["empty", "null", "list", "no text", "deep", "newline", "space", "key twice", "NaN"],
)
def test_bytes_that_are_not_canonical_are_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode(data, SIZES)


@pytest.mark.parametrize(
    ("shape", "boxes", "is_filled"),
    [
        ((4, 4), [Box((0, 0), (2, 2)), Box((2, 0), (2, 2)), Box((0, 2), (2, 2)), Box((2, 2), (2, 2))], True),
        ((4, 4), [Box((0, 0), (2, 2)), Box((2, 0), (2, 2)), Box((0, 2), (2, 2)), Box((1, 1), (2, 2))], False),
        ((4, 4), [Box((0, 0), (4, 2)), Box((0, 2), (1, 2)), Box((1, 2), (3, 2))], True),
        ((3,), [Box((0,), (3,)), Box((3,), (0,))], True),
        ((0, 3), [], True),
        ((0, 3), [Box((0, 0), (0, 3))], True),
        ((), [Box((), ())], True),
        ((), [], False),
        ((6,), [Box((0,), (3,)), Box((0,), (3,))], False),
    ],
)
def test_boxes_fill_a_tensor_exactly_once_or_not(shape: tuple[int, ...], boxes: list[Box], is_filled: bool) -> None:
    assert (coverage_complaint(shape, boxes) is None) is is_filled
