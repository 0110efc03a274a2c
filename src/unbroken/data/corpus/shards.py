"""The shard format: a ``.bin`` of token ids and an ``.idx`` with the offset and masked prefix of each entry.

``open_index`` checks header and size of an index, ``map_tokens`` memory-maps the tokens, ``write_shard`` writes both
files durably, the index last, and ``read_content`` reads a whole ``.bin`` for its digest and highest id.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unbroken.disk import NodeKind
from unbroken.errors import ShardDamaged
from unbroken.files import LOCAL, Files, storage_errors
from unbroken.store.digest import BLOCK_BYTES, BlockDigester, PartDigest
from unbroken.store.manifest import Part
from unbroken.store.parts import write_part

BIN_SUFFIX: Final = ".bin"
IDX_SUFFIX: Final = ".idx"
SCRATCH_PREFIX: Final = ".writing-"
MAGIC: Final = b"GPTS"
VERSION: Final = 1
LONGEST_PREFIX: Final = (1 << 16) - 1
MOST_ENTRIES: Final = (1 << 32) - 1
_HEADER: Final = struct.Struct("<4sIII")
_OFFSET: Final[np.dtype[Any]] = np.dtype("<i8")
_PREFIX: Final[np.dtype[Any]] = np.dtype("<u2")
_TOKENS: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_FIRST_WIDE_VOCABULARY: Final = 1 << 16
# Entries read at a time when a whole index is checked.
_STRETCH_ENTRIES: Final = 1 << 18

Tokens = NDArray[np.unsignedinteger[Any]]


def token_bytes_for(vocab_size: int) -> int:
    """Bytes per token id in shards of a vocabulary: 2, or 4 from 65,536 ids on."""
    return 2 if vocab_size < _FIRST_WIDE_VOCABULARY else 4


def bin_beside(idx_path: Path) -> Path:
    """The ``.bin`` that belongs to an ``.idx``."""
    return idx_path.with_name(idx_path.name.removesuffix(IDX_SUFFIX) + BIN_SUFFIX)


class _Counted:
    """A shard with known counts, and therefore known file sizes."""

    token_bytes: int
    entries: int
    tokens: int

    @property
    def bin_bytes(self) -> int:
        """The bytes of the ``.bin``."""
        return self.tokens * self.token_bytes

    @property
    def idx_bytes(self) -> int:
        """The bytes of the ``.idx``."""
        return _index_bytes(self.entries)


@dataclass(frozen=True)
class ShardIndex(_Counted):
    """An ``.idx`` with a valid header and size; its numbers are read in ranges, never all at once."""

    path: Path
    token_bytes: int
    entries: int
    tokens: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the tokens in the ``.bin``."""
        return _TOKENS[self.token_bytes]

    def offsets(self, first: int, last: int) -> NDArray[np.int64]:
        """The start of the entries ``first`` to ``last`` in tokens, and the end of the last.

        Raises:
            ShardDamaged: the offsets decrease, or exceed the ``.bin``.
            StorageFailed: an I/O error.
            IndexError: there are no such entries.
        """
        found = self._read(_HEADER.size, _OFFSET, first, last, extra=1).astype(np.int64, copy=False)
        if found[0] < 0 or found[-1] > self.tokens or (found[1:] < found[:-1]).any():
            raise ShardDamaged(path=self.path, complaint=self._disorder(found, first))
        return found

    def prefixes(self, first: int, last: int) -> NDArray[np.uint16]:
        """The masked prefix of each entry: its first tokens that repeat the previous entry.

        Raises:
            ShardDamaged: the file is too short.
            StorageFailed: an I/O error.
            IndexError: there are no such entries.
        """
        start = _HEADER.size + _OFFSET.itemsize * (self.entries + 1)
        return self._read(start, _PREFIX, first, last, extra=0).astype(np.uint16, copy=False)

    def digest(self) -> str:
        """The digest of the whole file, read block by block.

        Raises:
            StorageFailed: an I/O error.
        """
        return digest_file(self.path).whole

    def require_sound(self) -> None:
        """Read the whole index and raise unless entries are in order and not shorter than their prefix.

        Raises:
            ShardDamaged: offsets decrease, or a prefix is longer than its entry.
            StorageFailed: an I/O error.
        """
        for first in range(0, self.entries, _STRETCH_ENTRIES):
            last = min(first + _STRETCH_ENTRIES, self.entries)
            lengths = np.diff(self.offsets(first, last))
            prefixes = self.prefixes(first, last)
            if (over := np.flatnonzero(prefixes > lengths)).size:
                where = int(over[0])
                complaint = (
                    f"entry {first + where:,} has {int(lengths[where]):,} tokens but a prefix of "
                    f"{int(prefixes[where]):,}"
                )
                raise ShardDamaged(path=self.path, complaint=complaint)

    def _read(self, start: int, dtype: np.dtype[Any], first: int, last: int, *, extra: int) -> NDArray[Any]:
        if not 0 <= first <= last <= self.entries:
            raise IndexError(f"entries {first} to {last} of {self.entries} in {self.path}")
        found = np.empty(last - first + extra, dtype)
        with LOCAL.reading(self.path) as source:
            taken = source.fill(start + first * dtype.itemsize, _bytes_of(found))
        if taken != found.nbytes:
            raise ShardDamaged(path=self.path, complaint="it became shorter after it was opened")
        return found

    def _disorder(self, offsets: NDArray[np.int64], first: int) -> str:
        falls = np.flatnonzero(offsets[1:] < offsets[:-1])
        if falls.size:
            entry = int(falls[0])
            return (
                f"entry {first + entry:,} starts at token {int(offsets[entry]):,} but ends before it, "
                f"at token {int(offsets[entry + 1]):,}"
            )
        return f"its offsets exceed its {self.tokens:,} tokens"


