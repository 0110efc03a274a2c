"""What a mirror asks of an object store, in ten calls; ``open_client`` gives the one for an address.

``folder.py`` answers them with a directory on a shared file system, ``objects.py`` with S3, Google Cloud Storage or
Azure. Keys are relative to the address. Every call may raise the errors of ``errors/mirror.py``; ``StorageFailed`` for
a directory.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from unbroken.mirror.address import Address
from unbroken.store.digest import BLOCK_BYTES

if TYPE_CHECKING:
    from unbroken.files import Files

# Stores take at most 10,000 pieces of a multipart upload.
_MOST_PIECES: Final = 10_000


@dataclass(frozen=True)
class Found:
    """One object: its key below the address, its size, and the store's own checksum if it gives one."""

    key: str
    size_bytes: int
    etag: str | None = None


class Client(Protocol):
    """An object store at one address."""

    @property
    def address(self) -> Address:
        """Where it is."""

    def has_checksum(self, size_bytes: int) -> bool:
        """Whether the ``etag`` of an object of this size is, as a rule, the MD5 of its bytes or that of its pieces."""

    def create(self, key: str, data: bytes) -> bool:
        """Bring a small object into being, unless the key is taken; says whether it was us. One of many wins."""

    def put(self, key: str, chunks: Iterator[bytes | memoryview], size_bytes: int, *, in_flight: int) -> None:
        """Write an object from chunks of ``piece_bytes(size_bytes)``; it appears whole or not at all.

        At most ``in_flight`` pieces are on their way at the same time; a chunk is freed as soon as it was sent.
        """

    def find(self, key: str) -> Found | None:
        """What is at a key, or None."""

    def read(self, key: str, start: int, end: int) -> bytes:
        """The bytes of a range; fewer if the object is shorter.

        Raises:
            FileNotFoundError: there is no such object.
        """

    def fill(self, key: str, start: int, into: memoryview) -> int:
        """Fill a buffer from an offset; returns how many bytes there were, fewer only at the end of the object.

        Raises:
            FileNotFoundError: there is no such object.
        """

    def listing(self, below: str) -> Iterable[Found]:
        """Every object below a key, however deep."""

    def level(self, below: str) -> tuple[list[str], list[Found]]:
        """The names of the folders directly below a key, and the objects there."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are gone are no error."""


def piece_bytes(size_bytes: int) -> int:
    """The size of the pieces of an object: whole blocks, so that a piece can be checked against the manifest."""
    blocks = -(-size_bytes // (BLOCK_BYTES * _MOST_PIECES))
    return max(1, blocks) * BLOCK_BYTES


def open_client(address: Address, files: "Files | None" = None) -> Client:
    """The client for an address; ``files`` is how a directory is written.

    Raises:
        ClientMissing: obstore is not installed.
        NoCredentials: none were found.
    """
    if address.scheme == "file":
        from unbroken.files import LOCAL
        from unbroken.mirror.folder import FolderClient

        return FolderClient(address, files or LOCAL)
    from unbroken.mirror.objects import ObjectClient

    return ObjectClient(address)


ClientFor = Callable[[Address], Client]
