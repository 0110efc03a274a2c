"""The only place that writes, syncs, renames or removes files.

``Files`` builds on a ``Disk`` the few moves the rest of the house needs (write a new file durably, publish by rename,
swap a link, remove a tree) and promises their order of syncs. Nothing here knows what a checkpoint is.
"""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.disk import Disk, LocalDisk, Node, NodeKind, Space, Status
from unbroken.errors import StorageFailed


@contextlib.contextmanager
def told(operation: str, path: Path) -> Iterator[None]:
    """Turn the operating system's refusal into an error that says what was being done, and where."""
    try:
        yield
    except StorageFailed:
        raise
    except OSError as refusal:
        cause = os.strerror(refusal.errno) if refusal.errno else str(refusal)
        raise StorageFailed(operation=operation, path=path, cause=cause) from refusal


@dataclass(frozen=True)
class Source:
    """A file open for reading."""

    disk: Disk
    handle: int
    path: Path

    def fill(self, offset: int, into: memoryview) -> int:
        """Fill a buffer from an offset; returns how many bytes there were, fewer only at the end of the file.

        Raises:
            StorageFailed: the system refused.
        """
        done = 0
        with told("read", self.path):
            while done < len(into) and (taken := self.disk.read_at(self.handle, offset + done, into[done:])):
                done += taken
        return done


@dataclass
class Appender:
    """A file open for writing behind its end; after a refusal the next call opens it anew: no sync is tried twice."""

    files: "Files"
    path: Path
    _handle: int | None = None
    _is_name_durable: bool = False

    def append(self, data: bytes) -> None:
        """Hand bytes to the kernel, all of them.

        Raises:
            StorageFailed: the system refused; a prefix of the bytes may stand at the end of the file.
        """
        with self._using("append to") as handle:
            # crash here: the file ends anywhere inside these bytes; what was synced before them is intact.
            self.files._write_all(handle, memoryview(data))

    def sync(self) -> None:
        """Make all that was handed over durable, and the file's name.

        Raises:
            StorageFailed: the system refused; what was handed over since the last sync may be lost.
        """
        with self._using("sync") as handle:
            self.files.disk.sync_file(handle)
            if not self._is_name_durable:
                # crash here: durable bytes under a name that a power cut takes back; nobody was promised them yet.
                self.files.disk.sync_directory(self.path.parent)
                self._is_name_durable = True

    def close(self) -> None:
        """Give the handle back; a closed one opens the file again when it is used.

        Raises:
            StorageFailed: the system refused; what was handed over since the last sync may be lost.
        """
        handle, self._handle = self._handle, None
        with told("close", self.path):
            if handle is not None:
                self.files.disk.close(handle)

    @contextlib.contextmanager
    def _using(self, operation: str) -> Iterator[int]:
        with told(operation, self.path):
            if self._handle is None:
                # crash here: an empty file, which every reader takes for a record of nothing.
                self._handle = self.files.disk.open_append(self.path)
            try:
                yield self._handle
            except OSError:
                with contextlib.suppress(StorageFailed):
                    self.close()
                raise


