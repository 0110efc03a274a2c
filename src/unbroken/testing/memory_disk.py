"""A disk in memory that behaves like the kernel and loses unsynced data at a power cut.

``MemoryDisk`` keeps POSIX's two separate promises apart: syncing a file makes its bytes durable and not its name,
syncing a directory makes its names durable and not the bytes behind them. ``after_crash`` gives the disk a reader
finds when the power comes back. It models no permissions and one file system.
"""

import errno
import functools
import os
import random
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, Final, Literal, ParamSpec, TypeVar

from unbroken.disk import Node, NodeKind, Space, Status
from unbroken.testing.durability import (
    Change,
    DirectoryInode,
    Edit,
    FileInode,
    Inode,
    LinkInode,
    PendingChanges,
    Tail,
    rebuilt,
)
from unbroken.testing.paths import Tree, refuse

# The free space of an unlimited disk.
_UNLIMITED_BYTES: Final = 1 << 50

_KINDS: Final[dict[type[Inode], NodeKind]] = {
    FileInode: NodeKind.FILE,
    LinkInode: NodeKind.LINK,
    DirectoryInode: NodeKind.DIRECTORY,
}

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _one_at_a_time(
    method: "Callable[Concatenate[MemoryDisk, _Arguments], _Result]",
) -> "Callable[Concatenate[MemoryDisk, _Arguments], _Result]":
    # Each call is atomic, as each system call is to other threads.
    @functools.wraps(method)
    def locked(disk: "MemoryDisk", /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with disk._lock:
            return method(disk, *args, **kwargs)

    return locked


@dataclass
class _Handle:
    inode: FileInode
    is_writing: bool


class MemoryDisk:
    """A ``Disk`` in memory.

    Args:
        directories: directories that stand there from the start, durably, with their parents.
        capacity_bytes: how many bytes all files together may hold; None for no limit.
        capacity_inodes: how many files, links and directories there may be; None for no limit.
        now_ns: the clock for times of modification; by default each change takes one nanosecond.
    """

    def __init__(
        self,
        directories: Iterable[Path | str] = (),
        *,
        capacity_bytes: int | None = None,
        capacity_inodes: int | None = None,
        now_ns: Callable[[], int] | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._capacity_bytes = capacity_bytes
        self._capacity_inodes = capacity_inodes
        self._ticks = 0
        self._now_ns = now_ns or self._tick
        self._pending = PendingChanges()
        self._handles: dict[int, _Handle] = {}
        self._next_handle = 3
        self._used_bytes = 0
        self._used_inodes = 0
        self._tree = Tree(DirectoryInode(self._now_ns(), None))
        for path in map(Path, directories):
            for each in (*reversed(path.parents), path):
                if self._tree.at(each).inode is None:
                    self.make_directory(each)
        self.sync_all()

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks

    # ---- power ----

    @property
    def pending(self) -> tuple[Change, ...]:
        """The changes of names that a power cut may still take back, oldest first."""
        with self._lock:
            return tuple(self._pending)

    @_one_at_a_time
    def sync_all(self) -> None:
        """Make everything durable, names and bytes."""
        waiting: list[DirectoryInode] = [self._tree.root]
        while waiting:
            directory = waiting.pop()
            self._pending.settle(directory)
            for inode in directory.entries.values():
                if isinstance(inode, DirectoryInode):
                    waiting.append(inode)
                elif isinstance(inode, FileInode):
                    inode.synced_bytes = len(inode.data)
        self._pending = PendingChanges()

    @_one_at_a_time
    def after_crash(
        self,
        *,
        names: Literal["synced", "all"] | Collection[int] = "synced",
        tail: Tail | random.Random = Tail.LOST,
    ) -> "MemoryDisk":
        """The disk a reader finds after a power cut now; this one is left as it is.

        Args:
            names: which pending changes of names survive beside the synced ones: none, all, or those with the
                given positions in ``pending``, together with the earlier ones they cannot do without.
            tail: what becomes of bytes that were never synced; a generator draws for each file on its own.
        """
        pending = list(self._pending)
        if isinstance(names, str):
            chosen = pending if names == "all" else []
        else:
            chosen = self._pending.with_needs(pending[position].number for position in names)
        found = MemoryDisk(
            capacity_bytes=self._capacity_bytes,
            capacity_inodes=self._capacity_inodes,
            now_ns=None if self._now_ns == self._tick else self._now_ns,
        )
        found._ticks = self._ticks
        found._adopt(rebuilt(self._tree.root, chosen, tail))
        return found

    def _adopt(self, root: DirectoryInode) -> None:
        self._tree = Tree(root)
        seen: dict[int, Inode] = {}
        waiting: list[Inode] = [root]
        while waiting:
            inode = waiting.pop()
            seen[id(inode)] = inode
            if isinstance(inode, DirectoryInode):
                waiting.extend(inode.entries.values())
        self._used_inodes = len(seen) - 1
        self._used_bytes = sum(len(inode.data) for inode in seen.values() if isinstance(inode, FileInode))

    # ---- names ----

    def _change(self, description: str, *edits: Edit, removed: DirectoryInode | None = None) -> None:
        self._pending.make(description, edits, removed=removed)
        for edit in edits:
            edit.directory.modified_ns = self._now_ns()
            before = edit.directory.entries.pop(edit.name, None)
            if edit.inode is not None:
                edit.directory.entries[edit.name] = edit.inode
                self._count_name(edit.inode, +1)
            if before is not None:
                self._count_name(before, -1)
        for edit in edits:
            if isinstance(edit.inode, DirectoryInode):
                edit.inode.parent = edit.directory
        if removed is not None:
            self._used_inodes -= 1

    def _count_name(self, inode: Inode, by: int) -> None:
        if isinstance(inode, DirectoryInode):
            return
        inode.names += by
        self._release(inode)

    def _release(self, inode: FileInode | LinkInode) -> None:
        # A rename removes the old name before or after it adds the new one; only a file without names and open
        # handles frees its space.
        if inode.names == 0 and not (isinstance(inode, FileInode) and inode.handles):
            self._used_inodes -= 1
            self._used_bytes -= len(inode.data) if isinstance(inode, FileInode) else 0

    def _take_inode(self, path: Path) -> int:
        if self._capacity_inodes is not None and self._used_inodes >= self._capacity_inodes:
            refuse(errno.ENOSPC, path)
        self._used_inodes += 1
        return self._now_ns()

    @_one_at_a_time
    def make_directory(self, path: Path) -> None:
        """Create one directory; its name is durable once its parent is synced."""
        parent, name = self._tree.vacant(path)
        self._change(f"make_directory {path}", Edit(parent, name, DirectoryInode(self._take_inode(path), parent)))

    @_one_at_a_time
    def make_symlink(self, target: str, path: Path) -> None:
        """Create a symbolic link; target and name become durable together."""
        if not target:
            refuse(errno.ENOENT, path)
        parent, name = self._tree.vacant(path)
        self._change(f"make_symlink {path}", Edit(parent, name, LinkInode(self._take_inode(path), target)))

    @_one_at_a_time
    def link(self, source: Path, target: Path) -> None:
        """Give a file or link a second name."""
        inode = self._tree.existing(source)
        parent, name = self._tree.vacant(target)
        if isinstance(inode, DirectoryInode):
            refuse(errno.EPERM, target)
        self._change(f"link {source} {target}", Edit(parent, name, inode))

    @_one_at_a_time
    def unlink(self, path: Path) -> None:
        """Remove a file or a link; bytes that are still held open keep their room."""
        place = self._tree.at(path)
        if place.inode is None:
            refuse(errno.ENOENT, path)
        if place.name is None or isinstance(place.inode, DirectoryInode):
            refuse(errno.EISDIR, path)
        self._change(f"unlink {path}", Edit(place.directory, place.name, None))

    @_one_at_a_time
    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        place = self._tree.at(path)
        if place.inode is None:
            refuse(errno.ENOENT, path)
        if not isinstance(place.inode, DirectoryInode):
            refuse(errno.ENOTDIR, path)
        if place.inode is self._tree.root:
            refuse(errno.EBUSY, path)
        if place.inode.entries or place.name is None:
            refuse(errno.ENOTEMPTY, path)
        edit = Edit(place.directory, place.name, None)
        self._change(f"remove_directory {path}", edit, removed=place.inode)

    @_one_at_a_time
    def rename(self, source: Path, target: Path) -> None:
        """Move a name atomically, and atomically at a power cut too: never both names, never neither."""
        old, new = self._tree.at(source), self._tree.at(target)
        if old.name is None or new.name is None:
            refuse(errno.EBUSY, target)
        if old.inode is None:
            refuse(errno.ENOENT, source)
        if any(each is old.inode for each in new.directory.ancestry()):
            refuse(errno.EINVAL, target)
        if any(each is new.inode for each in old.directory.ancestry()):
            refuse(errno.ENOTEMPTY, target)
        if old.inode is new.inode:
            return
        if new.inode is not None:
            if isinstance(old.inode, DirectoryInode) and not isinstance(new.inode, DirectoryInode):
                refuse(errno.ENOTDIR, target)
            if isinstance(new.inode, DirectoryInode) and not isinstance(old.inode, DirectoryInode):
                refuse(errno.EISDIR, target)
            if isinstance(new.inode, DirectoryInode) and new.inode.entries:
                refuse(errno.ENOTEMPTY, target)
        replaced = new.inode if isinstance(new.inode, DirectoryInode) else None
        given, taken = Edit(new.directory, new.name, old.inode), Edit(old.directory, old.name, None)
        self._change(f"rename {source} {target}", given, taken, removed=replaced)

    @_one_at_a_time
    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable: not its own name, and not the bytes behind its names."""
        self._pending.settle(self._tree.directory(path))

    @_one_at_a_time
    def list_directory(self, path: Path) -> list[Node]:
        """The names in a directory."""
        entries = self._tree.directory(path).entries
        return [Node(name, _KINDS[type(inode)]) for name, inode in entries.items()]

    @_one_at_a_time
    def status(self, path: Path) -> Status:
        """The status of a path; directories have no size here."""
        inode = self._tree.existing(path)
        size_bytes = 0
        if isinstance(inode, FileInode):
            size_bytes = len(inode.data)
        elif isinstance(inode, LinkInode):
            size_bytes = len(os.fsencode(inode.target))
        return Status(_KINDS[type(inode)], size_bytes, inode.modified_ns, id(inode))

    @_one_at_a_time
    def read_link(self, path: Path) -> str:
        """Where a symbolic link points."""
        inode = self._tree.existing(path)
        if not isinstance(inode, LinkInode):
            refuse(errno.EINVAL, path)
        return inode.target

    @_one_at_a_time
    def space(self, path: Path) -> Space:
        """The room that is left; a disk without a limit has a pebibyte."""
        self._tree.existing(path, follow=True)
        total = _UNLIMITED_BYTES if self._capacity_bytes is None else self._capacity_bytes
        free_inodes = None if self._capacity_inodes is None else self._capacity_inodes - self._used_inodes
        return Space(total - self._used_bytes, total, free_inodes)

    # ---- bytes ----

    def _new_handle(self, inode: FileInode, *, is_writing: bool) -> int:
        handle = self._next_handle
        self._next_handle += 1
        self._handles[handle] = _Handle(inode, is_writing)
        inode.handles += 1
        return handle

    def _held(self, handle: int) -> _Handle:
        if handle not in self._handles:
            refuse(errno.EBADF)
        return self._handles[handle]

    @_one_at_a_time
    def create(self, path: Path) -> int:
        """Create a file that must not exist, for writing."""
        parent, name = self._tree.vacant(path)
        inode = FileInode(self._take_inode(path))
        self._change(f"create {path}", Edit(parent, name, inode))
        return self._new_handle(inode, is_writing=True)

    @_one_at_a_time
    def open_append(self, path: Path) -> int:
        """Open a regular file to write behind its end, creating it if need be; links and directories are refused."""
        inode = self._tree.at(path).inode
        if inode is None:
            return self.create(path)
        if isinstance(inode, LinkInode):
            refuse(errno.ELOOP, path)
        if isinstance(inode, DirectoryInode):
            refuse(errno.EISDIR, path)
        return self._new_handle(inode, is_writing=True)

    @_one_at_a_time
    def write(self, handle: int, data: memoryview) -> int:
        """Append bytes; takes what there is room for, and refuses when there is none."""
        held = self._held(handle)
        if not held.is_writing:
            refuse(errno.EBADF)
        taken = bytes(data.cast("B"))
        if self._capacity_bytes is not None:
            room = self._capacity_bytes - self._used_bytes
            if taken and room <= 0:
                refuse(errno.ENOSPC)
            taken = taken[:room]
        held.inode.data += taken
        held.inode.modified_ns = self._now_ns()
        self._used_bytes += len(taken)
        return len(taken)

    def use_direct_io(self, handle: int, is_on: bool) -> None:
        """Nothing to do: there is no page cache to go past."""
        self._held(handle)

    @_one_at_a_time
    def sync_file(self, handle: int) -> None:
        """Make a file's bytes durable, and not its name."""
        inode = self._held(handle).inode
        inode.synced_bytes = len(inode.data)

    @_one_at_a_time
    def open(self, path: Path) -> int:
        """Open a regular file for reading; links and directories are refused."""
        inode = self._tree.existing(path)
        if isinstance(inode, LinkInode):
            refuse(errno.ELOOP, path)
        if isinstance(inode, DirectoryInode):
            refuse(errno.EINVAL, path)
        return self._new_handle(inode, is_writing=False)

    def open_direct(self, path: Path) -> int:
        """Open a regular file for reading; there is no page cache to go past."""
        return self.open(path)

    @_one_at_a_time
    def read_at(self, handle: int, offset: int, into: memoryview) -> int:
        """Fill a buffer from an offset."""
        held = self._held(handle)
        if held.is_writing:
            refuse(errno.EBADF)
        if offset < 0:
            refuse(errno.EINVAL)
        view = into.cast("B")
        came = held.inode.data[offset : offset + len(view)]
        view[: len(came)] = came
        return len(came)

    @_one_at_a_time
    def close(self, handle: int) -> None:
        """Give a handle back."""
        inode = self._held(handle).inode
        del self._handles[handle]
        inode.handles -= 1
        self._release(inode)
