"""Read the documents of a file: JSON lines, plain text, Parquet, plain or compressed.

No byte is skipped silently: a document that cannot be read is reported with its line, a truncated file is an error.
Reads in batches of bounded size and computes a digest of the raw bytes on the way, which records what a shard was made
from.
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
# Decompressed at a time: four bytes of zstandard can expand to 128 KiB, and a hostile file may hold nothing else.
_COMPRESSED_BYTES: Final = 1 << 13
# A whole document is held in memory, several times over.
LONGEST_BYTES: Final = 1 << 30
_BATCH_BYTES: Final = 4 << 20
_BATCH_ROWS: Final = 1024
NOT_UTF8: Final = "not-utf-8"
NOT_JSON: Final = "not-json"
NO_TEXT: Final = "no-text"
# wbits that make zlib expect a gzip header.
_GZIP: Final = 31
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Stretch:
    """A byte range of one file; the whole file unless it is plain JSON lines. A line belongs where it starts."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class BadDocument:
    """A document that cannot be read: its place and the problem."""

    name: str
    line: int
    problem: "DocumentProblem"

    @property
    def cause(self) -> str:
        """A short name for counting."""
        return self.problem.cause

    def __str__(self) -> str:
        return f"{self.name}:{self.line}: {self.problem.reason}"


class DocumentProblem(NamedTuple):
    """What is wrong with a document: a short name for counting, and a message."""

    cause: str
    reason: str


@dataclass
class DocumentBatch:
    """Some documents in order: their texts, the same as UTF-8, and their line numbers."""

    texts: list[str] = field(default_factory=list)
    encoded: list[bytes] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, text: str, line: int) -> DocumentProblem | None:
        """Add one document; returns the problem if it cannot be used."""
        try:
            encoded = text.encode()
        except UnicodeEncodeError:
            return DocumentProblem(NOT_UTF8, "the text contains half of a surrogate pair")
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
        report: called with each document that cannot be read.
        advance: called with the number of bytes read.
    """

    folder: Path
    text_field: str
    report: Callable[[BadDocument], None]
    advance: Callable[[int], None] = lambda _: None

    def batches(self, stretch: Stretch, kind: Kind, digester: BlockDigester) -> Iterator[DocumentBatch]:
        """The documents of a byte range, in order; its raw bytes go through ``digester``.

        Raises:
            SourceBroken: the file is truncated, or not in the format of its suffix.
            PackageMissing: the format needs a package that is not installed.
            StorageFailed: an I/O error.
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

    # ---- one document per file ----

    def _whole(self, name: str, path: Path, file: _Readable) -> Iterator[DocumentBatch]:
        data = b"".join(_bounded(iter(lambda: file.read(READ_BYTES), b""), path))
        batch = DocumentBatch()
        try:
            text = data.removeprefix(_BYTE_ORDER_MARK).decode()
        except UnicodeDecodeError as wrong:
            self.report(BadDocument(name, data[: wrong.start].count(b"\n") + 1, _no_utf8(wrong)))
            return
        batch.add(text, 1)
        yield batch

    # ---- JSON lines ----

    def _own_lines(self, file: BinaryIO, stretch: Stretch, digester: BlockDigester) -> Iterator[bytes]:
        """The lines that start in a byte range; the digest covers the range, not the rest of its last line."""
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

    def _parsed(
        self, name: str, blocks: Iterator[list[bytes]], file: BinaryIO | None, first: int
    ) -> Iterator[DocumentBatch]:
        batch, line = DocumentBatch(), 0
        lines_before: int | None = None if first else 0
        for lines in blocks:
            for data in lines:
                line += 1
                problem = self._parse(data, batch, line, is_first=line == 1 and first == 0)
                if problem:
                    if lines_before is None and file is not None:
                        lines_before = _lines_before(file, first)
                    self.report(BadDocument(name, line + (lines_before or 0), problem))
            if batch.size_bytes >= _BATCH_BYTES:
                yield batch
                batch = DocumentBatch()
        yield batch

    def _parse(self, data: bytes, batch: DocumentBatch, line: int, *, is_first: bool) -> DocumentProblem | None:
        if is_first:
            data = data.removeprefix(_BYTE_ORDER_MARK)
        try:
            record = json.loads(data.decode())
        except UnicodeDecodeError as wrong:
            return _no_utf8(wrong)
        except json.JSONDecodeError as wrong:
            if not data.strip():
                return None
            return DocumentProblem(
                NOT_JSON, f"not JSON: {wrong.msg.lower().removesuffix(' at')} at character {wrong.pos + 1}"
            )
        except (RecursionError, ValueError):
            return DocumentProblem(NOT_JSON, "nested too deeply, or a number is too long")
        if not isinstance(record, dict):
            return DocumentProblem(NO_TEXT, f"it is {_called(record)}, not an object")
        text = record.get(self.text_field)
        if isinstance(text, str):
            return batch.add(text, line)
        if self.text_field not in record:
            return DocumentProblem(NO_TEXT, f"it has no field '{self.text_field}'{_listed(record)}")
        return DocumentProblem(NO_TEXT, f"its field '{self.text_field}' is {_called(text)}, not a string")

    # ---- parquet ----

    def _rows(self, name: str, path: Path, digester: BlockDigester) -> Iterator[DocumentBatch]:
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

    def _column(self, name: str, values: Any, before: int) -> DocumentBatch:  # noqa: ANN401 -- pyarrow has no types
        batch = DocumentBatch()
        for number, value in enumerate(values, start=before + 1):
            try:
                text = value.as_py()
                text = text.decode() if isinstance(text, bytes) else text
            except UnicodeDecodeError as wrong:
                self.report(BadDocument(name, number, _no_utf8(wrong)))
                continue
            if not isinstance(text, str):
                reason = f"its column '{self.text_field}' is {_called(text)}, not a string"
                self.report(BadDocument(name, number, DocumentProblem(NO_TEXT, reason)))
            elif problem := batch.add(text, number):
                self.report(BadDocument(name, number, problem))
        return batch


