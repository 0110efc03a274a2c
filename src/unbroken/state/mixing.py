"""The arithmetic of the fingerprint: words of a tensor, each mixed with its place, added up.

A word is 8, 16 or 32 bits of an element; wider elements are several words. ``w`` at place ``i`` becomes the 64-bit
number ``(w << 32) + i + key``, which no other word at another place can become, is mixed by a bijection, and added to
lane 0; mixed once more with a second key it is added to lane 1. Integers wrap around alike on every device, and a sum
has no order: so chunks, threads, shards and devices cannot change it. Owns no names and no collectives.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
PAGE_BITS: Final = 32
# Odd, with about half of their bits set; each bijection is a chain of xor-shifts and products with these.
FIRST, SECOND, THIRD, PAGE = 0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
# What one core keeps in its second-level cache while the passes of one chunk run over it.
CPU_CHUNK_WORDS: Final = 1 << 15
CUDA_CHUNK_WORDS: Final = 1 << 22
# Rows up to this length are gathered: for one of them the passes take longer to begin than to run.
SHORT_WORDS: Final = 1 << 10
# A tensor that is not contiguous is copied this many elements at a time.
SLAB_ELEMENTS: Final = 1 << 24


class Add(Protocol):
    """What adds up words on a device."""

    def __call__(
        self, words: torch.Tensor, places: "Places", keys: "Keys", total: torch.Tensor, *, begin: int = 0
    ) -> None:
        """Add a row of words, the first of which is word ``begin`` of ``places``, to ``total``."""


@dataclass(frozen=True)
class Keys:
    """The two numbers, below 2**64, for a tensor's name, dtype and global shape."""

    first: int
    second: int


