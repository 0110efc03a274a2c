"""Writing and reading one part, its bytes digested on the way.

The digest is computed from the same buffer that the kernel writes, and a reader gets a block only after its digest is
verified.
"""

import ctypes
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from threading import local
from typing import TYPE_CHECKING, Final

from unbroken.errors import DamagedCheckpoint, NoMemory
from unbroken.files import Files, aligned_memory, aligned_size
from unbroken.store.digest import BLOCK_BYTES, BlockDigester, block_ranges, digest_bytes
from unbroken.store.manifest import Manifest, Part

if TYPE_CHECKING:
    from concurrent.futures import Executor

_WORTH_A_THREAD_BYTES: Final = 1 << 20


def write_part(
    files: Files, directory: Path, name: str, chunks: Iterable[bytes | memoryview], *, is_large: bool = False
) -> Part:
    """Write one part durably into a draft's directory; returns the evidence for the commit.

    A large one goes past the page cache where the file system lets it: half again as fast from a few files, and what
    the machine has cached stays there.

    Raises:
        StorageFailed: I/O error; no part is left.
        NoMemory: there is none for the blocks of a large part; no part is left.
    """
    # Imported here: readers, `status` among them, need no threads.
    from concurrent.futures import ThreadPoolExecutor

    digester = BlockDigester()
    with ThreadPoolExecutor(1, thread_name_prefix="unbroken-digest") as pool:
        pieces = _blocks_ahead(chunks, digester, pool) if is_large else _digested(chunks, digester, pool)
        files.write_new(directory / name, pieces, is_direct=is_large)
    return Part(name, digester.finish())


def _blocks_ahead(
    chunks: Iterable[bytes | memoryview], digester: BlockDigester, pool: "Executor"
) -> Iterator[memoryview]:
    """The same bytes in whole blocks, each put together and digested while the one before it is written."""
    blocks = _in_blocks(chunks)

    def make_next() -> memoryview | None:
        block = next(blocks, None)
        if block is not None:
            digester.update(block)
        return block

    coming = pool.submit(make_next)
    while (block := coming.result()) is not None:
        coming = pool.submit(make_next)
        yield block


def _digested(
    chunks: Iterable[bytes | memoryview], digester: BlockDigester, pool: "Executor"
) -> Iterator[bytes | memoryview]:
    """Write and digest each piece at the same time; both release the interpreter lock."""
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):
            piece = view[start : start + BLOCK_BYTES]
            if len(piece) < _WORTH_A_THREAD_BYTES:
                digester.update(piece)
                yield piece
                continue
            pending = pool.submit(digester.update, piece)
            yield piece
            # The caller may reuse its buffer for the next chunk, so the digest must be done with this one.
            pending.result()


def _in_blocks(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The same bytes, block by block, in two buffers in turn that a disk can read from: one is written meanwhile."""
    try:
        block, other, filled = aligned_memory(BLOCK_BYTES), aligned_memory(BLOCK_BYTES), 0
    except OSError as refused:
        # An error of the system, but none of the disk.
        raise NoMemory(needed_bytes=2 * BLOCK_BYTES, cause=refused.strerror or str(refused)) from refused
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while len(rest):
            taken = min(len(rest), BLOCK_BYTES - filled)
            _copy(rest[:taken], block[filled : filled + taken])
            rest, filled = rest[taken:], filled + taken
            if filled == BLOCK_BYTES:
                yield block
                block, other, filled = other, block, 0
    if filled:
        yield block[:filled]


def _copy(source: memoryview, target: memoryview) -> None:
    if source.readonly or len(source) < _WORTH_A_THREAD_BYTES:
        target[:] = source
        return
    # An assignment would hold the interpreter lock, and with it the training loop.
    kept = [ctypes.c_char.from_buffer(each) for each in (target, source)]
    ctypes.memmove(ctypes.addressof(kept[0]), ctypes.addressof(kept[1]), len(source))


class BlockReader:
    """Reads blocks, each thread into a buffer of its own: fresh pages cost more than the digest does.

    Past the page cache, unless others read the same blocks (``is_shared``): then the disk is asked once for all.
    """

    def __init__(
        self,
        files: Files,
        longest_bytes: int,
        make_buffer: Callable[[int], memoryview] = aligned_memory,
        *,
        is_shared: bool = False,
    ) -> None:
        self._files = files
        self._is_shared = is_shared
        self._longest_bytes = longest_bytes
        self._make_buffer = make_buffer
        self._own = local()

    def read(self, path: Path, start: int, end: int) -> memoryview:
        """The bytes of a range, fewer at the end of the file; valid until this thread's next read.

        Raises:
            StorageFailed: I/O error.
        """
        if not hasattr(self._own, "buffer"):
            self._own.buffer = self._make_buffer(aligned_size(self._longest_bytes))
        buffer: memoryview = self._own.buffer
        with self._files.reading(path) as source:
            wanted = end - start
            if self._is_shared:
                return buffer[: source.fill(start, buffer[:wanted])]
            return buffer[: source.fill_direct(start, wanted, buffer)]


def read_part(files: Files, directory: Path, manifest: Manifest, part: Part) -> Generator[memoryview, None, None]:
    """The bytes of one part, block by block, each verified before it is yielded.

    The buffer is reused: a block is valid until the next one is read.

    Raises:
        DamagedCheckpoint: a block is not what was written.
        StorageFailed: I/O error.
    """
    path = directory / part.name
    buffer = memoryview(bytearray(min(manifest.block_bytes, max(part.size_bytes, 1))))
    with files.reading(path) as source:
        for (start, end), expected in zip(
            block_ranges(part.size_bytes, manifest.block_bytes), part.digest.blocks, strict=True
        ):
            block = buffer[: source.fill(start, buffer[: end - start])]
            require_block(directory, part.name, (start, end), block, expected)
            yield block


def read_whole(files: Files, directory: Path, manifest: Manifest, name: str) -> bytes | None:
    """All bytes of the part of this name, verified; None if the manifest names no such part.

    Raises:
        DamagedCheckpoint: a block is not what was written.
        StorageFailed: I/O error.
    """
    part = next((part for part in manifest.parts if part.name == name), None)
    return None if part is None else b"".join(map(bytes, read_part(files, directory, manifest, part)))


def require_block(directory: Path, part: str, place: tuple[int, int], block: memoryview, expected: bytes) -> None:
    """Pass if a block of a part, from one byte to another, is what was written.

    Raises:
        DamagedCheckpoint: it is not.
    """
    start, end = place
    if len(block) != end - start or digest_bytes(block) != expected:
        finding = f"{part}: bytes {start:,} to {end:,} are not the bytes that were written"
        raise DamagedCheckpoint(path=directory, findings=(finding,))
