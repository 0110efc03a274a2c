"""From the bytes of a file to its documents, whatever its format.

Promises that every byte of a file is either in a document, between documents, or told: a document that cannot be read
is reported with its place, a file that ends too early is refused whole. Reads in batches of bounded size, and digests
the raw bytes on the way, so that what a shard was made from can be proven later.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

from unbroken.data.ingest.sources import Kind
from unbroken.errors import ColumnMissing, PackageMissing, SourceBroken
from unbroken.files import storage_errors
from unbroken.store.digest import BlockDigester

READ_BYTES: Final = 1 << 20
# Inflated in one go: four bytes of zstandard can stand for 128 KiB, and a hostile file is made of nothing else.
_COMPRESSED_BYTES: Final = 1 << 13
# A document is held in memory whole, several times over.
LONGEST_BYTES: Final = 1 << 30
_BATCH_BYTES: Final = 4 << 20
_BATCH_ROWS: Final = 1024
NOT_UTF8: Final = "not-utf-8"
NOT_JSON: Final = "not-json"
NO_TEXT: Final = "no-text"
# What zlib is told to expect a gzip header.
_GZIP: Final = 31
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Stretch:
    """A part of one file; the whole of it unless it is plain JSON lines. A line belongs where its first byte stands."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class Bad:
    """A document that cannot be read: where it stands and why."""

    name: str
    line: int
    problem: "Problem"

    @property
    def cause(self) -> str:
        """A word to count it under."""
        return self.problem.cause

    def __str__(self) -> str:
        return f"{self.name}:{self.line}: {self.problem.reason}"


class Problem(NamedTuple):
    """What is wrong with a document: a word to count it under, and words for people."""

    cause: str
    reason: str


@dataclass
class Batch:
    """Some documents in order: their texts, the same as UTF-8, and the line each stands on."""

    texts: list[str] = field(default_factory=list)
    encoded: list[bytes] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, text: str, line: int) -> Problem | None:
        """Take one document; or say why it is none."""
        try:
            encoded = text.encode()
        except UnicodeEncodeError:
            return Problem(NOT_UTF8, "the text holds one half of a surrogate pair, which is no character")
        self.texts.append(text)
        self.encoded.append(encoded)
        self.lines.append(line)
        self.size_bytes += len(encoded)
        return None


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Digesting:
    """A file whose bytes are digested as they are read."""

    def __init__(self, file: BinaryIO, digester: BlockDigester, advance: Callable[[int], None]) -> None:
        self._file = file
        self._digester = digester
        self._advance = advance

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self._digester.update(memoryview(data))
        self._advance(len(data))
        return data


