"""The fingerprint once more, in plain integers and as slow as it is simple: what the fast ones are compared with."""

import hashlib
import itertools
import json
import math
from collections.abc import Sequence

import torch

MASK = (1 << 64) - 1


def fold(number: int) -> int:
    return number ^ (number >> 32)


def lanes(word: int, place: int, first_key: int, second_key: int) -> tuple[int, int]:
    """What one word at one place adds to the two sums."""
    page, inside = divmod(place, 1 << 32)
    mixed = ((word << 32) + inside + page * 0x9E3779B97F4A7C15 + first_key) & MASK
    mixed = fold((fold((fold(mixed) * 0xD6E8FEB86659FD93) & MASK) * 0xBF58476D1CE4E5B9) & MASK)
    return mixed, fold(((mixed ^ second_key) * 0x94D049BB133111EB) & MASK)


def keys(name: str, dtype: torch.dtype, shape: Sequence[int]) -> tuple[int, int]:
    text = json.dumps([name, str(dtype).removeprefix("torch."), list(shape)])
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def words(tensor: torch.Tensor) -> list[int]:
    """The bits of the elements in the order of their places, 32 at most at a time; 16-bit words carry a sign."""
    size = tensor.element_size()
    raw = b"".join(bytes(element.reshape(1).view(torch.uint8).tolist()) for element in tensor.reshape(-1))
    width = min(size, 4)
    return [int.from_bytes(raw[at : at + width], "little", signed=width > 1) for at in range(0, len(raw), width)]


def print_of(name: str, tensor: torch.Tensor) -> str:
    """The whole fingerprint of a tensor."""
    first_key, second_key = keys(name, tensor.dtype, tensor.shape)
    sums = [first_key, second_key]
    for place, word in enumerate(words(tensor)):
        for lane, number in enumerate(lanes(word, place, first_key, second_key)):
            sums[lane] += number
    return "".join(f"{number & MASK:016x}" for number in sums)


def places_of(whole: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The places of the elements of a box, one by one."""
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    inside = itertools.product(*(range(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)))
    return [sum(at * stride for at, stride in zip(where, strides, strict=True)) for where in inside]
