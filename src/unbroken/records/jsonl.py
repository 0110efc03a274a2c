"""Files of one JSON object a line that are only ever added to, one file a job: how they are written and read.

A job that is killed leaves a line half written, a power cut may leave zeros. So a writer that finds, or has left, an
unfinished line starts a new one after it, and a reader counts and skips what is not a line of ours.
"""

import errno
import itertools
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.disk import NodeKind
from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.store.fields import parsed

Values = dict[str, Any]

_NAME: Final = re.compile(r"job-(?P<job>[0-9]{4,18})\.jsonl")
_READ_BYTES: Final = 1 << 20
# Read from the end of a file at first; then four times as much, until it is enough.
_TAIL_BYTES: Final = 1 << 12
# A line of ours is some hundred bytes; one without an end must not fill the memory.
_LONGEST_LINE_BYTES: Final = 1 << 24


def job_file(directory: Path, job: int) -> Path:
    """The file of one job."""
    return directory / f"job-{job:04}.jsonl"


class LineWriter:
    """Adds lines to the file of one job; any thread may call it.

    Args:
        path: the file; its directory is made if it is not there.
        files: the storage.
        within: a directory that is never made: a run that was moved or deleted is not created again by its records.
    """

    def __init__(self, path: Path, files: Files = LOCAL, *, within: Path | None = None) -> None:
        self._files = files
        self._path = path
        self._within = within
        self._appender = files.appending(path)
        self._lock = threading.Lock()
        # Whether what is at the end of the file may be an unfinished line; not known before the first write.
        self._may_be_torn = True

    def write(self, lines: list[Values], *, durable: bool = False) -> None:
        """Add lines, in one piece; ``durable`` makes them, and all before them, outlive a power cut.

        Raises:
            StorageFailed: an I/O error; the last line may be unfinished, and the next write begins behind it.
        """
        self.write_encoded([json.dumps(each, allow_nan=False) for each in lines], durable=durable)

    def write_encoded(self, lines: list[str], *, durable: bool = False) -> None:
        """Add lines that are JSON already.

        Raises:
            StorageFailed: as ``write`` raises it.
        """
        data = "".join(f"{each}\n" for each in lines).encode()
        with self._lock:
            if data:
                self._append(data)
            if durable:
                self._sync()

    def _append(self, data: bytes) -> None:
        # An empty line costs a byte and is nothing to a reader; asking how the file ends would cost more.
        found = self._files.find(self._path) if self._may_be_torn else None
        if found is None and self._may_be_torn:
            if self._within is not None and self._files.find(self._within) is None:
                cause = os.strerror(errno.ENOENT)
                raise StorageFailed(operation="append to", path=self._path, cause=cause)
            self._files.make_directory(self._path.parent, durable=True)
        self._may_be_torn, before = True, b"\n" if found is not None and found.size_bytes else b""
        # crash here: the lines before are whole, and the last one may be cut anywhere.
        self._appender.append(before + data)
        self._may_be_torn = False

    def _sync(self) -> None:
        try:
            self._appender.sync()
        except StorageFailed:
            # The end of the last line may be among what the kernel dropped.
            self._may_be_torn = True
            raise

    def close(self) -> None:
        """Give the file back.

        Raises:
            StorageFailed: an I/O error.
        """
        with self._lock:
            self._appender.close()


@dataclass
class TornLines:
    """How many lines a reader met that are none of ours: cut by a crash, or damaged."""

    lines: int = 0


def jobs_in(directory: Path, files: Files = LOCAL) -> list[int]:
    """The jobs that have a file in a directory, in order.

    Raises:
        StorageFailed: an I/O error.
    """
    nodes = files.list_present(directory)
    found = (_NAME.fullmatch(node.name) for node in nodes if node.kind is NodeKind.FILE)
    return sorted(int(match["job"]) for match in found if match)


def read_lines(path: Path, torn: TornLines, files: Files = LOCAL) -> Iterator[Values]:
    """The whole lines of one file, one at a time; what is no JSON object is counted and passed by.

    Raises:
        StorageFailed: an I/O error.
    """
    return _objects(_split(path, files), torn)


def read_last_lines(
    path: Path, torn: TornLines, is_early: Callable[[Values], bool], files: Files = LOCAL
) -> Iterator[Values]:
    """The lines at the end of a file, from an early one on: a large file is not read for its last lines.

    The lines are in order: where one is early, all before it are. Some early ones may be among those that are given.

    Raises:
        StorageFailed: an I/O error.
    """
    found = files.find(path)
    size_bytes = 0 if found is None else found.size_bytes
    tail_bytes = _TAIL_BYTES
    while tail_bytes < size_bytes and not _begins_early(path, size_bytes - tail_bytes, is_early, files):
        tail_bytes *= 4
    if tail_bytes >= size_bytes:
        return read_lines(path, torn, files)
    lines = _split(path, files, size_bytes - tail_bytes)
    # The end of a line; if it is a whole one, the line behind it is early, and so is this.
    next(lines)
    return _objects(lines, torn)


def _begins_early(path: Path, offset: int, is_early: Callable[[Values], bool], files: Files) -> bool:
    lines = _split(path, files, offset)
    next(lines)
    # A line that a crash cut says nothing of the lines before it.
    return any(is_early(line) for line in itertools.islice(_objects(lines, TornLines()), 1))


def _objects(lines: Iterator[bytes], torn: TornLines) -> Iterator[Values]:
    for line in lines:
        if line:
            try:
                found: Any = parsed(line)
            except ValueError:
                found = None
            if isinstance(found, dict):
                yield found
            else:
                torn.lines += 1


def _split(path: Path, files: Files, offset: int = 0) -> Iterator[bytes]:
    buffer = memoryview(bytearray(_READ_BYTES))
    # Little at first: of a thousand files only the first line may be wanted.
    rest, reach = b"", _TAIL_BYTES
    with files.reading(path) as source:
        while taken := source.fill(offset, buffer[:reach]):
            offset, reach = offset + taken, min(2 * reach, _READ_BYTES)
            *whole, rest = (rest + bytes(buffer[:taken])).split(b"\n")
            yield from whole
            if len(rest) > _LONGEST_LINE_BYTES:
                raise StorageFailed(operation="read", path=path, cause="a line of it has no end")
    yield rest


def plain(value: object) -> Any:  # noqa: ANN401 -- JSON is any
    """A value as JSON carries it; a number that JSON has no word for becomes its name.

    Raises:
        TypeError: the value has no place in a record.
    """
    if value is None or isinstance(value, bool | str):
        return value
    # A number of another library that is an int or a float becomes the plain one.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    raise TypeError(f"a {type(value).__name__} has no place in a record of a run")
