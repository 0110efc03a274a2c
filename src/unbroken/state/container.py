"""The file around a tensor: the bytes that ``torch.save`` puts before and after the elements.

A container is written here record by record and not by torch, so that it takes neither the memory of its tensor nor a
torch mode in the save thread, and has the same bytes in every version of torch. They are those that torch 2.13 writes
under ``skip_data``: a zip archive without compression, the pickle of one tensor, and the elements aligned to 64 bytes.
``torch.load`` reads it; so do stock readers of distributed checkpoints.
"""

import collections
import io
import math
import pickle
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from unbroken import torch_private

# The storages that the pickle of a tensor names; a dtype that is newer than these is named itself, beside plain bytes.
_STORAGES: Final[Mapping[torch.dtype, Any]] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


@dataclass(frozen=True)
class Container:
    """The bytes before and after the elements of a tensor."""

    head: bytes
    tail: bytes


@lru_cache(maxsize=1 << 14)
def container(dtype: torch.dtype, shape: tuple[int, ...]) -> Container:
    """The container of a contiguous tensor; the same for the same dtype and shape."""
    size_bytes = math.prod(shape) * dtype.itemsize
    archive = _Archive()
    archive.add("data.pkl", _pickled(dtype, shape))
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(_ALIGNMENT_BYTES).encode())
    archive.add("byteorder", sys.byteorder.encode())
    head = archive.leave_out("data/0", size_bytes)
    archive.add("version", b"3\n")
    archive.add(".data/serialization_id", archive.serialization_id())
    tail = archive.finish()
    # Without elements nothing is left out, and all bytes are before.
    return Container(head, tail) if size_bytes else Container(head + tail, b"")


# ---- the pickle ----


class _Elements(NamedTuple):
    storage: Any
    numel: int


class _Tensor:
    """Pickled as the tensor that it describes."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        numel = math.prod(self._shape)
        strides = tuple(math.prod(max(size, 1) for size in self._shape[dim + 1 :]) for dim in range(len(self._shape)))
        hooks: collections.OrderedDict[str, object] = collections.OrderedDict()
        placed = (0, self._shape, strides, False, hooks)
        storage = _STORAGES.get(self._dtype)
        if storage is not None:
            return torch_private.rebuild_tensor_v2, (_Elements(storage, numel), *placed)
        elements = _Elements(torch.UntypedStorage, numel * self._dtype.itemsize)
        return torch_private.rebuild_tensor_v3, (elements, *placed, self._dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        return ("storage", value.storage, "0", "cpu", value.numel) if isinstance(value, _Elements) else None


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    written = io.BytesIO()
    _Pickler(written, protocol=2).dump(_Tensor(dtype, shape))
    return written.getvalue()


# ---- the archive ----

_ALIGNMENT_BYTES: Final = 64
_LIMIT: Final = 0xFFFFFFFF
_NAMES_ARE_UTF8, _SIZES_FOLLOW = 1 << 11, 1 << 3
# torch makes the id of a file from a hash of the names of its records, which are always these, and their checksums.
_HASH_OF_NAMES: Final = 15728199511854643026


class _Record(NamedTuple):
    name: bytes
    flags: int
    crc: int
    size_bytes: int
    at: int


class _Archive:
    """A zip archive as torch writes it: nothing compressed, no dates, the sizes of a record after its bytes."""

    def __init__(self) -> None:
        self._written = bytearray()
        self._position = 0
        self._records: list[_Record] = []

    def add(self, name: str, data: bytes) -> None:
        """Write a record."""
        self._begin(name, len(data), zlib.crc32(data))
        self._write(data)
        self._end()

    def leave_out(self, name: str, size_bytes: int) -> bytes:
        """Describe a record whose bytes are written elsewhere; returns all bytes before them. Its checksum is 0."""
        self._begin(name, size_bytes, 0)
        self._position += size_bytes
        before, self._written = bytes(self._written), bytearray()
        self._end()
        return before

    def serialization_id(self) -> bytes:
        """The id that torch gives to a file with these records."""
        combined = 0
        for record in (each for each in self._records if each.size_bytes):
            mixed = record.crc + 0x9E3779B9 + (combined << 6) + (combined >> 2)
            combined = (combined ^ mixed) & 0xFFFFFFFFFFFFFFFF
        return b"%020d%020d" % (_HASH_OF_NAMES, combined)

    def finish(self) -> bytes:
        """Write the directory of the archive; returns all bytes since those that were left out."""
        begins, zip64_version = self._position, 45
        for record in self._records:
            self._write(_directory_entry(record))
        size, at, count = self._position - begins, self._position, len(self._records)
        self._write(b"PK\6\6" + struct.pack("<Q2H2I4Q", 44, 0x031E, zip64_version, 0, 0, count, count, size, begins))
        self._write(b"PK\6\7" + struct.pack("<IQI", 0, at, 1))
        self._write(b"PK\5\6" + struct.pack("<4H2IH", 0, 0, count, count, min(size, _LIMIT), min(begins, _LIMIT), 0))
        return bytes(self._written)

    def _begin(self, name: str, size_bytes: int, crc: int) -> None:
        path = f"archive/{name}".encode()
        flags = _NAMES_ARE_UTF8 | (_SIZES_FOLLOW if size_bytes else 0)
        self._records.append(_Record(path, flags, crc, size_bytes, self._position))
        # The second size, that of the compressed bytes, is in the descriptor after them.
        large = _zip64([size_bytes, 0] if size_bytes >= _LIMIT else [], self._position)
        fixed_bytes, padding_header_bytes = 30, 4
        begins = self._position + fixed_bytes + len(path) + len(large) + padding_header_bytes
        padding = -begins % _ALIGNMENT_BYTES
        extra = large + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        self._write(
            b"PK\3\4" + struct.pack("<5H3I2H", 0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra)) + path + extra
        )

    def _end(self) -> None:
        record = self._records[-1]
        if record.size_bytes:
            sizes = "2Q" if max(record.size_bytes, record.at) >= _LIMIT else "2I"
            self._write(b"PK\7\10" + struct.pack(f"<I{sizes}", record.crc, record.size_bytes, record.size_bytes))

    def _write(self, data: bytes) -> None:
        self._written += data
        self._position += len(data)


def _directory_entry(record: _Record) -> bytes:
    name, flags, crc, size_bytes, at = record
    extra = _zip64([size_bytes] * 2 if size_bytes >= _LIMIT else [], at)
    size, at = min(size_bytes, _LIMIT), min(at, _LIMIT)
    fixed = struct.pack("<6H3I5H2I", 0, 0, flags, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, at)
    return b"PK\1\2" + fixed + name + extra


def _zip64(sizes: Sequence[int], at: int) -> bytes:
    """The field for numbers that have no room in a header."""
    numbers = [*sizes, at] if at >= _LIMIT else sizes
    return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
