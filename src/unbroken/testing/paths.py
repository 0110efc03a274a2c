"""Path resolution of the disk in memory: links, ``..`` and limits as in the Linux kernel."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, NoReturn

from unbroken.testing.durability import DirectoryInode, Inode, LinkInode

# The kernel's own limits.
_LONGEST_NAME_BYTES: Final = 255
_LONGEST_PATH_BYTES: Final = 4095
_MOST_LINKS_FOLLOWED: Final = 40


def refuse(code: int, path: Path | None = None) -> NoReturn:
    """Say no as the kernel does.

    Raises:
        OSError: always, of the subclass that belongs to the code.
    """
    if path is None:
        raise OSError(code, os.strerror(code))
    raise OSError(code, os.strerror(code), str(path))


@dataclass(frozen=True)
class PathEnd:
    """Where a path ends; the root, and a path that ends in ``..``, have no name of their own."""

    directory: DirectoryInode
    name: str | None
    inode: Inode | None


@dataclass(frozen=True)
class Tree:
    """All that can be reached from one root."""

    root: DirectoryInode

    def at(self, path: Path, *, follow: bool = False) -> PathEnd:
        """Where a path ends; a link at the last place is followed only on request.

        Raises:
            OSError: ENOENT, ENOTDIR, ELOOP or ENAMETOOLONG on the way.
        """
        if "\0" in str(path):
            raise ValueError("embedded null byte")
        if len(os.fsencode(path)) > _LONGEST_PATH_BYTES:
            refuse(errno.ENAMETOOLONG, path)
        here = self.root
        parts = list(reversed(path.parts))
        followed = 0
        while parts:
            part = parts.pop()
            if part == "/":
                here = self.root
                continue
            if part == "..":
                here = here.parent or here
                continue
            if len(os.fsencode(part)) > _LONGEST_NAME_BYTES:
                refuse(errno.ENAMETOOLONG, path)
            inode = here.entries.get(part)
            if not parts and not (follow and isinstance(inode, LinkInode)):
                return PathEnd(here, part, inode)
            if inode is None:
                refuse(errno.ENOENT, path)
            if isinstance(inode, LinkInode):
                followed += 1
                if followed > _MOST_LINKS_FOLLOWED:
                    refuse(errno.ELOOP, path)
                parts.extend(reversed(PurePosixPath(inode.target).parts))
            elif isinstance(inode, DirectoryInode):
                here = inode
            else:
                refuse(errno.ENOTDIR, path)
        return PathEnd(here.parent or here, None, here)

    def existing(self, path: Path, *, follow: bool = False) -> Inode:
        """The inode at a path.

        Raises:
            OSError: as ``at``, and ENOENT for nothing.
        """
        inode = self.at(path, follow=follow).inode
        if inode is None:
            refuse(errno.ENOENT, path)
        return inode

    def directory(self, path: Path) -> DirectoryInode:
        """The directory a path leads to, through a link too.

        Raises:
            OSError: as ``existing``, and ENOTDIR for anything else.
        """
        inode = self.existing(path, follow=True)
        if not isinstance(inode, DirectoryInode):
            refuse(errno.ENOTDIR, path)
        return inode

    def vacant(self, path: Path) -> tuple[DirectoryInode, str]:
        """The directory and the name for something new.

        Raises:
            OSError: as ``at``, and EEXIST where something exists.
        """
        place = self.at(path)
        if place.inode is not None or place.name is None:
            refuse(errno.EEXIST, path)
        return place.directory, place.name
