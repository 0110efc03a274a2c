"""Files of one JSON object a line that are only ever added to, one file a job: how they are written and read.

A job that is killed leaves a line half written, a power cut may leave zeros. So a writer that finds, or has left, an
unfinished line starts a new one after it, and a reader counts and skips what is not a line of ours.
"""

import errno
import json
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
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
        # Whether what stands at the end of the file may be an unfinished line; not known before the first write.
        self._may_be_torn = True

    def write(self, lines: list[Values], *, durable: bool = False) -> None:
        """Add lines, in one piece; ``durable`` makes them, and all before them, outlive a power cut.

        Raises:
            StorageFailed: the system refused; the last line may be unfinished, and the next write begins behind it.
        """
        data = b"".join(json.dumps(each, allow_nan=False).encode() + b"\n" for each in lines)
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
            StorageFailed: the system refused.
        """
        with self._lock:
            self._appender.close()


@dataclass
class Torn:
    """How many lines a reader met that are none of ours: cut by a crash, or damaged."""

    lines: int = 0


def jobs_in(directory: Path, files: Files = LOCAL) -> list[int]:
    """The jobs that have a file in a directory, in order.

    Raises:
        StorageFailed: the system refused.
    """
    if files.find(directory) is None:
        return []
    nodes = files.list_directory(directory)
    found = (_NAME.fullmatch(node.name) for node in nodes if node.kind is NodeKind.FILE)
    return sorted(int(match["job"]) for match in found if match)


def read_lines(path: Path, torn: Torn, files: Files = LOCAL) -> Iterator[Values]:
    """The whole lines of one file, one at a time; what is no JSON object is counted and passed by.

    Raises:
        StorageFailed: the system refused.
    """
    for line in _split(path, files):
        if line:
            try:
                found: Any = parsed(line)
            except ValueError:
                found = None
            if isinstance(found, dict):
                yield found
            else:
                torn.lines += 1


def _split(path: Path, files: Files) -> Iterator[bytes]:
    buffer = bytearray(_READ_BYTES)
    rest, offset = b"", 0
    with files.reading(path) as source:
        while taken := source.fill(offset, memoryview(buffer)):
            offset += taken
            *whole, rest = (rest + bytes(memoryview(buffer)[:taken])).split(b"\n")
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