def _listed(record: Mapping[str, object]) -> str:
    """The first few field names of a record, for a message."""
    names = [str(name)[:40] for name in list(record)[:6]]
    more = ", ..." if len(record) > len(names) else ""
    return f"; its fields: {', '.join(names)}{more}" if names else "; it has no field at all"


def _bounded(blocks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """The blocks of one document, up to ``LONGEST_BYTES``."""
    taken = 0
    for block in blocks:
        taken += len(block)
        if taken > LONGEST_BYTES:
            raise SourceBroken(path=path, reason=f"a document in it has more than {LONGEST_BYTES:,} bytes")
        yield block


def _lines(blocks: Iterator[bytes], path: Path) -> Iterator[list[bytes]]:
    """Whole lines without line ends; the rest of a block is kept for the next one."""
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
            # The rest of the block may be empty, and must still end with the newline that was cut off.
            yield rest
            yield from blocks
            return


def _completed(blocks: Iterator[bytes], file: BinaryIO) -> Iterator[bytes]:
    """The blocks, and the rest of the last line; nothing if no line starts in the range."""
    last = b"\n"
    for block in blocks:
        last = block or last
        yield block
    while not last.endswith(b"\n") and (data := file.read(READ_BYTES)):
        head, newline, _ = data.partition(b"\n")
        last = head + newline
        yield last


def _lines_before(file: BinaryIO, first: int) -> int:
    """How many lines start before an offset; only needed for messages."""
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
        raise SourceBroken(path=path, reason=f"damaged gzip: {wrong}") from wrong


def _unzstandard(raw: _Digesting, path: Path) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as missing:
        raise PackageMissing(package="zstandard", purpose="reading .jsonl.zst") from missing
    try:
        yield from _inflated(raw, path, lambda: zstandard.ZstdDecompressor().decompressobj())
    except zstandard.ZstdError as wrong:
        raise SourceBroken(path=path, reason=f"damaged zstandard: {wrong}") from wrong


class _Inflater(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _inflated(raw: _Digesting, path: Path, begin: Callable[[], _Inflater]) -> Iterator[bytes]:
    """The decompressed bytes of one or more concatenated streams; the last must be complete."""
    stream = begin()
    is_open = False
    while data := raw.read(_COMPRESSED_BYTES):
        while data:
            is_open = True
            yield stream.decompress(data)
            data = b""
            if stream.eof:
                # Tools that copy in blocks pad the last one with zeros.
                data, is_open = stream.unused_data.lstrip(b"\0"), False
                stream = begin()
    if is_open:
        raise SourceBroken(path=path, reason="the compressed data is truncated")


def _no_utf8(wrong: UnicodeDecodeError) -> DocumentProblem:
    return DocumentProblem(NOT_UTF8, f"not UTF-8: byte 0x{wrong.object[wrong.start]:02x} at byte {wrong.start + 1}")


def _called(value: object) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else "a text")
