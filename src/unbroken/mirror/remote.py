"""A store that lies in an object store, for everything that reads: listing, verifying, comparing, loading.

``ObjectDisk`` answers the reading half of the disk seam from keys and ranged gets, so that the code that reads local
checkpoints reads remote ones unchanged. It answers from one listing for each checkpoint, taken when it is first asked:
a view of one moment, for commands and for a resume. ``RemoteFiles`` writes small records (pins, rewinds, the reasons of
a quarantine) as objects; checkpoints are written by ``upload.py`` and ``direct.py`` and removed by ``remove.py``.
"""

import errno
import itertools
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any, Final

from unbroken.disk import Node, NodeKind, Space, Status
from unbroken.errors import MirrorEmpty
from unbroken.files import Files, storage_errors
from unbroken.mirror.address import Address, parse_address
from unbroken.mirror.client import Client, Found, open_client
from unbroken.store.directory import Store
from unbroken.store.mirrored import read_direct
from unbroken.store.names import CHECKPOINTS, MANIFEST
from unbroken.store.references import Reference, named_in
from unbroken.store.references import resolve_in_store as resolve_local


class RemotePath(PosixPath):
    """An address as the store's code and its messages know places; it is never given to the operating system."""

    def __str__(self) -> str:
        scheme, slash, rest = super().__str__().partition(":/")
        return f"{scheme}://{'/' if scheme == 'file' else ''}{rest.lstrip('/')}" if slash else scheme

    def is_absolute(self) -> bool:
        """True: it does not depend on the working directory."""
        return True

    def absolute(self) -> "RemotePath":
        """Itself."""
        return self

    def resolve(self, strict: bool = False) -> "RemotePath":
        """Itself: object stores have no links."""
        del strict
        return self


_READ_ONLY: Final = "an object store is not written as a directory"


