"""The only place that writes, syncs, renames or removes files.

``Files`` builds on a ``Disk`` the few operations that the rest of the package needs (write a new file durably, publish
by rename, swap a link, remove a tree) and promises their order of syncs. Nothing here knows what a checkpoint is.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from unbroken.disk import DIRECT_BYTES, Disk, LocalDisk, Node, NodeKind, Space, Status
from unbroken.errors import StorageFailed, UnbrokenError
from unbroken.quoting.log import logger

_log = logger(__name__)
# What file systems answer that lack an operation. EINVAL is fsync's word for "not on this kind of file", EPERM that of
# link and symlink for "not on this file system".
_LACKING: Final = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_NO_DIRECTORY_SYNC: Final = _LACKING | {errno.EINVAL}
_NO_LINKS: Final = _LACKING | {errno.EPERM}
# Below this a read costs less than finding out what the file system can do.
_WORTH_DIRECT_BYTES: Final = 1 << 20
_NO_DIRECT: Final = _LACKING | {errno.EINVAL}


def aligned_size(size_bytes: int) -> int:
    """A size rounded up to what direct I/O reads and writes."""
    return size_bytes + -size_bytes % DIRECT_BYTES


def aligned_memory(size_bytes: int) -> memoryview:
    """Memory that begins at a page, as direct I/O needs it."""
    return memoryview(mmap.mmap(-1, max(size_bytes, DIRECT_BYTES)))


@contextlib.contextmanager
def storage_errors(operation: str, path: Path) -> Iterator[None]:
    """Raise an ``OSError`` as ``StorageFailed``, with the operation and the path."""
    try:
        yield
    except UnbrokenError:
        # Storage errors are OSErrors too, those of object stores among them.
        raise
    except OSError as refusal:
        cause = os.strerror(refusal.errno) if refusal.errno else str(refusal)
        raise StorageFailed(operation=operation, path=path, cause=cause) from refusal


@contextlib.contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    """A directory in the folder for temporary files, removed at the end with all that is in it."""
    # Only here: most commands would load it, and what it imports, for nothing.
    import tempfile

    with tempfile.TemporaryDirectory(prefix=prefix) as directory:
        yield Path(directory)


@dataclass(frozen=True)
class Source:
    """A file open for reading."""

    disk: Disk
    handle: int
    path: Path

    def fill(self, offset: int, into: memoryview) -> int:
        """Fill a buffer from an offset; returns how many bytes there were, fewer only at the end of the file.

        Raises:
            StorageFailed: an I/O error.
        """
        done = 0
        with storage_errors("read", self.path):
            while done < len(into) and (taken := self.disk.read_at(self.handle, offset + done, into[done:])):
                done += taken
        return done

    def fill_direct(self, offset: int, size_bytes: int, into: memoryview) -> int:
        """Fill an aligned buffer from an offset past the page cache; returns how many of ``size_bytes`` there were.

        Where the file system cannot, or for a few bytes, through the cache.

        Raises:
            StorageFailed: an I/O error.
        """
        with storage_errors("read", self.path):
            if size_bytes < _WORTH_DIRECT_BYTES or offset % DIRECT_BYTES:
                return self.fill(offset, into[:size_bytes])
            try:
                self.disk.use_direct_io(self.handle, True)
                return min(size_bytes, self._fill_aligned(offset, into[: aligned_size(size_bytes)]))
            except OSError as refusal:
                if refusal.errno not in _NO_DIRECT:
                    raise
            self.disk.use_direct_io(self.handle, False)
        return self.fill(offset, into[:size_bytes])

    def _fill_aligned(self, offset: int, into: memoryview) -> int:
        done = 0
        # A number of bytes that is no multiple is the end of the file.
        while done < len(into) and done % DIRECT_BYTES == 0:
            taken = self.disk.read_at(self.handle, offset + done, into[done:])
            if not taken:
                break
            done += taken
        return done


@dataclass
class Appender:
    """A file open for writing behind its end; after an error the next call opens it again: no sync is tried twice."""

    files: "Files"
    path: Path
    _handle: int | None = None
    _is_name_durable: bool = False

    def append(self, data: bytes) -> None:
        """Write bytes to the kernel, all of them.

        Raises:
            StorageFailed: an I/O error; a prefix of the bytes may stand at the end of the file.
        """
        with self._using("append to") as handle:
            # crash here: the file ends anywhere inside these bytes; what was synced before them is intact.
            self.files._write_all(handle, memoryview(data))

    def sync(self) -> None:
        """Make all that was written durable, and the file's name.

        Raises:
            StorageFailed: an I/O error; what was written since the last sync may be lost.
        """
        with self._using("sync") as handle:
            self.files.disk.sync_file(handle)
            if not self._is_name_durable:
                # crash here: durable bytes under a name that a power cut takes back; nobody was promised them yet.
                self.files._sync_names(self.path.parent)
                self._is_name_durable = True

    def close(self) -> None:
        """Give the handle back; a closed one opens the file again when it is used.

        Raises:
            StorageFailed: an I/O error; what was written since the last sync may be lost.
        """
        handle, self._handle = self._handle, None
        with storage_errors("close", self.path):
            if handle is not None:
                self.files.disk.close(handle)

    @contextlib.contextmanager
    def _using(self, operation: str) -> Iterator[int]:
        with storage_errors(operation, self.path):
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
    """File operations over one disk. Every ``OSError`` surfaces as ``StorageFailed``."""

    disk: Disk
    # Whether what the file system lacks is logged.
    logs_lacking: bool = True
    # What the file system was already found to lack: saying it once is enough.
    _lacking: set[str] = field(default_factory=set, repr=False, compare=False)

    @property
    def can_rename(self) -> bool:
        """Whether what is there can be given another name; not in an object store."""
        return True

    # ---- what a file system may lack, or do twice ----

    def _sync_names(self, directory: Path) -> None:
        try:
            self.disk.sync_directory(directory)
        except OSError as refusal:
            if refusal.errno not in _NO_DIRECTORY_SYNC:
                raise
            self._degrade("directory fsync", directory, "whether new files survive a power cut is up to it")

    def _degrade(self, lacking: str, path: Path, consequence: str) -> None:
        if lacking not in self._lacking:
            self._lacking.add(lacking)
            if self.logs_lacking:
                _log.warning("the file system of %s has no %s: %s", path, lacking, consequence)

    @property
    def lacking(self) -> frozenset[str]:
        """What the file system was found to lack so far: ``directory fsync``, ``hard links``, ``symlinks``."""
        return frozenset(self._lacking)

    def _rename(self, source: Path, target: Path) -> None:
        moved = self.disk.status(source)
        try:
            self.disk.rename(source, target)
        except FileNotFoundError:
            # A network file system may do it, lose the answer and ask again: then the source is gone because it is ours
            # that is at the target.
            if not self._is_same(target, moved):
                raise

    def _is_same(self, path: Path, status: Status) -> bool:
        found = self.find(path)
        return found is not None and (found.identity, found.kind) == (status.identity, status.kind)

    def _claim(self, beside: Path, path: Path, *, is_contested: bool) -> bool:
        """Give a finished file a name that must be free; says whether it was."""
        try:
            # crash here: the name is absent, or names a whole file; a scratch file may be left.
            self.disk.link(beside, path)
        except FileExistsError:
            # Our own, if the request was repeated.
            return self._is_same(path, self.disk.status(beside))
        except OSError as refusal:
            if refusal.errno not in _NO_LINKS:
                raise
            self._degrade("hard links", path.parent, "a lease is claimed as an empty file, then replaced")
            return self._claim_empty(beside, path) if is_contested else self._move_to_free(beside, path)
        return True

    def _move_to_free(self, beside: Path, path: Path) -> bool:
        if self.find(path) is not None:
            return False
        self._rename(beside, path)
        return True

    def _claim_empty(self, beside: Path, path: Path) -> bool:
        try:
            handle = self.disk.create(path)
        except FileExistsError:
            return False
        try:
            self.disk.close(handle)
            # crash here: an empty file under the name, which its readers take for one that nobody finished.
            self._rename(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self.disk.unlink(path)
            raise
        return True

    # ---- writing ----

    def make_directory(self, path: Path, *, durable: bool = False) -> None:
        """Create a directory and the parents it lacks; ``durable`` makes their names outlive a power cut.

        Raises:
            StorageFailed: an I/O error, or something that is not a directory is in the way.
        """
        with storage_errors("make a directory", path):
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
                    self._sync_names(path.parent)
            for each in reversed(missing):
                # crash here: an empty directory, which every reader takes for nothing at all.
                with contextlib.suppress(FileExistsError):
                    self.disk.make_directory(each)
                if durable:
                    self._sync_names(each.parent)

    def _leads_to_directory(self, path: Path, found: Status) -> bool:
        # A user's run directory may be a link to scratch space; only inside a checkpoint are links refused.
        if found.kind is not NodeKind.LINK:
            return False
        self.disk.list_directory(path)
        return True

    def write_new(
        self, path: Path, chunks: Iterable[memoryview | bytes], *, durable: bool = True, is_direct: bool = False
    ) -> int:
        """Write a file that must not exist yet and make its bytes durable, unless that is not asked; returns its size.

        ``is_direct`` lets bytes go past the page cache as long as chunks are aligned to ``DIRECT_BYTES`` in memory and
        length, where the file system can.

        A chunk is asked for only when the one before it has been written whole, so that a generator can reuse
        its buffer. The name itself is durable only after ``sync_directory``. A file that could not be finished is
        removed again as far as the system lets us.

        Raises:
            StorageFailed: an I/O error, or the file exists.
        """
        with storage_errors("write", path):
            handle = self.disk.create(path)
            try:
                # crash here: a file with a prefix of its bytes, under a name no reader trusts yet.
                return self._fill(handle, chunks, durable=durable, is_direct=is_direct)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.disk.unlink(path)
                raise

    def _fill(self, handle: int, chunks: Iterable[memoryview | bytes], *, durable: bool, is_direct: bool) -> int:
        written = 0
        try:
            is_direct = is_direct and self._try_direct(handle)
            for chunk in chunks:
                data = memoryview(chunk).cast("B")
                done = self._write_direct(handle, data) if is_direct else 0
                if is_direct and done < len(data):
                    self.disk.use_direct_io(handle, False)
                    is_direct = False
                written += done + self._write_all(handle, data[done:])
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

    def _try_direct(self, handle: int) -> bool:
        try:
            self.disk.use_direct_io(handle, True)
        except OSError as refusal:
            # Memory file systems and some network ones have no direct I/O.
            if refusal.errno not in _NO_DIRECT:
                raise
            return False
        return True

    def _write_direct(self, handle: int, data: memoryview) -> int:
        """Write what can go past the page cache; returns how much that was."""
        done, whole = 0, len(data) - len(data) % DIRECT_BYTES
        while done < whole and done % DIRECT_BYTES == 0:
            try:
                taken = self.disk.write(handle, data[done:whole])
            except OSError as refusal:
                # The file system wants another alignment than ours.
                if refusal.errno != errno.EINVAL:
                    raise
                break
            if taken <= 0:
                break
            done += taken
        return done

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
            StorageFailed: an I/O error.
        """
        with storage_errors("sync a directory", path):
            self._sync_names(path)

    def sync_existing(self, path: Path) -> None:
        """Make the bytes of a file durable that somebody else wrote.

        Raises:
            StorageFailed: an I/O error.
        """
        with storage_errors("sync", path):
            handle = self.disk.open(path)
            try:
                self.disk.sync_file(handle)
            finally:
                self.disk.close(handle)

    def publish(self, source: Path, target: Path) -> None:
        """Move a finished file or directory to its final name, durably: the one instant it begins to exist there.

        Raises:
            StorageFailed: an I/O error; the source is where it was, or the move is not yet durable.
        """
        with storage_errors("rename", target):
            self._rename(source, target)
            # crash here: the new name or the old one, never both and never neither.
            self._sync_names(target.parent)
            if source.parent != target.parent:
                self._sync_names(source.parent)

    def appending(self, path: Path) -> Appender:
        """A file to which bytes are added behind its end; it is opened, or created, when it is first used."""
        return Appender(self, path)

    def replace(self, path: Path, data: bytes, *, scratch: str, durable: bool = True) -> None:
        """Replace a small file in one instant; ``scratch`` is a name beside it that nobody else uses.

        Raises:
            StorageFailed: an I/O error; the old file is intact, or the new one is whole and not yet durable.
        """
        beside = path.with_name(scratch)
        with storage_errors("replace", path):
            self.remove_file(beside)
            # crash here: the old file, and a scratch file that the next replacement removes.
            self.write_new(beside, [data], durable=durable)
            if durable:
                self.publish(beside, path)
            else:
                # crash here: the old file or the new one; after a power cut anything, for nothing is synced.
                self._rename(beside, path)

    def create_once(self, path: Path, data: bytes, *, scratch: str, is_contested: bool = True) -> bool:
        """Bring a small file into being whole, unless the name is taken; says whether it was us.

        Where the file system has no hard links, a crash may leave an empty file under a name that others may contest
        at the same moment.

        Raises:
            StorageFailed: an I/O error.
        """
        beside = path.with_name(scratch)
        with storage_errors("create", path):
            self.remove_file(beside)
            self.write_new(beside, [data])
            try:
                if not self._claim(beside, path, is_contested=is_contested):
                    return False
            finally:
                self.remove_file(beside)
            self._sync_names(path.parent)
            return True

    def swap_link(self, link: Path, target: str, *, scratch: str) -> bool:
        """Point a symbolic link at another target in one instant; False where the file system has no symlinks.

        Raises:
            StorageFailed: an I/O error; the old link is intact, or the new one not yet durable.
        """
        beside = link.with_name(scratch)
        with storage_errors("update the symlink", link):
            self.remove_file(beside)
            try:
                # crash here: the old link, and a scratch link that the next swap removes.
                self.disk.make_symlink(target, beside)
            except FileExistsError:
                # Our own, if the request was repeated.
                if self.read_link(beside) != target:
                    raise
            except OSError as refusal:
                if refusal.errno not in _NO_LINKS:
                    raise
                self._degrade("symlinks", link.parent, f"`{link.name}` is not kept up to date there")
                return False
            self.publish(beside, link)
            return True

    def remove_file(self, path: Path) -> None:
        """Remove a file or link; one that is not there is no error.

        Raises:
            StorageFailed: an I/O error.
        """
        with storage_errors("remove", path), contextlib.suppress(FileNotFoundError):
            self.disk.unlink(path)

    def remove_tree(self, path: Path) -> None:
        """Remove whatever is at a path, a directory with all in it; links are removed, never followed.

        What is not there, or is being removed by somebody else at the same time, is no error.

        Raises:
            StorageFailed: an I/O error.
        """
        found = self.find(path)
        if found is None or found.kind is not NodeKind.DIRECTORY:
            self.remove_file(path)
            return
        with storage_errors("remove", path), contextlib.suppress(FileNotFoundError):
            for node in self.disk.list_directory(path):
                # crash here: a directory with fewer entries, under a name that only the next sweep looks at.
                self.remove_tree(path / node.name)
            self.disk.remove_directory(path)

    def remove_if_empty(self, path: Path) -> None:
        """Remove a directory, unless there is something in it; no error if it is gone.

        Raises:
            StorageFailed: an I/O error.
        """
        with storage_errors("remove", path), contextlib.suppress(FileNotFoundError):
            try:
                # crash here: an empty directory more or less.
                self.disk.remove_directory(path)
            except OSError as refusal:
                if refusal.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise

    # ---- reading ----

    def find(self, path: Path) -> Status | None:
        """What is at a path, or None.

        Raises:
            StorageFailed: an I/O error.
        """
        with storage_errors("stat", path):
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
            StorageFailed: an I/O error, or there is no such directory.
        """
        with storage_errors("list", path):
            return sorted(self.disk.list_directory(path), key=lambda node: node.name)

    def list_present(self, path: Path) -> list[Node]:
        """The names in a directory, sorted; none if there is no such directory, or another process just removed it.

        Raises:
            StorageFailed: an I/O error.
        """
        try:
            return self.list_directory(path)
        except StorageFailed as refused:
            if self.find(path) is None:
                # Or the frames of all callers would stay alive, with the iterators of loops in them, until the garbage
                # collector comes: the errors and the frames they passed refer to each other.
                for each in (refused, refused.__cause__):
                    if each is not None:
                        each.__traceback__ = None
                return []
            raise

    def read_link(self, path: Path) -> str | None:
        """Where a symbolic link points; None if there is no link.

        Raises:
            StorageFailed: an I/O error.
        """
        with storage_errors("read the link", path):
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
            StorageFailed: an I/O error, or there is no such file.
        """
        with storage_errors("open", path):
            handle = self.disk.open(path)
        try:
            yield Source(self.disk, handle, path)
        finally:
            # What was read stays read, whatever closing the handle gives.
            with contextlib.suppress(OSError):
                self.disk.close(handle)

    def read_bytes(self, path: Path, *, limit_bytes: int) -> bytes:
        """A whole small file; one larger than ``limit_bytes`` is refused before it fills the memory.

        Raises:
            StorageFailed: an I/O error, there is no such file, or it is too large.
        """
        found = self.find(path)
        room = min(limit_bytes, found.size_bytes if found else 0) + 1
        with self.reading(path) as source, storage_errors("read", path):
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

    def has_direct_io(self, path: Path) -> bool:
        """Whether a file can be read past the page cache.

        Raises:
            StorageFailed: an I/O error for another reason.
        """
        with storage_errors("open", path):
            try:
                handle = self.disk.open_direct(path)
            except OSError as refusal:
                if refusal.errno not in _NO_DIRECT:
                    raise
                return False
            self.disk.close(handle)
            return True

    def space(self, path: Path) -> Space:
        """Room on the file system of a path.

        Raises:
            StorageFailed: an I/O error.
        """
        with storage_errors("read the free space of", path):
            return self.disk.space(path)


LOCAL: Final = Files(LocalDisk())