def open_index(path: Path) -> ShardIndex:
    """Open an index and check its header, size and outer offsets.

    Raises:
        ShardDamaged: it is not an index, of another version, or its size does not match its header.
        StorageFailed: an I/O error, or the file does not exist.
    """
    found = LOCAL.find(path)
    size_bytes = found.size_bytes if found and found.kind is NodeKind.FILE else 0
    header = bytearray(_HEADER.size)
    with LOCAL.reading(path) as source:
        taken = source.fill(0, memoryview(header))
    if taken < _HEADER.size:
        raise ShardDamaged(path=path, complaint=f"its {taken:,} bytes are too few for a header of {_HEADER.size}")
    magic, version, token_bytes, entries = _HEADER.unpack(header)
    complaint = _header_complaint(magic, version, token_bytes)
    if not complaint and size_bytes != _index_bytes(entries):
        complaint = f"it has {size_bytes:,} bytes; {entries:,} entries take {_index_bytes(entries):,}"
    if complaint:
        raise ShardDamaged(path=path, complaint=complaint)
    return ShardIndex(path, token_bytes, entries, _total(path, entries))


def _header_complaint(magic: bytes, version: int, token_bytes: int) -> str | None:
    if magic != MAGIC:
        return f"it begins with {magic!r}, not with {MAGIC!r}"
    if version != VERSION:
        return f"its version is {version:,}; this version reads {VERSION}"
    if token_bytes not in _TOKENS:
        return f"its token type is {token_bytes:,}; only 2 and 4 are known"
    return None


def _total(path: Path, entries: int) -> int:
    ends = np.empty(2, _OFFSET)
    view = _bytes_of(ends)
    with LOCAL.reading(path) as source:
        source.fill(_HEADER.size, view[: _OFFSET.itemsize])
        source.fill(_HEADER.size + _OFFSET.itemsize * entries, view[_OFFSET.itemsize :])
    first, total = (int(end) for end in ends)
    if first != 0:
        raise ShardDamaged(path=path, complaint=f"its first entry starts at token {first:,}, not at 0")
    if total < 0:
        raise ShardDamaged(path=path, complaint=f"its last offset is {total:,}")
    return total