class ObjectDisk:
    """The reading half of a disk, over an object store."""

    def __init__(self, client: Client, root: Path) -> None:
        self._client = client
        self._root = root
        self._top: tuple[list[str], dict[str, Found]] | None = None
        self._trees: dict[str, dict[str, Found]] = {}
        self._opened: dict[int, Found] = {}
        self._handles = itertools.count(1)
        # Folders that a writer is about to put its first object into: there are none without objects.
        self._expected: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        # Rank 0 chooses a checkpoint and tells the others; each opens a client of its own.
        return _reopened, (self._client.address, self._root)

    # ---- reading ----

    def list_directory(self, path: Path) -> list[Node]:
        """The names directly below a path."""
        key = self._key(path)
        if not key:
            folders, files = self._level()
            return [Node(name, NodeKind.DIRECTORY) for name in folders] + [Node(name, NodeKind.FILE) for name in files]
        below = [name.removeprefix(f"{key}/") for name in self._tree(key) if name.startswith(f"{key}/")]
        if not below and key not in self._level()[0] and key not in self._expected:
            raise FileNotFoundError(errno.ENOENT, "", str(path))
        kinds = {name.split("/")[0]: NodeKind.DIRECTORY if "/" in name else NodeKind.FILE for name in below}
        return [Node(name, kind) for name, kind in kinds.items()]

    def status(self, path: Path) -> Status:
        """What is at a path: an object, or a folder that keys imply."""
        key = self._key(path)
        if not key:
            return Status(NodeKind.DIRECTORY, 0, 0, 0)
        folders, files = self._level()
        if "/" not in key:
            if key in folders:
                return Status(NodeKind.DIRECTORY, 0, 0, 0)
            found = files.get(key)
        else:
            if key.split("/")[0] not in folders:
                raise FileNotFoundError(errno.ENOENT, "", str(path))
            tree = self._tree(key)
            found = tree.get(key)
            if found is None and any(name.startswith(f"{key}/") for name in tree):
                return Status(NodeKind.DIRECTORY, 0, 0, 0)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "", str(path))
        return Status(NodeKind.FILE, found.size_bytes, 0, 0)

    def open(self, path: Path) -> int:
        """A handle for ranged gets."""
        key = self._key(path)
        if self.status(path).kind is not NodeKind.FILE:
            raise IsADirectoryError(errno.EISDIR, "", str(path))
        handle = next(self._handles)
        tree = self._tree(key) if "/" in key else self._level()[1]
        self._opened[handle] = tree[key]
        return handle

    def open_direct(self, path: Path) -> int:
        """Refused: there is no page cache to go around."""
        raise OSError(errno.EINVAL, _READ_ONLY, str(path))

    def read_at(self, handle: int, offset: int, into: memoryview) -> int:
        """One ranged get."""
        found = self._opened[handle]
        end = min(offset + len(into), found.size_bytes)
        if end <= offset:
            return 0
        return self._client.fill(found.key, offset, into[: end - offset])

    def close(self, handle: int) -> None:
        """Forget a handle."""
        self._opened.pop(handle, None)

    def read_link(self, path: Path) -> str:
        """Object stores have no links."""
        raise OSError(errno.EINVAL, "", str(path))

    def _key(self, path: Path) -> str:
        if path != self._root and self._root not in path.parents:
            # The records of a run are beside its checkpoints and are not mirrored.
            raise FileNotFoundError(errno.ENOENT, "", str(path))
        return "/".join(path.relative_to(self._root).parts)

    def _level(self) -> tuple[list[str], dict[str, Found]]:
        if self._top is None:
            folders, files = self._client.level("")
            self._top = folders, {found.key: found for found in files}
        return self._top

    def _tree(self, key: str) -> dict[str, Found]:
        top = key.split("/")[0]
        if top not in self._trees:
            self._trees[top] = {found.key: found for found in self._client.listing(top)}
        return self._trees[top]

    # ---- small records ----

    def expect(self, path: Path) -> None:
        """Take a folder for an empty one if there is nothing below it."""
        self._expected.add(self._key(path))

    def create_object(self, path: Path, data: bytes) -> bool:
        """Bring an object into being, unless there is one; says whether it was us."""
        try:
            return self._client.create(self._key(path), data)
        finally:
            self._forget()

    def put_object(self, path: Path, data: bytes) -> None:
        """Write a small object."""
        try:
            self._client.put(self._key(path), iter([data]), len(data), in_flight=1)
        finally:
            self._forget()

    def delete_object(self, path: Path) -> None:
        """Remove an object."""
        try:
            self._client.delete([self._key(path)])
        finally:
            self._forget()

    def _forget(self) -> None:
        self._top = None
        self._trees.clear()

    # ---- everything else is refused ----

    def space(self, path: Path) -> Space:
        """Not known."""
        raise OSError(errno.ENOSYS, _READ_ONLY, str(path))

    def make_directory(self, path: Path) -> None:
        """Refused."""
        raise OSError(errno.EROFS, _READ_ONLY, str(path))

    def create(self, path: Path) -> int:
        """Refused."""
        raise OSError(errno.EROFS, _READ_ONLY, str(path))

    def open_append(self, path: Path) -> int:
        """Refused."""
        raise OSError(errno.EROFS, _READ_ONLY, str(path))

    def write(self, handle: int, data: memoryview) -> int:
        """Refused."""
        del handle, data
        raise OSError(errno.EROFS, _READ_ONLY)

    def use_direct_io(self, handle: int, is_on: bool) -> None:
        """Never on, there is no page cache to go past; off is how it is."""
        del handle
        if is_on:
            raise OSError(errno.EINVAL, _READ_ONLY)

    def sync_file(self, handle: int) -> None:
        """Refused."""
        del handle
        raise OSError(errno.EROFS, _READ_ONLY)

    def sync_directory(self, path: Path) -> None:
        """Refused."""
        raise OSError(errno.EROFS, _READ_ONLY, str(path))

    def rename(self, source: Path, target: Path) -> None:
        """Refused."""
        del target
        raise OSError(errno.EROFS, _READ_ONLY, str(source))

    def link(self, source: Path, target: Path) -> None:
        """Refused."""
        del target
        raise OSError(errno.EROFS, _READ_ONLY, str(source))

    def make_symlink(self, target: str, path: Path) -> None:
        """Refused."""
        del target
        raise OSError(errno.EROFS, _READ_ONLY, str(path))

    def unlink(self, path: Path) -> None:
        """Refused."""
        raise OSError(errno.EROFS, _READ_ONLY, str(path))

    def remove_directory(self, path: Path) -> None:
        """Refused."""
        raise OSError(errno.EROFS, _READ_ONLY, str(path))


