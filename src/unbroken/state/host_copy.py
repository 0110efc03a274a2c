"""Copies of tensors that are in host memory, with checksums of their sources.

At a step's edge each source is copied and its checksum taken; before the commit the copies must still have these
checksums. So a bit that flips on the way into a copy, or in it, is found. A write by another thread or process is found
too: where there are any, the checksums are taken after the last copy, so that copies that agree with them are all of
one moment. Where there are none, they are taken of each stretch while it is in the cache, which costs next to nothing.
"""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

Bytes = npt.NDArray[np.uint8]
# Small enough for the second-level cache of a core, large enough that an interpreter between two of them costs little.
AT_A_TIME_BYTES: Final = 1 << 20
# More threads find no more bandwidth.
_MOST_THREADS: Final = 8
# Less is copied before another thread has started.
_WORTH_A_THREAD_BYTES: Final = 32 << 20
# The threads of this package; none of them writes to a tensor of the training loop.
_OWN_THREADS: Final = ("unbroken-", "tracker ")


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of their width, so that a copy moves bits and never looks at a number."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.itemsize])


def copy_bits(source: torch.Tensor, stretches: Sequence[torch.Tensor]) -> None:
    """Copy a tensor of any layout and device to one or more stretches of host memory, row by row."""
    if not stretches:
        return
    bits = as_bits(source)
    if len(stretches) == 1:
        stretches[0].view(bits.dtype).view(bits.shape).copy_(bits, non_blocking=True)
        return
    flat, position = bits.reshape(-1), 0
    for stretch in stretches:
        into = stretch.view(bits.dtype)
        into.copy_(flat[position : position + into.numel()], non_blocking=True)
        position += into.numel()


class Source(NamedTuple):
    """A tensor in host memory, and the stretches that it is copied to, whole and in parts."""

    name: str
    tensor: torch.Tensor
    stretches: tuple[torch.Tensor, ...]
    parts: Sequence[Bytes]


@dataclass(frozen=True)
class Checksums:
    """Every stretch that was copied: whose it is, where, and the checksum that it must have."""

    names: list[str] = field(default_factory=list)
    copies: list[Bytes] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)

    def __add__(self, other: "Checksums") -> "Checksums":
        return Checksums(self.names + other.names, self.copies + other.copies, self.expected + other.expected)

    def changed(self) -> tuple[str, ...]:
        """The tensors whose copies are not what the sources were when they were copied."""
        rows = zip(self.names, self.copies, self.expected, strict=True)
        return tuple(sorted({name for name, copy, expected in rows if _checksum(copy) != expected}))


def cut(stretches: Sequence[torch.Tensor]) -> list[Bytes]:
    """Stretches of memory as parts that stay in the cache between the copy and the checksum."""
    whole = [stretch.numpy() for stretch in stretches]
    return [
        part
        for each in whole
        for part in (
            [each]
            if len(each) <= AT_A_TIME_BYTES
            else [each[at : at + AT_A_TIME_BYTES] for at in range(0, len(each), AT_A_TIME_BYTES)]
        )
    ]


def copy_checked(sources: Sequence[Source]) -> Checksums:
    """Copy tensors in host memory, and take the checksums of what they were."""
    are_watched = others_may_write(source.tensor for source in sources)
    plain, strided = _Rows(), []
    for source in sources:
        flat = _flat_bytes(source.tensor)
        if flat is None:
            strided.append(source)
        else:
            plain.add(source, flat)
    for source in strided:
        copy_bits(source.tensor, source.stretches)
    found = plain.done([(True, False), (False, True)] if are_watched else [(True, True)])
    for source in strided:
        # Laid out a second time, and not taken from the copy that it is to prove.
        laid_out = as_bits(source.tensor).clone(memory_format=torch.contiguous_format).reshape(-1)
        rows = _Rows()
        rows.add(source, laid_out.view(torch.uint8).numpy())
        found += rows.done([(False, True)])
    return found


def others_may_write(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether another thread of this process, or another process, may write to these tensors while they are copied.

    Threads that Python does not know, of a library in another language, are not seen.
    """
    mine = threading.current_thread()
    if any(thread is not mine and not thread.name.startswith(_OWN_THREADS) for thread in threading.enumerate()):
        return True
    return any(tensor.untyped_storage().is_shared() for tensor in tensors)


def _flat_bytes(tensor: torch.Tensor) -> Bytes | None:
    """The memory of a tensor as it is; None where its elements do not lie there in their order, or not as they read."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    flat = (tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)).reshape(-1)
    # A single element counts as contiguous whatever its stride, but cannot be viewed as bytes.
    return flat.view(torch.uint8).numpy() if flat.numel() and flat.stride(0) == 1 else None


class _Rows:
    """Stretches of sources and their copies, one beside the other."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sources: list[Bytes] = []
        self.copies: list[Bytes] = []

    def add(self, source: Source, flat: Bytes) -> None:
        """The bytes of a source, cut as their copies are."""
        name, _, _, parts = source
        if len(parts) == 1 and len(parts[0]) == len(flat):
            self.names.append(name)
            self.copies.append(parts[0])
            self.sources.append(flat)
            return
        ends = list(accumulate(map(len, parts), initial=0))
        if ends[-1] != len(flat):
            raise RuntimeError(f"{name} has {len(flat)} bytes; the plan was made for {ends[-1]}")
        self.names += [name] * len(parts)
        self.copies += parts
        self.sources += [flat[at:end] for at, end in pairwise(ends)]

    def done(self, passes: Sequence[tuple[bool, bool]]) -> Checksums:
        """Go over all rows, once or twice: whether a pass copies them, and whether it takes their checksums."""
        found = Checksums(self.names, self.copies, [0] * len(self.names))
        total_bytes = sum(copy.nbytes for copy in self.copies)
        # As many as the loop computes with, which is paused.
        threads = min(torch.get_num_threads(), _MOST_THREADS, 1 + total_bytes // _WORTH_A_THREAD_BYTES)

        def work(first: int, *, copies: bool, checks: bool) -> None:
            for number in range(first, len(self.sources), threads):
                source = self.sources[number]
                if copies:
                    np.copyto(self.copies[number], source)
                if checks:
                    found.expected[number] = _checksum(source)

        with ThreadPoolExecutor(threads, thread_name_prefix="unbroken-copy") as pool:
            for copies, checks in passes:
                # The caller is one of them.
                others = [pool.submit(work, first, copies=copies, checks=checks) for first in range(1, threads)]
                work(0, copies=copies, checks=checks)
                for other in others:
                    other.result()
        return found


def _checksum(data: Bytes) -> int:
    # Without the interpreter lock.
    return xxhash.xxh3_64_intdigest(data.data)
