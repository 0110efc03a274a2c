"""How fast and with how much memory bytes move to and from a mirror, and how they are read for it.

Memory is bounded by what is on its way: so many pieces of so many objects. Bandwidth is bounded by one clock that all
threads of a mirror share. Whoever reads a local part for an upload checks it against the manifest, so that rot on the
local disk never becomes the second copy. Pieces are read ahead, and hashed by several threads while they are sent, in
buffers that are used again: fresh memory for each piece costs as much as its checksum.
"""

import contextlib
import hashlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from unbroken.errors import DamagedCheckpoint, StorageFailed
from unbroken.files import Source
from unbroken.mirror.client import piece_bytes
from unbroken.store.digest import BLOCK_BYTES, BlockDigester, PartDigest
from unbroken.store.directory import Store
from unbroken.store.manifest import Manifest, Part
from unbroken.store.names import MANIFEST

MEMORY_BYTES: Final = 256 << 20
# Room for one object with one piece on its way, one being read and one being handed over.
LEAST_MEMORY_BYTES: Final = 3 * BLOCK_BYTES
_MOST_IN_FLIGHT: Final = 4
_MOST_OBJECTS: Final = 8
# So many pieces are read and hashed at the same time: the checksum of a store runs at 0.7 GB/s on one processor.
READERS: Final = 4
# So many pieces of one object are read before they are asked for, with the one that is handed over.
READ_AHEAD: Final = 2


class Stopped(Exception):
    """The transfer was asked to end; what is on its way is given up."""