def _reopened(address: Address, root: Path) -> ObjectDisk:
    return ObjectDisk(open_client(address), root)


@dataclass(frozen=True)
class RemoteFiles(Files):
    """The records of a store in an object store; nothing there can be renamed."""

    disk: ObjectDisk

    @property
    def can_rename(self) -> bool:
        """False: an object has one key for as long as it exists."""
        return False

    def make_directory(self, path: Path, *, durable: bool = False) -> None:
        """Nothing is made: a folder is there as soon as there is an object in it."""
        del durable
        self.disk.expect(path)

    def create_once(self, path: Path, data: bytes, *, scratch: str, is_contested: bool = True) -> bool:
        """A conditional create.

        Raises:
            UnbrokenError: the object store refused.
        """
        del scratch, is_contested
        with storage_errors("create", path):
            # crash here: no such object, or a whole one.
            return self.disk.create_object(path, data)

    def replace(self, path: Path, data: bytes, *, scratch: str, durable: bool = True) -> None:
        """A put: the old object or the new one.

        Raises:
            UnbrokenError: the object store refused.
        """
        del scratch, durable
        with storage_errors("replace", path):
            # crash here: the old object or the new one, whole.
            self.disk.put_object(path, data)

    def remove_file(self, path: Path) -> None:
        """Remove an object; one that is not there is no error.

        Raises:
            UnbrokenError: the object store refused.
        """
        with storage_errors("remove", path):
            self.disk.delete_object(path)

    def sync_directory(self, path: Path) -> None:
        """Nothing to do: what an object store has taken is durable."""


def store_at(client: Client) -> Store:
    """The store at the address of a client, as it is now."""
    root = RemotePath(str(client.address))
    return Store(root, RemoteFiles(ObjectDisk(client, root)))


def home_of(address: Address, store: Store) -> Address:
    """Where in a mirror the checkpoints of a store are: below ``checkpoints`` for a run, as on disk."""
    return address.below(CHECKPOINTS) if store.root.name == CHECKPOINTS else address


def checkpoints_of(store: Store, address: str | None = None) -> Store:
    """Where the checkpoints of the run are that a local store belongs to: there, or in the object store it records.

    Raises:
        StorageFailed: I/O error, or the record is damaged.
        UnbrokenError: the object store refused.
    """
    address = address or read_direct(store)
    return store if address is None else store_at(open_client(home_of(parse_address(address), store)))


def resolve_remote(reference: str) -> Reference:
    """The store at an address, and the checkpoint if one is named: ``s3://bucket/runs/a@1000``.

    Raises:
        BadMirror: it is no address.
        MirrorEmpty: there is nothing at the address.
        CheckpointUnknown: it has no checkpoint by that name or step.
        UnbrokenError: the object store refused.
    """
    place, at, wanted = reference.rstrip("/").rpartition("@")
    if not at or "/" in wanted:
        place, wanted = reference, ""
    address = parse_address(place)
    if address.scheme == "file":
        return resolve_local(f"{address.directory}{f'@{wanted}' if wanted else ''}")
    client = open_client(address)
    folders, files = client.level("")
    if any(found.key == MANIFEST for found in files):
        above = Address(address.scheme, address.bucket, address.prefix.rpartition("/")[0])
        return Reference(store_at(open_client(above)), address.prefix.rpartition("/")[2])
    if not folders and not files:
        raise MirrorEmpty(mirror=str(address))
    store = store_at(open_client(address.below(CHECKPOINTS)) if CHECKPOINTS in folders else client)
    return Reference(store, named_in(store, wanted) if wanted else None)
