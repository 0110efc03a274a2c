"""The files of a run inside its directory."""

import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors import BadRunPath, NotAStore, StorageFailed
from unbroken.store.directory import Store
from unbroken.store.names import CHECKPOINTS, CHECKPOINTS_HERE

# Of one name, on every usual file system of Linux.
_MOST_NAME_BYTES: Final = 255
# s3://bucket/a, or what a Path makes of it, s3:/bucket/a. "./s3:/bucket/a" is a path all the same.
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@dataclass(frozen=True)
class Layout:
    """A run directory and the names in it."""

    run: Path

    @property
    def checkpoints(self) -> Path:
        """The store: a folder in the run, or the run itself where a framework saves there."""
        return self.run if self.checkpoints_here.exists() else self.run / CHECKPOINTS

    @property
    def checkpoints_here(self) -> Path:
        """A mark: the checkpoints stand in the run's directory itself."""
        return self.run / CHECKPOINTS_HERE

    @property
    def config(self) -> Path:
        """The config that started the run."""
        return self.run / "config.json"

    @property
    def accepted(self) -> Path:
        """The values that were changed by ``--accept`` since then."""
        return self.run / "accepted.json"

    @property
    def run_state(self) -> Path:
        """The live snapshot for ``status``."""
        return self.run / ".run_state.json"

    @property
    def stop_request(self) -> Path:
        """The flag file that ``unbroken stop`` writes."""
        return self.run / ".shutdown_requested"

    @property
    def journal(self) -> Path:
        """The events of each job."""
        return self.run / "journal"

    @property
    def metrics(self) -> Path:
        """The step metrics of each job."""
        return self.run / "metrics"

    @property
    def trackers(self) -> Path:
        """The last step that each job has sent to each tracker."""
        return self.run / "trackers"


def absolute_run(directory: str | os.PathLike[str]) -> Path:
    """The directory of a run as an absolute path, so that a later ``os.chdir`` does not move the run.

    Raises:
        BadRunPath: it is empty, an address, or no path at all.
    """
    text = os.fspath(directory)
    _require_path(text)
    return Path(text).absolute()


def _require_path(text: str) -> None:
    if not text:
        raise BadRunPath(path=text, problem="empty")
    if "\0" in text:
        raise BadRunPath(path=text, problem="nul")
    if _ADDRESS.match(text):
        raise BadRunPath(path=text, problem="address", obstacle=text.partition("/")[0])


def require_reachable(text: str) -> bool:
    """Pass if what is at a path can be looked at, or nothing is there; says whether its nearest part is a directory.

    Raises:
        BadRunPath: it is empty, an address, too long, a dangling symlink, or behind a directory that lets nobody in.
    """
    _require_path(text)
    path = Path(text)
    for place in (path, *path.parents):
        try:
            is_directory = stat.S_ISDIR(place.stat().st_mode)
            _require_short(path, place)
            return is_directory
        except (FileNotFoundError, NotADirectoryError):
            if place.is_symlink():
                target = str(place.readlink())
                raise BadRunPath(path=text, problem="dangling", obstacle=str(place), target=target) from None
        except OSError as refusal:
            raise _bad_path(path, refusal) from refusal
    return True


def _require_short(path: Path, nearest: Path) -> None:
    """Names that are yet to be made below what is there: the first of them is made before a later one is refused."""
    most_bytes = os.pathconf(nearest, "PC_NAME_MAX")
    for name in path.parts[len(nearest.parts) :]:
        if len(os.fsencode(name)) > most_bytes:
            raise BadRunPath(path=str(path), problem="long-name", obstacle=name)


def _bad_path(path: Path, refusal: OSError) -> BadRunPath | StorageFailed:
    if refusal.errno == errno.ENAMETOOLONG:
        longest = max(path.parts, key=lambda part: len(os.fsencode(part)))
        if len(os.fsencode(longest)) > _MOST_NAME_BYTES:
            return BadRunPath(path=str(path), problem="long-name", obstacle=longest)
        return BadRunPath(path=str(path), problem="too-long", obstacle=str(path))
    if refusal.errno == errno.ELOOP:
        return BadRunPath(path=str(path), problem="circular")
    if refusal.errno == errno.EACCES:
        closed = next((above for above in path.absolute().parents if os.access(above, os.F_OK)), path)
        return BadRunPath(path=str(path), problem="forbidden", obstacle=str(closed))
    return StorageFailed(operation="read", path=path, cause=os.strerror(refusal.errno or errno.EIO))


def require_directory(run: Path) -> None:
    """Pass if a run can be at a path: nothing is there yet, at it or above it, but directories.

    Raises:
        BadRunPath: it is empty, an address, too long, a dangling symlink, or behind a directory that lets nobody in.
        NotAStore: there is a file.
    """
    if not require_reachable(str(run)):
        # Of a path below a file, the file itself is to be named.
        in_the_way = next((place for place in (run, *run.parents) if place.exists()), run)
        raise NotAStore(path=in_the_way, is_directory=False)


def run_of(store: Store) -> Layout:
    """The run a store belongs to; a store without a run directory is its own run."""
    if store.root.name == CHECKPOINTS:
        return Layout(store.root.parent)
    # ".", "..", or a link to it: by its text alone the run's lease would not be found.
    resolved = store.root.resolve()
    return Layout(resolved.parent if resolved.name == CHECKPOINTS else store.root)