@dataclass
class Limits:
    """What a mirror may use, and whom it tells; shared by all threads of one mirror.

    Attributes:
        memory_bytes: bytes on their way at any time.
        bytes_per_second: of uploads, or of downloads; None is as fast as it goes.
        progress: gets the number of bytes as they are sent or received.
        is_stopped: whether to give up at the next block.
    """

    memory_bytes: int = MEMORY_BYTES
    bytes_per_second: float | None = None
    progress: Callable[[int], None] = lambda amount: None
    is_stopped: Callable[[], bool] = lambda: False
    _free_at_s: float = field(default=0.0, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def in_flight(self, piece: int = BLOCK_BYTES) -> int:
        """How many pieces of one object may be on their way."""
        return min(max(self.memory_bytes // piece - 2, 1), _MOST_IN_FLIGHT)

    def objects(self, piece: int = BLOCK_BYTES) -> int:
        """How many objects may be on their way; each has two more pieces in hand than on its way."""
        return min(max(self.memory_bytes // (piece * (self.in_flight(piece) + 2)), 1), _MOST_OBJECTS)

    def pieces(self, piece: int = BLOCK_BYTES) -> int:
        """How many pieces may be in memory; at least what one object needs."""
        return max(self.memory_bytes // piece, 3)

    def buffers(self, piece: int = BLOCK_BYTES) -> "PieceBuffers":
        """The memory for all pieces of the objects on their way."""
        return PieceBuffers(self.pieces(piece), piece, self.is_stopped)

    def take(self, amount: int) -> None:
        """Wait until so many more bytes fit into the bandwidth, and count them.

        Raises:
            Stopped: the transfer was asked to end.
        """
        self.wait_for(amount)
        self.progress(amount)

    def wait_for(self, amount: int) -> None:
        """Wait until so many more bytes fit into the bandwidth.

        Raises:
            Stopped: the transfer was asked to end.
        """
        if self.bytes_per_second is not None:
            with self._lock:
                starts_s = max(time.monotonic(), self._free_at_s)
                self._free_at_s = starts_s + amount / self.bytes_per_second
            while (wait_s := starts_s - time.monotonic()) > 0 and not self.is_stopped():
                time.sleep(min(wait_s, 0.1))
        if self.is_stopped():
            raise Stopped


class PieceBuffers:
    """At most ``count`` buffers of one size, made when they are needed and used again.

    A buffer is free as soon as nobody holds the view that was given out; the client library holds it until the bytes
    are sent.
    """

    def __init__(self, count: int, size_bytes: int, is_stopped: Callable[[], bool] = lambda: False) -> None:
        # None is room for a buffer that is not made.
        self._free: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self.size_bytes, self._is_stopped = size_bytes, is_stopped
        self._lock = threading.Lock()
        self._unmade = count

    def take(self, size_bytes: int) -> memoryview:
        """A view of a free buffer, waiting until there is one.

        Raises:
            Stopped: the transfer was asked to end.
        """
        # A slice of the view would not keep the buffer, so the view has its size from the start.
        free = self._take()
        buffer = bytearray(self.size_bytes) if free is None else free
        del free
        view = memoryview(buffer)[:size_bytes]
        weakref.finalize(view, self._free.put, buffer).atexit = False
        return view

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """Room for one buffer that somebody else makes, such as the client library for what it receives.

        Raises:
            Stopped: the transfer was asked to end.
        """
        # Let go and not kept: what is received has its memory.
        self._take()
        try:
            yield
        finally:
            self._free.put(None)

    def _take(self) -> bytearray | None:
        with contextlib.suppress(queue.Empty):
            return self._free.get_nowait()
        with self._lock:
            is_new, self._unmade = self._unmade > 0, max(self._unmade - 1, 0)
        if is_new:
            return None
        while not self._is_stopped():
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=0.1)
        raise Stopped


def checksum(piece: bytes | memoryview) -> bytes:
    """What S3 computes of each piece; runs without the interpreter lock, so threads add up."""
    return hashlib.md5(piece, usedforsecurity=False).digest()


class PieceDigests:
    """The checksum that S3 gives an object: of its bytes, or of the checksums of its pieces."""

    def __init__(self) -> None:
        self._found: list[bytes | Future[bytes]] = []

    def add(self, piece: bytes) -> None:
        """Take the next piece."""
        self._found.append(checksum(piece))

    def add_later(self, found: "Future[bytes]") -> None:
        """Take the checksum of the next piece, which is still computed."""
        self._found.append(found)

    def etag(self, *, is_multipart: bool) -> str:
        """What a store that computes it so answers."""
        pieces = [each.result() if isinstance(each, Future) else each for each in self._found]
        if not is_multipart and len(pieces) == 1:
            return pieces[0].hex()
        whole = hashlib.md5(b"".join(pieces), usedforsecurity=False).hexdigest()
        return f"{whole}-{len(pieces)}"


@dataclass(frozen=True)
class Reading:
    """How local parts are read for an upload: by which threads, into which memory."""

    threads: Executor
    buffers: PieceBuffers
    # Whether the store gives a checksum of an object of this size; where it gives none, computing it would be in vain.
    is_hashing: Callable[[int], bool]


def local_pieces(
    store: Store, name: str, manifest: Manifest, part: Part, reading: Reading, digests: PieceDigests
) -> Generator[memoryview, None, None]:
    """The bytes of a local part in the pieces of an upload, their digests verified before the last one is given out.

    Raises:
        DamagedCheckpoint: the part is not what was written.
        StorageFailed: I/O error.
        Stopped: the transfer was asked to end.
    """
    piece, directory = piece_bytes(part.size_bytes), store.path(name)
    digester, is_hashing = BlockDigester(manifest.block_bytes), reading.is_hashing(part.size_bytes)
    ahead: deque[Future[memoryview]] = deque()

    with _opened(store, directory, part) as source:

        def read(start: int, into: memoryview) -> memoryview:
            if source.fill(start, into) < len(into):
                raise _damaged(directory, part)
            return into

        def given(found: memoryview, *, is_last: bool) -> memoryview:
            digester.update(found)
            if is_last:
                _require_same(directory, part, digester.finish())
            if is_hashing:
                # While it is sent: hashed before, it would be sent later by the time that takes.
                digests.add_later(reading.threads.submit(checksum, found))
            return found

        try:
            for start in range(0, max(part.size_bytes, 1), piece):
                into = reading.buffers.take(min(piece, part.size_bytes - start))
                if part.size_bytes <= piece:
                    yield given(read(start, into), is_last=True)
                    return
                ahead.append(reading.threads.submit(read, start, into))
                del into
                if len(ahead) >= READ_AHEAD:
                    yield given(ahead.popleft().result(), is_last=False)
            while ahead:
                yield given(ahead.popleft().result(), is_last=len(ahead) == 0)
        finally:
            # The file is open until nobody reads it.
            wait([each for each in ahead if not each.cancel()])


@contextlib.contextmanager
def _opened(store: Store, directory: Path, part: Part) -> Iterator[Source]:
    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(store.files.reading(directory / part.name))
        except StorageFailed as refused:
            # Of a checkpoint that is there: one that was removed meanwhile is not damaged.
            if not refused.is_missing or store.files.find(directory / MANIFEST) is None:
                raise
            finding = f"{part.name}: it is missing"
            raise DamagedCheckpoint(path=directory, findings=(finding,)) from None
        yield source


def _require_same(directory: Path, part: Part, found: PartDigest) -> None:
    if found != part.digest:
        raise _damaged(directory, part)


def _damaged(directory: Path, part: Part) -> DamagedCheckpoint:
    finding = f"{part.name}: its bytes are not the bytes that were written"
    return DamagedCheckpoint(path=directory, findings=(finding,))