@dataclass(frozen=True)
class Reader:
    """Reads the documents of stretches below one folder.

    Attributes:
        folder: where the names begin.
        text_field: the member of a JSON object, or the column, that holds the text.
        report: is told each document that cannot be read.
        advance: is told how many bytes were read.
    """

    folder: Path
    text_field: str
    report: Callable[[Bad], None]
    advance: Callable[[int], None] = lambda _: None

    def batches(self, stretch: Stretch, kind: Kind, digester: BlockDigester) -> Iterator[Batch]:
        """The documents of a stretch, in order; ``digester`` takes its raw bytes.

        Raises:
            SourceBroken: the file ends too early, or is not what its suffix says.
            PackageMissing: the format needs a package that is not installed.
            StorageFailed: the system refused to read.
        """
        path = self.folder / stretch.name
        if kind == "parquet":
            yield from self._rows(stretch.name, path, digester)
            return
        with storage_errors("open", path):
            file = path.open("rb")
        with file, storage_errors("read", path):
            if kind == "txt":
                yield from self._whole(stretch.name, path, _Digesting(file, digester, self.advance))
            elif kind == "jsonl":
                lines = _lines(self._own_lines(file, stretch, digester), path)
                yield from self._parsed(stretch.name, lines, file, stretch.first)
            else:
                raw = _Digesting(file, digester, self.advance)
                plain = _unzipped(raw, path) if kind == "jsonl.gz" else _unzstandard(raw, path)
                yield from self._parsed(stretch.name, _lines(plain, path), None, 0)

    # ---- one document a file ----

    def _whole(self, name: str, path: Path, file: _Readable) -> Iterator[Batch]:
        data = b"".join(_bounded(iter(lambda: file.read(READ_BYTES), b""), path))
        batch = Batch()
        try:
            text = data.removeprefix(_BYTE_ORDER_MARK).decode()
        except UnicodeDecodeError as wrong:
            self.report(Bad(name, data[: wrong.start].count(b"\n") + 1, _no_utf8(wrong)))
            return
        batch.add(text, 1)
        yield batch

    # ---- JSON lines ----

    def _own_lines(self, file: BinaryIO, stretch: Stretch, digester: BlockDigester) -> Iterator[bytes]:
        """The lines that begin in a stretch; its own bytes are digested, what completes its last line is not."""
        is_at_line_start = True
        if stretch.first:
            file.seek(stretch.first - 1)
            is_at_line_start = file.read(1) == b"\n"
        left = stretch.last - stretch.first

        def own() -> Iterator[bytes]:
            nonlocal left
            while left and (data := file.read(min(READ_BYTES, left))):
                left -= len(data)
                digester.update(memoryview(data))
                self.advance(len(data))
                yield data

        blocks = own()
        if not is_at_line_start:
            blocks = _after_first_newline(blocks)
        yield from _completed(blocks, file)

    def _parsed(self, name: str, blocks: Iterator[list[bytes]], file: BinaryIO | None, first: int) -> Iterator[Batch]:
        batch, line = Batch(), 0
        lines_before: int | None = None if first else 0
        for lines in blocks:
            for data in lines:
                line += 1
                problem = self._parse(data, batch, line, is_first=line == 1 and first == 0)
                if problem:
                    if lines_before is None and file is not None:
                        lines_before = _lines_before(file, first)
                    self.report(Bad(name, line + (lines_before or 0), problem))
            if batch.size_bytes >= _BATCH_BYTES:
                yield batch
                batch = Batch()
        yield batch

    def _parse(self, data: bytes, batch: Batch, line: int, *, is_first: bool) -> Problem | None:
        if is_first:
            data = data.removeprefix(_BYTE_ORDER_MARK)
        try:
            record = json.loads(data.decode())
        except UnicodeDecodeError as wrong:
            return _no_utf8(wrong)
        except json.JSONDecodeError as wrong:
            if not data.strip():
                return None
            return Problem(
                NOT_JSON, f"it is no JSON: {wrong.msg.lower().removesuffix(' at')} at character {wrong.pos + 1}"
            )
        except (RecursionError, ValueError):
            return Problem(NOT_JSON, "it nests too deeply, or holds a number too long to be read")
        if not isinstance(record, dict):
            return Problem(NO_TEXT, f"it is {_called(record)}, not an object")
        text = record.get(self.text_field)
        if isinstance(text, str):
            return batch.add(text, line)
        if self.text_field not in record:
            return Problem(NO_TEXT, f"it has no field '{self.text_field}'{_listed(record)}")
        return Problem(NO_TEXT, f"its field '{self.text_field}' is {_called(text)}, not a text")

    # ---- parquet ----

    def _rows(self, name: str, path: Path, digester: BlockDigester) -> Iterator[Batch]:
        try:
            import pyarrow  # type: ignore[import-untyped]
            from pyarrow import parquet
        except ImportError as missing:
            raise PackageMissing(package="pyarrow", purpose="reading .parquet") from missing
        with storage_errors("open", path), path.open("rb") as file:
            raw = _Digesting(file, digester, self.advance)
            while raw.read(READ_BYTES):
                pass
        row = 0
        try:
            with parquet.ParquetFile(path) as table:
                if self.text_field not in table.schema_arrow.names:
                    columns = tuple((column.name, str(column.type)) for column in table.schema_arrow)
                    raise ColumnMissing(path=path, column=self.text_field, columns=columns)
                for piece in table.iter_batches(batch_size=_BATCH_ROWS, columns=[self.text_field]):
                    yield self._column(name, piece.column(0), row)
                    row += len(piece)
        except (pyarrow.ArrowException, OSError) as wrong:
            raise SourceBroken(path=path, reason=" ".join(str(wrong).split())[:200]) from wrong

    def _column(self, name: str, values: Any, before: int) -> Batch:  # noqa: ANN401 -- pyarrow has no types
        batch = Batch()
        for number, value in enumerate(values, start=before + 1):
            try:
                text = value.as_py()
                text = text.decode() if isinstance(text, bytes) else text
            except UnicodeDecodeError as wrong:
                self.report(Bad(name, number, _no_utf8(wrong)))
                continue
            if not isinstance(text, str):
                reason = f"its column '{self.text_field}' is {_called(text)}, not a text"
                self.report(Bad(name, number, Problem(NO_TEXT, reason)))
            elif problem := batch.add(text, number):
                self.report(Bad(name, number, problem))
        return batch


