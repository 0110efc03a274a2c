"""A mirror in a directory: a network file system, a second disk. Written durably, through ``files``."""

import errno
import itertools
import os
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from unbroken.disk import NodeKind
from unbroken.errors import BadMirror, StorageFailed
from unbroken.files import Files
from unbroken.mirror.address import Address
from unbroken.mirror.client import Found
from unbroken.store.commit import walk_files
from unbroken.store.digest import digest_bytes
from unbroken.store.names import scratch, scratch_owner

_SCRATCH_OF: Final = re.compile(r"mirror_(?P<host>[0-9a-f]{8})_(?P<pid>[0-9]+)_[0-9]+")
_MADE: Final = itertools.count(1)


def is_alive(pid: int) -> bool:
    """Whether a process of this machine is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


class FolderClient:
    """An object store made of files: a key is a path below the directory."""

    def __init__(self, address: Address, files: Files) -> None:
        self.address = address
        self._root = address.directory
        self._files = files
        self._host = digest_bytes(socket.gethostname().encode())[:4].hex()
        # Of its own: a job and a command, or two hosts, may write the same mirror at the same time.
        self._owner = f"mirror_{self._host}_{os.getpid()}_{next(_MADE)}"

    def has_checksum(self, size_bytes: int) -> bool:
        """Never: what was written is read back."""
        del size_bytes
        return False

    def create(self, key: str, data: bytes) -> bool:
        """Bring a small file into being, unless the name is taken."""
        path = self._root / key
        self._files.make_directory(path.parent, durable=True)
        self._tidy(path.parent)
        # crash here: no such file, or a whole one; a scratch file that a later writer on this machine removes.
        return self._files.create_once(path, data, scratch=scratch(self._owner, path.name))

    def put(self, key: str, chunks: Iterator[bytes | memoryview], size_bytes: int, *, in_flight: int) -> None:
        """Write a file beside its name and rename it."""
        del size_bytes, in_flight
        path = self._root / key
        self._files.make_directory(path.parent, durable=True)
        self._tidy(path.parent)
        beside = path.with_name(scratch(self._owner, path.name))
        self._files.remove_file(beside)
        # crash here: a scratch file that a later writer removes; the part itself is old, whole or absent.
        self._files.write_new(beside, chunks)
        self._files.publish(beside, path)

    def _tidy(self, directory: Path) -> None:
        """Remove what killed writers of this machine left in a directory."""
        for node in self._files.list_present(directory):
            found = _SCRATCH_OF.fullmatch(scratch_owner(node.name) or "")
            if found and found["host"] == self._host and not is_alive(int(found["pid"])):
                # crash here: a scratch file less.
                self._files.remove_file(directory / node.name)

    def find(self, key: str) -> Found | None:
        """The file at a key."""
        found = self._files.find(self._root / key)
        return Found(key, found.size_bytes) if found is not None and found.kind is NodeKind.FILE else None

    def read(self, key: str, start: int, end: int) -> bytes:
        """The bytes of a range."""
        buffer = bytearray(end - start)
        return bytes(memoryview(buffer)[: self.fill(key, start, memoryview(buffer))])

    def fill(self, key: str, start: int, into: memoryview) -> int:
        """Read into a buffer."""
        try:
            with self._files.reading(self._root / key) as source:
                return source.fill(start, into)
        except StorageFailed as refused:
            if refused.is_missing:
                raise FileNotFoundError(errno.ENOENT, "", key) from refused
            if isinstance(refused.__cause__, NotADirectoryError):
                raise BadMirror(text=str(self.address), complaint="a file is in the place of a directory") from refused
            raise

    def listing(self, below: str) -> Iterable[Found]:
        """Every file below a key but unfinished ones."""
        top = self._root / below
        for name, size_bytes in walk_files(self._files, top):
            if size_bytes is not None and scratch_owner(Path(name).name) is None:
                yield Found(f"{below}/{name}".lstrip("/"), size_bytes)

    def level(self, below: str) -> tuple[list[str], list[Found]]:
        """The names directly below a key."""
        top = self._root / below
        nodes = self._files.list_present(top)
        folders = [node.name for node in nodes if node.kind is NodeKind.DIRECTORY]
        keys = [f"{below}/{node.name}".lstrip("/") for node in nodes if node.kind is NodeKind.FILE]
        return folders, [found for key in keys if (found := self.find(key)) is not None]

    def delete(self, keys: Iterable[str]) -> None:
        """Remove files, and the directories that become empty."""
        above: set[Path] = set()
        for key in keys:
            path = self._root / key
            # crash here: fewer files of something that stopped being a checkpoint with the first one.
            self._files.remove_file(path)
            above.update(parent for parent in path.parents if self._root in parent.parents)
        for directory in sorted(above, key=lambda path: len(path.parts), reverse=True):
            self._tidy(directory)
            self._files.remove_if_empty(directory)
