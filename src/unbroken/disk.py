"""The seam between this package and the machine's storage.

``Disk`` has one method for each thing the operating system can be asked to do, so that tests can count, fail,
shorten or kill every one of them, and a model in memory can stand in for the machine. ``LocalDisk`` asks the machine.
Only ``files.py`` calls the methods that change anything.
"""

import errno
import os
import stat
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

# The blocks of disks have 512 or 4,096 bytes, pages at least 4,096.
DIRECT_BYTES: Final = 4096


class NodeKind(Enum):
    """What a name in a directory is; links are never followed."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"
    OTHER = "other"


@dataclass(frozen=True)
class Node:
    """One name in a directory."""

    name: str
    kind: NodeKind


@dataclass(frozen=True)
class Status:
    """What the file system says about one path, the link itself if it is one.

    ``identity`` is the same for two names of one file, and stays when it is renamed: the inode number.
    """

    kind: NodeKind
    size_bytes: int
    modified_ns: int
    identity: int


@dataclass(frozen=True)
class Space:
    """Room on the file system that holds a path; ``free_inodes`` is None where inodes are not counted."""

    free_bytes: int
    total_bytes: int
    free_inodes: int | None


class Disk(Protocol):
    """What an operating system does for us, one call each; every method may raise ``OSError``."""

    def make_directory(self, path: Path) -> None:
        """Create one directory; its parent exists."""

    def create(self, path: Path) -> int:
        """Create a file that must not exist, for writing; returns a handle."""

    def open_append(self, path: Path) -> int:
        """Open a regular file to write behind its end, creating it if need be; a link is refused; returns a handle."""

    def write(self, handle: int, data: memoryview) -> int:
        """Hand bytes to the kernel; returns how many it took, which may be fewer."""

    def use_direct_io(self, handle: int, is_on: bool) -> None:
        """Let bytes go past the page cache from now on, or not; EINVAL where the file system cannot.

        Then offsets, lengths and the addresses of buffers must be multiples of ``DIRECT_BYTES``.
        """

    def sync_file(self, handle: int) -> None:
        """Make the file's bytes durable."""

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""

    def rename(self, source: Path, target: Path) -> None:
        """Move a name atomically; a file or link at the target is replaced."""

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; fails if that name exists, on network file systems too."""

    def make_symlink(self, target: str, path: Path) -> None:
        """Create a symbolic link."""

    def unlink(self, path: Path) -> None:
        """Remove a file or a link."""

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""

    def open(self, path: Path) -> int:
        """Open a regular file for reading; a link at the last place is refused."""

    def open_direct(self, path: Path) -> int:
        """Open a regular file for reading past the page cache; EINVAL where the file system cannot."""

    def read_at(self, handle: int, offset: int, into: memoryview) -> int:
        """Fill a buffer from an offset; returns how many bytes came, 0 at the end."""

    def close(self, handle: int) -> None:
        """Give a handle back."""

    def list_directory(self, path: Path) -> list[Node]:
        """The names in a directory, in any order."""

    def status(self, path: Path) -> Status:
        """What is at a path; a link is not followed."""

    def read_link(self, path: Path) -> str:
        """Where a symbolic link points."""

    def space(self, path: Path) -> Space:
        """Room on the file system of a path."""


_KIND_BY_FORMAT: Final = {
    stat.S_IFREG: NodeKind.FILE,
    stat.S_IFDIR: NodeKind.DIRECTORY,
    stat.S_IFLNK: NodeKind.LINK,
}


class LocalDisk:
    """The machine's own file systems."""

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def open_append(self, path: Path) -> int:
        # O_NONBLOCK: a pipe under the record's name must not hang the job until somebody reads from it.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return _regular(os.open(path, flags, 0o666), path)

    def write(self, handle: int, data: memoryview) -> int:
        return os.write(handle, data)

    def use_direct_io(self, handle: int, is_on: bool) -> None:
        # Imported here: on another system the error that says so comes first.
        import fcntl

        flags = fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | (os.O_DIRECT if is_on else 0))

    def sync_file(self, handle: int) -> None:
        os.fsync(handle)

    def sync_directory(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target, follow_symlinks=False)

    def make_symlink(self, target: str, path: Path) -> None:
        os.symlink(target, path)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)

    def open(self, path: Path) -> int:
        # O_NONBLOCK: a FIFO planted under a part's name must not hang the reader; it has no meaning for files.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        return _regular(handle, path)

    def open_direct(self, path: Path) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | getattr(os, "O_DIRECT", 0)
        return _regular(os.open(path, flags), path)

    def read_at(self, handle: int, offset: int, into: memoryview) -> int:
        return os.preadv(handle, [into], offset)

    def close(self, handle: int) -> None:
        os.close(handle)

    def list_directory(self, path: Path) -> list[Node]:
        with os.scandir(path) as entries:
            return [Node(entry.name, _entry_kind(entry)) for entry in entries]

    def status(self, path: Path) -> Status:
        found = os.lstat(path)
        kind = _KIND_BY_FORMAT.get(stat.S_IFMT(found.st_mode), NodeKind.OTHER)
        return Status(kind, found.st_size, found.st_mtime_ns, found.st_ino)

    def read_link(self, path: Path) -> str:
        return os.readlink(path)

    def space(self, path: Path) -> Space:
        found = os.statvfs(path)
        return Space(
            # f_bavail, not f_bfree: what root alone may use is not room for a job.
            free_bytes=found.f_bavail * found.f_frsize,
            total_bytes=found.f_blocks * found.f_frsize,
            # File systems that make inodes as they go (btrfs, many network ones) report none at all.
            free_inodes=found.f_favail if found.f_files else None,
        )


def _regular(handle: int, path: Path) -> int:
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return handle


def _entry_kind(entry: os.DirEntry[str]) -> NodeKind:
    if entry.is_symlink():
        return NodeKind.LINK
    if entry.is_dir(follow_symlinks=False):
        return NodeKind.DIRECTORY
    return NodeKind.FILE if entry.is_file(follow_symlinks=False) else NodeKind.OTHER