@dataclass(frozen=True)
class Places:
    """Where the words of a box are in the whole tensor.

    Word ``j`` of the box, counted in its own order, has the place ``start + j + sum(j // period * jump)``: each inner
    dimension that the box covers only in part makes the count jump once a period.
    """

    start: int
    jumps: tuple[tuple[int, int], ...]
    is_paged: bool

    @classmethod
    def of(cls, whole: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> "Places":
        """The places of the box at ``offsets``, of ``sizes``, in a tensor of words of the shape ``whole``."""
        start, stride, period = 0, 1, 1
        jumps: list[tuple[int, int]] = []
        for length, offset, size in zip(reversed(whole), reversed(offsets), reversed(sizes), strict=True):
            start += offset * stride
            period *= size
            if size != length:
                jumps.append((period, stride * (length - size)))
            stride *= length
        # The outermost dimension's period is the whole box: no word of it ever reaches that jump.
        total = math.prod(sizes)
        return cls(start, tuple(jump for jump in jumps if jump[0] < total), stride > 1 << PAGE_BITS)


def words_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A contiguous tensor's bits as one row of words, and how many words an element has."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # a single element counts as contiguous whatever its stride, but cannot be viewed as words
        flat = flat.clone(memory_format=torch.contiguous_format)
    width = min(flat.element_size(), 4)
    return flat.view(WORDS[width]), flat.element_size() // width


def add_box(
    total: torch.Tensor, box: torch.Tensor, *, whole: Sequence[int], offsets: Sequence[int], keys: Keys, add: Add
) -> None:
    """Add the words of a box of a tensor to ``total``, two int64 numbers on the device of the box.

    Args:
        total: what is added to.
        box: the elements, of any strides.
        whole: the shape of the tensor that the box is a part of.
        offsets: where in it the box begins.
        keys: the numbers of the whole tensor.
        add: the arithmetic, as ``arithmetic`` gives it.
    """
    if box.numel() == 0:
        return
    if not box.is_contiguous() and box.numel() > SLAB_ELEMENTS:
        # A contiguous copy of the whole could be more than a full device has left.
        dim = next(d for d, size in enumerate(box.shape) if size > 1)
        rows = max(1, SLAB_ELEMENTS // (box.numel() // box.shape[dim]))
        for first in range(0, box.shape[dim], rows):
            inner = [offset + first * (d == dim) for d, offset in enumerate(offsets)]
            slab = box.narrow(dim, first, min(rows, box.shape[dim] - first))
            add_box(total, slab, whole=whole, offsets=inner, keys=keys, add=add)
        return
    words, per_element = words_of(box.detach().contiguous())
    places = Places.of((*whole, per_element), (*offsets, 0), (*box.shape, per_element))
    add(words, places, keys, total)


def arithmetic(device: torch.device) -> Add:
    """What adds words up on a device: one fused kernel where there is one, else passes over chunks.

    The passes have buffers of their own, so the result belongs to the calling thread.
    """
    if device.type == "cpu":
        return HostPasses()
    return (_fused(device) if device.type == "cuda" else None) or Passes(device)


@cache
def _fused(device: torch.device) -> Add | None:
    try:
        from unbroken.state.cuda_mixing import add_words, is_sound
    except ImportError:  # no Triton in this build of torch
        return None
    return add_words if is_sound(device) else None


class Passes:
    """The arithmetic as whole-chunk operations that every device has."""

    def __init__(self, device: torch.device, chunk_words: int | None = None) -> None:
        if chunk_words is None:
            chunk_words = CPU_CHUNK_WORDS if device.type == "cpu" else CUDA_CHUNK_WORDS
        self._chunk_words = chunk_words
        self._counting = torch.arange(chunk_words, dtype=torch.int64, device=device)
        self._mixed = torch.empty_like(self._counting)
        self._shifted = torch.empty_like(self._counting)

    def __call__(self, words: torch.Tensor, places: Places, keys: Keys, total: torch.Tensor, *, begin: int = 0) -> None:
        """Add a row of words, the first of which is word ``begin`` of ``places``, to ``total``."""
        for first in range(0, words.numel(), self._chunk_words):
            chunk = words[first : first + self._chunk_words]
            length = chunk.numel()
            mixed, shifted = self._mixed[:length], self._shifted[:length]
            self._place(mixed, shifted, begin + first, places, keys)
            mixed.add_(chunk, alpha=1 << 32)
            _fold(mixed, shifted)
            mixed.mul_(signed(FIRST))
            _fold(mixed, shifted)
            mixed.mul_(signed(SECOND))
            _fold(mixed, shifted)
            total[0] += mixed.sum()
            mixed.bitwise_xor_(signed(keys.second)).mul_(signed(THIRD))
            _fold(mixed, shifted)
            total[1] += mixed.sum()

    def _place(self, mixed: torch.Tensor, shifted: torch.Tensor, first: int, places: Places, keys: Keys) -> None:
        counting = self._counting[: mixed.numel()]
        if not places.jumps and not places.is_paged:
            torch.add(counting, signed(places.start + first + keys.first), out=mixed)
            return
        torch.add(counting, places.start + first, out=mixed)
        for period, jump in places.jumps:
            torch.add(counting, first, out=shifted)
            shifted.div_(period, rounding_mode="floor")
            mixed.add_(shifted, alpha=jump)
        if places.is_paged:
            # The place's high bits would fall onto the word's: they go into the key instead.
            torch.bitwise_right_shift(mixed, PAGE_BITS, out=shifted)
            mixed.add_(shifted, alpha=signed(PAGE - (1 << PAGE_BITS)))
        mixed.add_(signed(keys.first))


Numbers = npt.NDArray[np.uint64]
_MASK: Final = (1 << 64) - 1
_HALF: Final = np.uint64(32)


class HostPasses:
    """The same passes over memory of the host, by numpy: half as long as torch's, which has no unsigned shift."""

    def __init__(self, chunk_words: int | None = None) -> None:
        self._chunk_words = CPU_CHUNK_WORDS if chunk_words is None else chunk_words
        self._counting: Numbers = np.arange(self._chunk_words, dtype=np.uint64)
        self._mixed = np.empty_like(self._counting)
        self._shifted = np.empty_like(self._counting)

    def __call__(self, words: torch.Tensor, places: Places, keys: Keys, total: torch.Tensor, *, begin: int = 0) -> None:
        """Add a row of words, the first of which is word ``begin`` of ``places``, to ``total``."""
        row, first_sum, second_sum = words.numpy(), 0, 0
        for first in range(0, len(row), self._chunk_words):
            chunk = row[first : first + self._chunk_words]
            mixed, shifted = self._mixed[: len(chunk)], self._shifted[: len(chunk)]
            self._place(mixed, shifted, begin + first, places, keys)
            # The word belongs into the upper half, and adding it there carries into nothing.
            upper = mixed.view(np.int32)[_UPPER::2]
            np.add(upper, chunk, out=upper)
            _mix_here(mixed, shifted)
            first_sum += int(mixed.sum())
            np.bitwise_xor(mixed, np.uint64(keys.second), out=mixed)
            np.multiply(mixed, np.uint64(THIRD), out=mixed)
            _fold_here(mixed, shifted)
            second_sum += int(mixed.sum())
        total += torch.tensor([signed(first_sum), signed(second_sum)], device="cpu")

    def _place(self, mixed: Numbers, shifted: Numbers, first: int, places: Places, keys: Keys) -> None:
        counting = self._counting[: len(mixed)]
        if not places.jumps and not places.is_paged:
            np.add(counting, np.uint64((places.start + first + keys.first) & _MASK), out=mixed)
            return
        np.add(counting, np.uint64(places.start + first), out=mixed)
        for period, jump in places.jumps:
            np.add(counting, np.uint64(first), out=shifted)
            np.floor_divide(shifted, np.uint64(period), out=shifted)
            np.multiply(shifted, np.uint64(jump), out=shifted)
            np.add(mixed, shifted, out=mixed)
        if places.is_paged:
            # As above: the place's high bits go into the key.
            np.right_shift(mixed, np.uint64(PAGE_BITS), out=shifted)
            np.multiply(shifted, np.uint64((PAGE - (1 << PAGE_BITS)) & _MASK), out=shifted)
            np.add(mixed, shifted, out=mixed)
        np.add(mixed, np.uint64(keys.first & _MASK), out=mixed)


_UPPER: Final = 1 if sys.byteorder == "little" else 0


class ShortRows:
    """Short rows of words in host memory, many tensors in the passes of one chunk.

    A hundred thousand tensors of a few elements would otherwise start the passes a hundred thousand times. ``keys`` and
    ``sums`` have one line a tensor; the places of a row follow each other without a jump, on one page.
    """

    def __init__(self, keys: Numbers, sums: Numbers) -> None:
        self._keys, self._sums = keys, sums
        self._words: list[npt.NDArray[Any]] = []
        self._begins: list[int] = []
        self._lines: list[int] = []
        self._waiting = 0

    def add(self, words: torch.Tensor, begin: int, line: int) -> None:
        """Take a row of words, the first of which is word ``begin`` of the tensor of this line."""
        if not words.numel():
            return
        self._words.append(words.numpy())
        self._begins.append(begin)
        self._lines.append(line)
        self._waiting += words.numel()
        if self._waiting >= CPU_CHUNK_WORDS:
            self.flush()

    def flush(self) -> None:
        """Add what was taken to the sums."""
        if not self._words:
            return
        lengths = np.fromiter(map(len, self._words), dtype=np.int64, count=len(self._words))
        ends = np.cumsum(lengths)
        firsts = ends - lengths
        keys = self._keys[self._lines]
        # Counting runs on from row to row: each begins where its own count begins.
        begins = np.array(self._begins, dtype=np.uint64) + keys[:, 0] - firsts.astype(np.uint64)
        mixed = np.repeat(begins, lengths) + np.arange(ends[-1], dtype=np.uint64)
        shifted = np.empty_like(mixed)
        upper = mixed.view(np.int32)[_UPPER::2]
        np.add(upper, np.concatenate(self._words, dtype=np.int32), out=upper)
        _mix_here(mixed, shifted)
        np.add.at(self._sums[:, 0], self._lines, np.add.reduceat(mixed, firsts))
        np.bitwise_xor(mixed, np.repeat(keys[:, 1], lengths), out=mixed)
        np.multiply(mixed, np.uint64(THIRD), out=mixed)
        _fold_here(mixed, shifted)
        np.add.at(self._sums[:, 1], self._lines, np.add.reduceat(mixed, firsts))
        self._words, self._begins, self._lines, self._waiting = [], [], [], 0


def is_short(words: torch.Tensor, places: Places) -> bool:
    """Whether a row of words in host memory is one for ``ShortRows``."""
    return words.numel() <= SHORT_WORDS and not places.jumps and not places.is_paged


def _mix_here(mixed: Numbers, shifted: Numbers) -> None:
    _fold_here(mixed, shifted)
    np.multiply(mixed, np.uint64(FIRST), out=mixed)
    _fold_here(mixed, shifted)
    np.multiply(mixed, np.uint64(SECOND), out=mixed)
    _fold_here(mixed, shifted)


def _fold_here(mixed: Numbers, shifted: Numbers) -> None:
    np.right_shift(mixed, _HALF, out=shifted)
    np.bitwise_xor(mixed, shifted, out=mixed)


def _fold(mixed: torch.Tensor, shifted: torch.Tensor) -> None:
    # An arithmetic shift alone would make a number and its complement collide: the mask makes it a logical one.
    torch.bitwise_right_shift(mixed, 32, out=shifted)
    shifted.bitwise_and_(0xFFFFFFFF)
    mixed.bitwise_xor_(shifted)


def signed(number: int) -> int:
    """A number modulo 2**64, as int64 holds it."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number
