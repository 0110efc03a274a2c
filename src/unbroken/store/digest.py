"""Digests of parts, block by block.

A part is cut into blocks of 16 MiB; each block has an xxh3-128 digest. A part of one block has that block's digest, so
``xxh128sum`` gives the same value; a longer part has the digest of its blocks' digests laid end to end. Blocks make it
possible to name the bad bytes, to check a sample, and to check one large part on every core. The hash is chosen
for speed against accidents, not against forgers: see ``docs/decisions/003-digest.md``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import xxhash

ALGORITHM: Final = "xxh3-128"
BLOCK_BYTES: Final = 16 << 20
DIGEST_BYTES: Final = 16
HEX_LENGTH: Final = 2 * DIGEST_BYTES


def digest_bytes(data: bytes | memoryview) -> bytes:
    """The digest of one block; runs without the interpreter lock, so threads add up."""
    return xxhash.xxh3_128_digest(data)


@dataclass(frozen=True)
class PartDigest:
    """What is known of a part's bytes: how many there are, and the digest of each block."""

    size_bytes: int
    blocks: tuple[bytes, ...]

    @property
    def whole(self) -> str:
        """The part's one digest, in hex."""
        return self.blocks[0].hex() if len(self.blocks) == 1 else digest_bytes(b"".join(self.blocks)).hex()


class BlockDigester:
    """Digests a stream of buffers of any size, block by block."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[bytes] = []
        self._open = xxhash.xxh3_128()
        self._room = block_bytes
        self._size_bytes = 0

    def update(self, data: memoryview) -> None:
        """Take the next bytes of the part."""
        self._size_bytes += len(data)
        while len(data):
            piece, data = data[: self._room], data[self._room :]
            if len(piece) == self._block_bytes:
                # A whole block at once runs without the interpreter lock; the streaming form would hold it.
                self._blocks.append(digest_bytes(piece))
                continue
            self._open.update(piece)
            self._room -= len(piece)
            if self._room == 0:
                self._close_block()

    def _close_block(self) -> None:
        self._blocks.append(self._open.digest())
        self._open = xxhash.xxh3_128()
        self._room = self._block_bytes

    def finish(self) -> PartDigest:
        """The digest of all that was taken; an empty part has one empty block."""
        if self._room < self._block_bytes or not self._blocks:
            self._close_block()
        return PartDigest(self._size_bytes, tuple(self._blocks))


def digest_of(chunks: Iterable[bytes | memoryview], block_bytes: int = BLOCK_BYTES) -> PartDigest:
    """The digest of bytes that are at hand."""
    digester = BlockDigester(block_bytes)
    for chunk in chunks:
        digester.update(memoryview(chunk).cast("B"))
    return digester.finish()


def block_ranges(size_bytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """The (start, end) of each block of a part; an empty part has one empty block."""
    start = 0
    while True:
        yield start, min(start + block_bytes, size_bytes)
        start += block_bytes
        if start >= size_bytes:
            return
