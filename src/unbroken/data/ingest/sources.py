"""Find the files of documents below a folder, and their formats.

Looks at names, suffixes and sizes only. Names are relative to the folder, with ``/`` as separator and sorted the same
way on every machine, because units and shards are named by that order.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from unbroken.errors import NoTextFound, PathMissing, SourceBroken
from unbroken.files import storage_errors

Kind = Literal["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt"]

_KIND_BY_SUFFIX: Final[dict[str, Kind]] = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".parquet": "parquet",
    ".txt": "txt",
}
SUFFIXES: Final = tuple(_KIND_BY_SUFFIX)


@dataclass(frozen=True)
class TextSource:
    """One file of documents: its name below the input folder, and its size."""

    name: str
    size_bytes: int

    @property
    def kind(self) -> Kind:
        """Its format."""
        return kind_of(self.name) or "txt"

    @property
    def folder(self) -> str:
        """The folder it lies in, below the input folder; empty for the input folder itself."""
        above = str(PurePosixPath(self.name).parent)
        return "" if above == "." else above


@dataclass(frozen=True)
class SourceFiles:
    """The files below a folder: files of documents, and files of unknown format."""

    sources: tuple[TextSource, ...]
    unknown: tuple[str, ...]


def kind_of(name: str) -> Kind | None:
    """The format of a file by its suffix; None if unknown."""
    lowered = name.lower()
    return next((kind for suffix, kind in _KIND_BY_SUFFIX.items() if lowered.endswith(suffix)), None)


def find_sources(folder: Path) -> SourceFiles:
    """Every file of documents below a folder, sorted by name; hidden files and folders are skipped.

    Raises:
        PathMissing: the folder does not exist.
        NoTextFound: it holds no file of a known format.
        SourceBroken: a file name is not UTF-8, or a name is not a regular file.
        StorageFailed: an I/O error.
    """
    if not folder.is_dir():
        raise PathMissing(path=folder, purpose="folder of documents")
    with storage_errors("list", folder):
        names = sorted(_names_below(folder))
        _require_utf8(folder, names)
    sources = tuple(TextSource(name, _size_bytes(folder / name)) for name in names if kind_of(name))
    unknown = tuple(name for name in names if not kind_of(name))
    if not sources:
        raise NoTextFound(path=folder, known=SUFFIXES, unknown=unknown)
    return SourceFiles(sources, unknown)


def _size_bytes(path: Path) -> int:
    with storage_errors("stat", path):
        try:
            found = path.stat()
        except FileNotFoundError as gone:
            raise SourceBroken(path=path, reason="it is a link to a missing file") from gone
    if not stat.S_ISREG(found.st_mode):
        # Opening a pipe would block forever.
        raise SourceBroken(path=path, reason="it is not a regular file")
    return found.st_size


def _names_below(folder: Path) -> Iterator[str]:
    # Links to folders are followed, since text is often on other disks; a cycle of links is walked once.
    seen = set[str]()
    for place, folders, files in os.walk(folder, followlinks=True, onerror=_refuse):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        above = Path(place).relative_to(folder)
        yield from ((above / name).as_posix() for name in files if not name.startswith("."))


def _require_utf8(folder: Path, names: Sequence[str]) -> None:
    """Raise unless every name is UTF-8: it is written into ``shards.json`` at the end."""
    for name in names:
        if kind_of(name) and any("\ud800" <= letter <= "\udfff" for letter in name):
            raise SourceBroken(path=folder / name, reason="its name is not UTF-8")


def _refuse(refusal: OSError) -> None:
    raise refusal