@dataclass(frozen=True)
class Files:
    """The moves of the house over one disk. Every refusal of the system surfaces as ``StorageFailed``."""

    disk: Disk

    # ---- writing ----

    def make_directory(self, path: Path, *, durable: bool = False) -> None:
        """Create a directory and the parents it lacks; ``durable`` makes their names outlive a power cut.

        Raises:
            StorageFailed: the system refused, or something that is no directory stands in the way.
        """
        with told("make a directory", path):
            missing = []
            while (found := self.find(path)) is None:
                missing.append(path)
                path = path.parent
            if found.kind is not NodeKind.DIRECTORY and not self._leads_to_directory(path, found):
                raise NotADirectoryError(errno.ENOTDIR, "", str(path))
            if durable:
                # Whoever made the directory we found may have been killed before its name was synced. Above a user's
                # own directory there may be one that only lets people through (mode 0711): that is the system's.
                with contextlib.suppress(PermissionError):
                    self.disk.sync_directory(path.parent)
            for each in reversed(missing):
                # crash here: an empty directory, which every reader takes for nothing at all.
                with contextlib.suppress(FileExistsError):
                    self.disk.make_directory(each)
                if durable:
                    self.disk.sync_directory(each.parent)

    def _leads_to_directory(self, path: Path, found: Status) -> bool:
        # A user's run directory may be a link to scratch space; only inside a checkpoint are links refused.
        if found.kind is not NodeKind.LINK:
            return False
        self.disk.list_directory(path)
        return True

    def write_new(self, path: Path, chunks: Iterable[memoryview | bytes], *, durable: bool = True) -> int:
        """Write a file that must not exist yet and make its bytes durable, unless that is not asked; returns its size.

        A chunk is asked for only when the one before it has been handed over whole, so that a generator can reuse
        its buffer. The name itself is durable only after ``sync_directory``. A file that could not be finished is
        removed again as far as the system lets us.

        Raises:
            StorageFailed: the system refused, or the file exists.
        """
        with told("write", path):
            handle = self.disk.create(path)
            try:
                # crash here: a file with a prefix of its bytes, under a name no reader trusts yet.
                return self._fill(handle, chunks, durable=durable)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.disk.unlink(path)
                raise

    def _fill(self, handle: int, chunks: Iterable[memoryview | bytes], *, durable: bool) -> int:
        try:
            written = sum(self._write_all(handle, memoryview(chunk).cast("B")) for chunk in chunks)
            # A failed sync is final: the kernel may have dropped the dirty pages and would report success the
            # second time. So it is never tried again on the same file.
            if durable:
                self.disk.sync_file(handle)
        except BaseException:
            with contextlib.suppress(OSError):
                self.disk.close(handle)
            raise
        # Network file systems report a full disk only here; the handle is gone either way.
        self.disk.close(handle)
        return written

    def _write_all(self, handle: int, data: memoryview) -> int:
        done = 0
        while done < len(data):
            taken = self.disk.write(handle, data[done:])
            if taken <= 0:
                raise OSError(errno.EIO, "the system took no bytes")
            done += taken
        return done

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable.

        Raises:
            StorageFailed: the system refused.
        """
        with told("sync a directory", path):
            self.disk.sync_directory(path)

    def sync_existing(self, path: Path) -> None:
        """Make the bytes of a file durable that somebody else wrote.

        Raises:
            StorageFailed: the system refused.
        """
        with told("sync", path):
            handle = self.disk.open(path)
            try:
                self.disk.sync_file(handle)
            finally:
                self.disk.close(handle)

    def publish(self, source: Path, target: Path) -> None:
        """Move a finished file or directory to its final name, durably: the one instant it begins to exist there.

        Raises:
            StorageFailed: the system refused; the source is where it was, or the move is not yet durable.
        """
        with told("rename", target):
            self.disk.rename(source, target)
            # crash here: the new name or the old one, never both and never neither.
            self.disk.sync_directory(target.parent)
            if source.parent != target.parent:
                self.disk.sync_directory(source.parent)

    def appending(self, path: Path) -> Appender:
        """A file to which bytes are added behind its end; it is opened, or created, when it is first used."""
        return Appender(self, path)

    def replace(self, path: Path, data: bytes, *, scratch: str, durable: bool = True) -> None:
        """Replace a small file in one instant; ``scratch`` is a name beside it that nobody else uses.

        Raises:
            StorageFailed: the system refused; the old file is intact, or the new one is whole and not yet durable.
        """
        beside = path.with_name(scratch)
        with told("replace", path):
            self.remove_file(beside)
            # crash here: the old file, and a scratch file that the next replacement removes.
            self.write_new(beside, [data], durable=durable)
            if durable:
                self.publish(beside, path)
            else:
                # crash here: the old file or the new one; after a power cut anything, for nothing is synced.
                self.disk.rename(beside, path)

    def create_once(self, path: Path, data: bytes, *, scratch: str) -> bool:
        """Bring a small file into being whole, unless the name is taken; says whether it was us.

        Raises:
            StorageFailed: the system refused.
        """
        beside = path.with_name(scratch)
        with told("create", path):
            self.remove_file(beside)
            self.write_new(beside, [data])
            try:
                # crash here: the name is absent, or stands for a whole file; a scratch file may be left.
                self.disk.link(beside, path)
            except FileExistsError:
                return False
            finally:
                self.remove_file(beside)
            self.disk.sync_directory(path.parent)
            return True

    def swap_link(self, link: Path, target: str, *, scratch: str) -> None:
        """Point a symbolic link at another target in one instant.

        Raises:
            StorageFailed: the system refused; the old link is intact, or the new one not yet durable.
        """
        beside = link.with_name(scratch)
        with told("swap the link", link):
            self.remove_file(beside)
            # crash here: the old link, and a scratch link that the next swap removes.
            self.disk.make_symlink(target, beside)
            self.publish(beside, link)

    def remove_file(self, path: Path) -> None:
        """Remove a file or link; one that is not there is no error.

        Raises:
            StorageFailed: the system refused.
        """
        with told("remove", path), contextlib.suppress(FileNotFoundError):
            self.disk.unlink(path)

    def remove_tree(self, path: Path) -> None:
        """Remove whatever stands at a path, a directory with all in it; links are removed, never followed.

        What is not there, or is being removed by somebody else at the same time, is no error.

        Raises:
            StorageFailed: the system refused.
        """
        found = self.find(path)
        if found is None or found.kind is not NodeKind.DIRECTORY:
            self.remove_file(path)
            return
        with told("remove", path), contextlib.suppress(FileNotFoundError):
            for node in self.disk.list_directory(path):
                # crash here: a directory with fewer entries, under a name that only the next sweep looks at.
                self.remove_tree(path / node.name)
            self.disk.remove_directory(path)

    # ---- reading ----

    def find(self, path: Path) -> Status | None:
        """What stands at a path, or None.

        Raises:
            StorageFailed: the system refused to say.
        """
        with told("look at", path):
            try:
                return self.disk.status(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as refusal:
                # Nothing can stand under a name that is longer than a name can be.
                if refusal.errno == errno.ENAMETOOLONG:
                    return None
                raise

    def list_directory(self, path: Path) -> list[Node]:
        """The names in a directory, sorted.

        Raises:
            StorageFailed: the system refused, or there is no such directory.
        """
        with told("list", path):
            return sorted(self.disk.list_directory(path), key=lambda node: node.name)

    def read_link(self, path: Path) -> str | None:
        """Where a symbolic link points; None if there is no link.

        Raises:
            StorageFailed: the system refused.
        """
        with told("read the link", path):
            try:
                return self.disk.read_link(path)
            except FileNotFoundError:
                return None
            except OSError as refusal:
                if refusal.errno == errno.EINVAL:
                    return None
                raise

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[Source]:
        """Open a regular file; a link under this name is refused.

        Raises:
            StorageFailed: the system refused, or there is no such file.
        """
        with told("open", path):
            handle = self.disk.open(path)
        try:
            yield Source(self.disk, handle, path)
        finally:
            # What was read stays read, whatever the system says when the handle is given back.
            with contextlib.suppress(OSError):
                self.disk.close(handle)

    def read_bytes(self, path: Path, *, limit_bytes: int) -> bytes:
        """A whole small file; one larger than ``limit_bytes`` is refused before it fills the memory.

        Raises:
            StorageFailed: the system refused, there is no such file, or it is too large.
        """
        found = self.find(path)
        room = min(limit_bytes, found.size_bytes if found else 0) + 1
        with self.reading(path) as source, told("read", path):
            content = bytearray()
            while True:
                piece = bytearray(room)
                taken = source.fill(len(content), memoryview(piece))
                content += piece[:taken]
                if len(content) > limit_bytes:
                    raise OSError(errno.EFBIG, "", str(path))
                if taken < room:
                    return bytes(content)
                # It has more than a moment ago: somebody replaced it by a larger one between our look and our open.
                room = len(content) + 1

    def space(self, path: Path) -> Space:
        """Room on the file system of a path.

        Raises:
            StorageFailed: the system refused to say.
        """
        with told("ask for the free space of", path):
            return self.disk.space(path)


LOCAL: Final = Files(LocalDisk())
