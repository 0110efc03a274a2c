"""Writing and reading one part, its bytes digested on the way.

The digest is computed from the same buffer that the kernel writes, and a reader gets a block only after its digest is
verified.
"""

from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from threading import local
from typing import TYPE_CHECKING, Final

from unbroken.errors import DamagedCheckpoint
from unbroken.files import Files
from unbroken.store.digest import BLOCK_BYTES, BlockDigester, block_ranges, digest_bytes
from unbroken.store.manifest import Manifest, Part

if TYPE_CHECKING:
    from concurrent.futures import Executor

_WORTH_A_THREAD_BYTES: Final = 1 << 20


def write_part(files: Files, directory: Path, name: str, chunks: Iterable[bytes | memoryview]) -> Part:
    """Write one part durably into a draft's directory; returns the evidence for the commit.

    Raises:
        StorageFailed: I/O error; no part is left.
    """
    # Imported here: readers, `status` among them, need no threads.
    from concurrent.futures import ThreadPoolExecutor

    digester = BlockDigester()
    with ThreadPoolExecutor(1, thread_name_prefix="unbroken-digest") as pool:
        files.write_new(directory / name, _digested(chunks, digester, pool))
    return Part(name, digester.finish())


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


class BlockReader:
    """Reads blocks, each thread into a buffer of its own: fresh pages cost more than the digest does."""

    def __init__(self, files: Files, longest_bytes: int) -> None:
        self._files = files
        self._longest_bytes = longest_bytes
        self._own = local()

    def read(self, path: Path, start: int, end: int) -> memoryview:
        """The bytes of a range, fewer at the end of the file; valid until this thread's next read.

        Raises:
            StorageFailed: I/O error.
        """
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(bytearray(self._longest_bytes))
        buffer: memoryview = self._own.buffer
        with self._files.reading(path) as source:
            return buffer[: source.fill(start, buffer[: end - start])]


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
