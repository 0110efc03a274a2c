"""The files of documents below a folder: which there are, and of what kind.

Knows names, suffixes and sizes, opens nothing. Names are relative to the folder, with ``/`` between their parts and in
one order on every machine, because everything that is made from them is named by that order.
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
class Source:
    """One file of documents: its name below the input folder, and its bytes when it was looked at."""

    name: str
    size_bytes: int

    @property
    def kind(self) -> Kind:
        """How its documents are read."""
        return kind_of(self.name) or "txt"

    @property
    def folder(self) -> str:
        """The folder it lies in, below the input folder; empty for the input folder itself."""
        above = str(PurePosixPath(self.name).parent)
        return "" if above == "." else above


@dataclass(frozen=True)
class Found:
    """What lies below a folder: files of documents, and files nobody knows how to read."""

    sources: tuple[Source, ...]
    unknown: tuple[str, ...]


def kind_of(name: str) -> Kind | None:
    """What a file's suffix says it is; None if it says nothing known."""
    lowered = name.lower()
    return next((kind for suffix, kind in _KIND_BY_SUFFIX.items() if lowered.endswith(suffix)), None)


def find_sources(folder: Path) -> Found:
    """Every file of documents below a folder, in order of name; hidden files and folders are not looked at.

    Raises:
        PathMissing: there is no such folder.
        NoTextFound: it holds no file that is read.
        SourceBroken: a file's name is no UTF-8, or there is no regular file under a name.
        StorageFailed: the system refused to list it.
    """
    if not folder.is_dir():
        raise PathMissing(path=folder, purpose="folder of documents")
    with storage_errors("list", folder):
        names = sorted(_names_below(folder))
        _require_utf8(folder, names)
    sources = tuple(Source(name, _size_bytes(folder / name)) for name in names if kind_of(name))
    unknown = tuple(name for name in names if not kind_of(name))
    if not sources:
        raise NoTextFound(path=folder, known=SUFFIXES, unknown=unknown)
    return Found(sources, unknown)


def _size_bytes(path: Path) -> int:
    with storage_errors("look at", path):
        try:
            found = path.stat()
        except FileNotFoundError as gone:
            raise SourceBroken(path=path, reason="it links to a file that is not there") from gone
    if not stat.S_ISREG(found.st_mode):
        # A pipe would be waited for without an end.
        raise SourceBroken(path=path, reason="it is no regular file")
    return found.st_size


def _names_below(folder: Path) -> Iterator[str]:
    # Links to folders are followed, for people keep their text on other disks; a loop of links is walked once.
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
    """Pass if every name can be written into a list, which is the last thing that is done with it."""
    for name in names:
        if kind_of(name) and any("\ud800" <= letter <= "\udfff" for letter in name):
            raise SourceBroken(path=folder / name, reason="its name is no UTF-8, and no list could name it")


def _refuse(refusal: OSError) -> None:
    raise refusal