def _listed(record: Mapping[str, object]) -> str:
    """The names of a record's fields, the first few, for a message."""
    names = [str(name)[:40] for name in list(record)[:6]]
    more = ", ..." if len(record) > len(names) else ""
    return f"; its fields: {', '.join(names)}{more}" if names else "; it has no field at all"


def _bounded(blocks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """The blocks of one document, which must not be longer than memory is likely to bear."""
    taken = 0
    for block in blocks:
        taken += len(block)
        if taken > LONGEST_BYTES:
            raise SourceBroken(path=path, reason=f"a document in it has more than {LONGEST_BYTES:,} bytes")
        yield block


def _lines(blocks: Iterator[bytes], path: Path) -> Iterator[list[bytes]]:
    """Whole lines, without their ends; the rest of a block waits for the next one."""
    pending: list[bytes] = []
    pending_bytes = 0
    for block in blocks:
        *lines, rest = block.split(b"\n")
        if lines:
            if pending:
                lines[0] = b"".join([*pending, lines[0]])
                pending, pending_bytes = [], 0
            yield lines
        if rest:
            pending.append(rest)
            pending_bytes += len(rest)
            if pending_bytes > LONGEST_BYTES:
                raise SourceBroken(path=path, reason=f"a line of it has more than {LONGEST_BYTES:,} bytes")
    if pending:
        yield [b"".join(pending)]


def _after_first_newline(blocks: Iterator[bytes]) -> Iterator[bytes]:
    for block in blocks:
        _, newline, rest = block.partition(b"\n")
        if newline:
            # What is left of the block may be empty and still must end in the newline that was cut off.
            yield rest
            yield from blocks
            return


def _completed(blocks: Iterator[bytes], file: BinaryIO) -> Iterator[bytes]:
    """The blocks, and what completes the last line; a stretch in which no line begins gives nothing."""
    last = b"\n"
    for block in blocks:
        last = block or last
        yield block
    while not last.endswith(b"\n") and (data := file.read(READ_BYTES)):
        head, newline, _ = data.partition(b"\n")
        last = head + newline
        yield last


def _lines_before(file: BinaryIO, first: int) -> int:
    """How many lines begin before an offset; asked only when something is wrong."""
    here = file.tell()
    file.seek(0)
    count, left, ends_line = 0, first, True
    while left and (data := file.read(min(READ_BYTES, left))):
        left -= len(data)
        count += data.count(b"\n")
        ends_line = data.endswith(b"\n")
    file.seek(here)
    return count if ends_line else count + 1


def _unzipped(raw: _Digesting, path: Path) -> Iterator[bytes]:
    try:
        yield from _inflated(raw, path, lambda: zlib.decompressobj(_GZIP))
    except zlib.error as wrong:
        raise SourceBroken(path=path, reason=f"it is no sound gzip: {wrong}") from wrong


def _unzstandard(raw: _Digesting, path: Path) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as missing:
        raise PackageMissing(package="zstandard", purpose="reading .jsonl.zst") from missing
    try:
        yield from _inflated(raw, path, lambda: zstandard.ZstdDecompressor().decompressobj())
    except zstandard.ZstdError as wrong:
        raise SourceBroken(path=path, reason=f"it is no sound zstandard: {wrong}") from wrong


class _Inflater(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _inflated(raw: _Digesting, path: Path, begin: Callable[[], _Inflater]) -> Iterator[bytes]:
    """The plain bytes of one or more compressed streams laid end to end; the last of them must be whole."""
    stream = begin()
    is_open = False
    while data := raw.read(_COMPRESSED_BYTES):
        while data:
            is_open = True
            yield stream.decompress(data)
            data = b""
            if stream.eof:
                # Tools that copy in blocks fill the last one with zeros.
                data, is_open = stream.unused_data.lstrip(b"\0"), False
                stream = begin()
    if is_open:
        raise SourceBroken(path=path, reason="it ends in the middle of its compressed bytes")


def _no_utf8(wrong: UnicodeDecodeError) -> Problem:
    return Problem(NOT_UTF8, f"it is no UTF-8: byte 0x{wrong.object[wrong.start]:02x} at byte {wrong.start + 1}")


def _called(value: object) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else "a text")