def map_tokens(bin_path: Path, index: ShardIndex) -> Tokens:
    """Memory-map the tokens of a shard read-only.

    Raises:
        ShardDamaged: the ``.bin`` is missing, or its size does not match its index.
        StorageFailed: an I/O error.
    """
    if complaint := bin_complaint(bin_path, index):
        raise ShardDamaged(path=bin_path, complaint=complaint)
    if not index.tokens:
        # An empty file cannot be mapped.
        return np.empty(0, index.dtype)
    with storage_errors("map", bin_path):
        return np.memmap(bin_path, index.dtype, mode="r", shape=(index.tokens,)).view(np.ndarray)


def bin_complaint(bin_path: Path, index: ShardIndex) -> str | None:
    """What is wrong with the size of a ``.bin``; None if nothing is.

    Raises:
        StorageFailed: an I/O error.
    """
    found = LOCAL.find(bin_path)
    if found is None:
        return "it is missing, but its index exists"
    if found.kind is not NodeKind.FILE:
        return "it is not a regular file"
    if found.size_bytes != index.bin_bytes:
        return f"it has {found.size_bytes:,} bytes; its index says {index.bin_bytes:,}"
    return None


def digest_file(path: Path) -> PartDigest:
    """The digest of a file, read block by block with one buffer.

    Raises:
        StorageFailed: an I/O error.
    """
    digester = BlockDigester()
    found = LOCAL.find(path)
    buffer = memoryview(bytearray(min(BLOCK_BYTES, max(found.size_bytes if found else 0, 1))))
    with LOCAL.reading(path) as source:
        offset = 0
        while taken := source.fill(offset, buffer):
            digester.update(buffer[:taken])
            offset += taken
    return digester.finish()


# ---- writing ----


@dataclass(frozen=True)
class Entries:
    """Consecutive entries: their tokens concatenated, their lengths, and their masked prefixes."""

    tokens: Tokens
    lengths: NDArray[np.int64]
    prefixes: NDArray[np.uint16]


@dataclass(frozen=True)
class ShardRecord(_Counted):
    """A written shard: name, counts, and digests of both files."""

    name: str
    entries: int
    tokens: int
    token_bytes: int
    bin_digest: str
    index_digest: str


def write_shard(
    files: Files, directory: Path, stem: str, entries: Iterable[Entries], *, token_bytes: int
) -> ShardRecord:
    """Write one shard durably; ``stem`` is its name inside ``directory``, which is created if needed.

    A shard of the same name is replaced. ``entries`` is consumed one item at a time, so a generator may reuse its
    arrays.

    Raises:
        StorageFailed: an I/O error; there is no shard of this name, or the old one.
        ValueError: a token does not fit, lengths and tokens disagree, or there are too many entries.
    """
    home, name = (directory / stem).parent, (directory / stem).name
    files.make_directory(home, durable=True)
    taken = _Taken(_TOKENS[token_bytes])
    # crash here: files under scratch names, which readers ignore and the next writer of this shard removes.
    tokens = _written(files, home, name + BIN_SUFFIX, taken.tokens_of(entries))
    index = _written(files, home, name + IDX_SUFFIX, taken.index())
    _withdraw(files, home / (name + IDX_SUFFIX))
    # crash here: a .bin without its .idx, which readers do not treat as a shard.
    for part in (tokens, index):
        files.publish(home / part.name, home / part.name.removeprefix(SCRATCH_PREFIX))
    return ShardRecord(stem, taken.entries, taken.tokens, token_bytes, tokens.digest.whole, index.digest.whole)


def _written(files: Files, home: Path, name: str, chunks: Iterable[memoryview]) -> Part:
    files.remove_file(home / (SCRATCH_PREFIX + name))
    return write_part(files, home, SCRATCH_PREFIX + name, chunks)


def _withdraw(files: Files, idx_path: Path) -> None:
    """Remove an old index durably: next to a new ``.bin`` of the same size it would look valid."""
    if files.find(idx_path) is not None:
        # crash here: the old .bin alone, which readers do not treat as a shard.
        files.remove_file(idx_path)
        files.sync_directory(idx_path.parent)


class _Taken:
    """The index of the entries written so far: 10 bytes for each."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.entries = 0
        self.tokens = 0
        self._dtype = dtype
        self._lengths: list[NDArray[np.int64]] = []
        self._prefixes: list[NDArray[Any]] = []

    def tokens_of(self, runs: Iterable[Entries]) -> Iterator[memoryview]:
        """The bytes of the ``.bin``."""
        for run in runs:
            self._note(run)
            yield _bytes_of(np.ascontiguousarray(run.tokens, self._dtype))

    def index(self) -> Iterator[memoryview]:
        """The bytes of the ``.idx``."""
        offsets = np.zeros(self.entries + 1, _OFFSET)
        if self._lengths:
            np.cumsum(np.concatenate(self._lengths), out=offsets[1:])
        yield memoryview(_HEADER.pack(MAGIC, VERSION, self._dtype.itemsize, self.entries))
        yield _bytes_of(offsets)
        for prefixes in self._prefixes:
            yield _bytes_of(prefixes)

    def _note(self, run: Entries) -> None:
        lengths = np.array(run.lengths, np.int64)
        if len(run.prefixes) != len(lengths) or int(lengths.sum()) != len(run.tokens):
            raise ValueError("lengths, prefixes and tokens of some entries disagree")
        if (lengths < run.prefixes).any():
            raise ValueError("a prefix is longer than its entry")
        if run.tokens.size and not 0 <= int(run.tokens.min()) <= int(run.tokens.max()) <= np.iinfo(self._dtype).max:
            raise ValueError(f"a token id does not fit into {self._dtype.itemsize} bytes")
        self.entries += len(lengths)
        self.tokens += len(run.tokens)
        if self.entries > MOST_ENTRIES:
            raise ValueError(f"a shard holds at most {MOST_ENTRIES:,} entries")
        self._lengths.append(lengths)
        self._prefixes.append(np.array(run.prefixes, _PREFIX))


def _index_bytes(entries: int) -> int:
    return _HEADER.size + _OFFSET.itemsize * (entries + 1) + _PREFIX.itemsize * entries


def _bytes_of(array: NDArray[Any]) -> memoryview:
    # An empty array cannot be cast to bytes.
    return array.data.cast("B") if array.size else memoryview(b"")


# ---- reading a shard whole ----


@dataclass(frozen=True)
class Content:
    """Digest and highest id of a ``.bin``; ``highest`` is -1 if it is empty."""

    digest: str
    highest: int

    def complaints(self, record: ShardRecord | None, vocab_size: int | None) -> Iterator[str]:
        """What is wrong with it, compared with its list and a vocabulary."""
        if record is not None and record.bin_digest != self.digest:
            yield f"its checksum is {self.digest}, {record.bin_digest} is listed"
        if vocab_size is not None and self.highest >= vocab_size:
            yield f"it holds token id {self.highest:,}; the vocabulary has {vocab_size:,}"


def read_content(bin_path: Path, index: ShardIndex, files: Files = LOCAL) -> Content:
    """Read every token of a shard once, block by block.

    Raises:
        StorageFailed: an I/O error.
    """
    digester = BlockDigester()
    highest = -1
    buffer = memoryview(bytearray(min(BLOCK_BYTES, max(index.bin_bytes, index.token_bytes))))
    with files.reading(bin_path) as source:
        offset = 0
        while taken := source.fill(offset, buffer):
            digester.update(buffer[:taken])
            tokens = np.frombuffer(buffer[: taken - taken % index.token_bytes], index.dtype)
            highest = max(highest, int(tokens.max(initial=0)))
            offset += taken
    return Content(digester.finish().whole, highest)
