"""Tokenize one unit: read its documents, encode them, write its shards as drafts, and record it.

The shards of a unit depend only on its documents, the tokenizer and the options. A unit with a document that cannot be
read publishes nothing. Memory is bounded by one shard per target folder.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from unbroken.data.corpus.shards import (
    SCRATCH_PREFIX,
    Entries,
    ShardRecord,
    Tokens,
    token_bytes_for,
    write_shard,
)
from unbroken.data.ingest.documents import BadDocument, DocumentBatch, Reader, Stretch
from unbroken.data.ingest.encoders import Encoded, Encoder
from unbroken.data.ingest.fast_engine import ENGINE, FastEngine
from unbroken.data.ingest.request import TokenizeOptions
from unbroken.data.ingest.sources import TextSource
from unbroken.data.ingest.units import Unit
from unbroken.data.ingest.work_folder import SourceShare, TokenizePlan, UnitRecord, WorkFolder
from unbroken.data.packing.windows import cut
from unbroken.errors import BadDocuments, ControlToken, SourcesChanged, StorageFailed
from unbroken.files import Files, storage_errors
from unbroken.store.digest import BlockDigester

DRAFT_PREFIX: Final = ".draft-"
TRAIN: Final = "train"
VAL: Final = "val"
REFERENCE: Final = "reference"
EMPTY: Final = "empty"
SHORT: Final = "short"
_MOST_PROBLEMS: Final = 20
_FIRSTS: Final = 2
_HASH_RANGE: Final = 1 << 64


@dataclass(frozen=True)
class UnitContext:
    """The settings common to all units of a tokenization."""

    files: Files
    input_dir: Path
    output_dir: Path
    options: TokenizeOptions
    encoder: Encoder
    command: str
    skip_bad: bool = False

    def targets(self, folder: str) -> tuple[str, ...]:
        """The output folders for the documents of an input folder: one, or one per split."""
        if self.options.val_fraction is None:
            return (folder,)
        return tuple(f"{split}/{folder}" if folder else split for split in (TRAIN, VAL))


def draft_name(attempt: str, name: str) -> str:
    """The name of a shard, or of a file of it, until it is published; readers ignore names with a dot."""
    return f"{DRAFT_PREFIX}{attempt}-{name}"


def discard_drafts(context: UnitContext, unit: Unit, attempt: str) -> None:
    """Remove the drafts of an attempt that does not count.

    Raises:
        StorageFailed: an I/O error.
    """
    for target in context.targets(unit.folder):
        directory = context.output_dir / target
        for node in context.files.list_present(directory):
            if node.name.removeprefix(SCRATCH_PREFIX).startswith(draft_name(attempt, f"{unit.stem}-")):
                # crash here: fewer drafts of an attempt without a record.
                context.files.remove_file(directory / node.name)


def tokenize_unit(
    context: UnitContext, unit: Unit, attempt: str, advance: Callable[[int], None] = lambda _: None
) -> UnitRecord:
    """Tokenize a unit and write its shards as drafts; the caller must save the returned record.

    Two attempts at the same unit do not disturb each other, since ``attempt`` is in the names of their drafts.

    Raises:
        BadDocuments: documents cannot be read, and ``skip_bad`` is off.
        SourceBroken: a file is truncated, or not in the format of its suffix.
        SourcesChanged: a file changed while it was read.
        ControlToken: text was encoded as a control token.
        EnginesDiffer: the fast engine gave other ids than the reference.
        PackageMissing: a format needs a package that is not installed.
        StorageFailed: an I/O error.
    """
    work = _Work(context, unit, attempt)
    try:
        for stretch in unit.stretches:
            work.take(stretch, advance)
        work.require_sound()
        shards = {target: side.close() for target, side in work.sides.items()}
    except Exception:
        # What stays behind is removed at the end of the tokenization.
        with contextlib.suppress(StorageFailed):
            discard_drafts(context, unit, attempt)
        raise
    engine = ENGINE if isinstance(context.encoder, FastEngine) else REFERENCE
    return UnitRecord(engine, shards, work.shares, attempt)


def do_unit(
    work: WorkFolder,
    plan: TokenizePlan,
    context: UnitContext,
    number: int,
    attempt: str,
    advance: Callable[[int], None],
) -> "UnitDone":
    """Tokenize a unit of a plan and record it.

    Raises:
        EnginesDiffer: the fast engine gave other ids than the reference.
        UnbrokenError: as ``tokenize_unit``.
    """
    record = tokenize_unit(context, plan.units[number], attempt, advance)
    counts = False
    try:
        counts = work.record(plan, number, record)
    finally:
        found = record if counts else work.unit(plan, number)
        if found is None or found.attempt != attempt:
            # Another process took this one for dead and was quicker, or has even finished the plan.
            discard_drafts(context, plan.units[number], attempt)
    return UnitDone(number, record.tokens, record.engine, counts)


@dataclass(frozen=True)
class UnitDone:
    """A unit that was tokenized; ``counts`` says whether it is this attempt that was recorded."""

    number: int
    tokens: int
    engine: str
    counts: bool


@dataclass
class _Side:
    """The shards of one unit in one target folder; entries are buffered until a shard is full."""

    context: UnitContext
    target: str
    stem: str
    attempt: str
    waiting: list[Entries] = field(default_factory=list)
    waiting_tokens: int = 0
    records: list[ShardRecord] = field(default_factory=list)

    def add(self, entries: Entries) -> Iterator[int]:
        """Add entries in order; yields the numbers of those that start a shard."""
        ends = np.cumsum(entries.lengths)
        first = 0
        while first < len(ends):
            if not self.waiting:
                yield from range(first, min(first + _FIRSTS, len(ends)))
            start = int(ends[first] - entries.lengths[first])
            room = self.context.options.shard_tokens - self.waiting_tokens
            last = int(np.searchsorted(ends, start + room, side="right"))
            if last == first and not self.waiting:
                # A document with more tokens than a shard is a shard of its own.
                last = first + 1
            if last > first:
                self._wait(entries, first, last, start, int(ends[last - 1]))
            if last < len(ends):
                self._write()
            first = last

    def _wait(self, entries: Entries, first: int, last: int, start: int, end: int) -> None:
        piece = Entries(entries.tokens[start:end], entries.lengths[first:last], entries.prefixes[first:last])
        self.waiting.append(piece)
        self.waiting_tokens += end - start

    def _write(self) -> None:
        name = f"{self.stem}-{len(self.records):03d}"
        directory = self.context.output_dir / self.target
        token_bytes = token_bytes_for(self.context.encoder.identity.vocab_size)
        draft = draft_name(self.attempt, name)
        # crash here: drafts without a record; another process or the next start does their unit again.
        written = write_shard(self.context.files, directory, draft, self.waiting, token_bytes=token_bytes)
        self.records.append(replace(written, name=name))
        self.waiting, self.waiting_tokens = [], 0

    def close(self) -> list[ShardRecord]:
        """Write the buffered entries; returns all shards."""
        if self.waiting:
            self._write()
        return self.records


class _Work:
    """A unit in progress."""

    def __init__(self, context: UnitContext, unit: Unit, attempt: str) -> None:
        self.context = context
        self.sides = {target: _Side(context, target, unit.stem, attempt) for target in context.targets(unit.folder)}
        self.shares: list[SourceShare] = []
        self._problems: list[BadDocument] = []
        self._is_more = False
        # The last element counts every id beyond the vocabulary: no encoder may give one.
        self._is_forbidden = np.zeros(context.encoder.identity.vocab_size + 1, bool)
        self._is_forbidden[[*context.encoder.control, -1]] = True

    def take(self, stretch: Stretch, advance: Callable[[int], None]) -> None:
        """Tokenize one byte range of a file."""
        share = SourceShare(stretch)
        reader = Reader(
            self.context.input_dir, self.context.options.text_field, lambda bad: self._report(share, bad), advance
        )
        digester = BlockDigester()
        before = self._look(stretch)
        for batch in reader.batches(stretch, TextSource(stretch.name, 0).kind, digester):
            if self._is_more:
                break
            if not self._problems:
                self._encode(batch, share)
        if self._look(stretch) != before:
            raise SourcesChanged(output=self.context.output_dir, changed=(stretch.name,), is_finished=False)
        share.blocks = tuple(block.hex() for block in digester.finish().blocks)
        self.shares.append(share)

    def require_sound(self) -> None:
        """Raise unless every document could be read."""
        if self._problems:
            problems = tuple(str(problem) for problem in self._problems)
            raise BadDocuments(problems=problems, is_more=self._is_more, command=self.context.command)

    def _look(self, stretch: Stretch) -> tuple[int, int]:
        path = self.context.input_dir / stretch.name
        with storage_errors("stat", path):
            found = path.stat()
        return found.st_size, found.st_mtime_ns

    def _report(self, share: SourceShare, bad: BadDocument) -> None:
        if self.context.skip_bad:
            share.skipped[bad.cause] = share.skipped.get(bad.cause, 0) + 1
        elif len(self._problems) < _MOST_PROBLEMS:
            self._problems.append(bad)
        else:
            self._is_more = True

    def _encode(self, batch: DocumentBatch, share: SourceShare) -> None:
        batch = self._long_enough(batch, share)
        if not batch.texts:
            return
        encoder = self.context.encoder
        encoded = encoder.encode(batch)
        self._require_no_control(batch, encoded, share.stretch)
        share.skipped |= _counted(share.skipped, EMPTY, int((encoded.lengths == 0).sum()))
        tokens, lengths = _ended(encoded, encoder.identity.eod_id)
        firsts: list[int] = []
        for target, documents in self._split(batch, encoded).items():
            entries, owners = self._entries(batch, tokens, lengths, documents)
            share.documents[target] = share.documents.get(target, 0) + len(documents)
            share.tokens[target] = share.tokens.get(target, 0) + int(lengths[documents].sum())
            firsts += [int(owners[number]) for number in self.sides[target].add(entries)]
        if isinstance(encoder, FastEngine):
            encoder.check(batch, encoded, firsts)

    def _long_enough(self, batch: DocumentBatch, share: SourceShare) -> DocumentBatch:
        least = max(1, self.context.options.min_text_length)
        if all(len(text) >= least for text in batch.texts):
            return batch
        kept = DocumentBatch()
        for text, line in zip(batch.texts, batch.lines, strict=True):
            if len(text) >= least:
                kept.add(text, line)
            else:
                share.skipped |= _counted(share.skipped, SHORT if text else EMPTY, 1)
        return kept

    def _require_no_control(self, batch: DocumentBatch, encoded: Encoded, stretch: Stretch) -> None:
        forbidden = self._is_forbidden[np.minimum(encoded.ids, len(self._is_forbidden) - 1)]
        if forbidden.any():
            place = int(np.argmax(forbidden))
            document = int(np.searchsorted(encoded.offsets, place, side="right")) - 1
            # Lines are counted from the start of the range.
            behind = f" from byte {stretch.first:,}" if stretch.first else ""
            raise ControlToken(
                place=f"{stretch.name}:{batch.lines[document]}{behind}",
                token=int(encoded.ids[place]),
                tokenizer=self.context.encoder.identity.name,
            )

    def _split(self, batch: DocumentBatch, encoded: Encoded) -> Mapping[str, NDArray[np.int64]]:
        """The documents for each target folder, by number; equal texts go to the same split."""
        is_kept = encoded.lengths > 0
        fraction = self.context.options.val_fraction
        if fraction is None:
            return {next(iter(self.sides)): np.flatnonzero(is_kept)}
        threshold = int(Fraction(fraction) * _HASH_RANGE)
        is_val = np.fromiter((xxhash.xxh3_64_intdigest(text) < threshold for text in batch.encoded), bool, len(is_kept))
        train, val = self.sides
        return {train: np.flatnonzero(is_kept & ~is_val), val: np.flatnonzero(is_kept & is_val)}

    def _entries(
        self, batch: DocumentBatch, tokens: Tokens, lengths: NDArray[np.int64], documents: NDArray[np.int64]
    ) -> tuple[Entries, NDArray[np.int64]]:
        """The entries of some documents, whole or cut into windows, and the document of each."""
        starts = np.cumsum(lengths) - lengths
        options = self.context.options
        if options.max_length is None:
            if len(documents) == len(lengths):
                return Entries(tokens, lengths, np.zeros(len(lengths), np.uint16)), documents
            picked = _gathered(tokens, starts[documents], lengths[documents])
            return Entries(picked, lengths[documents], np.zeros(len(documents), np.uint16)), documents
        nothing = np.zeros(len(documents), np.uint16)
        windows = cut(lengths[documents], nothing, options.max_length, self._overlaps(batch, documents))
        owners = documents[windows.entry]
        picked = _gathered(tokens, starts[owners] + windows.start, windows.length)
        return Entries(picked, windows.length, windows.masked.astype(np.uint16)), owners

    def _overlaps(self, batch: DocumentBatch, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """The overlap of each document's windows; ``overlap_probability`` is decided by a hash of the text."""
        options = self.context.options
        # At least one token is shared: the first of a window is not trained.
        overlaps = np.full(len(documents), options.overlap_size or 1, np.int64)
        if options.overlap_probability is not None:
            threshold, texts = int(Fraction(options.overlap_probability) * _HASH_RANGE), batch.encoded
            # Another hash than that of the split, so that the two are independent.
            drawn = (xxhash.xxh3_64_intdigest(texts[each], seed=1) for each in documents.tolist())
            overlaps[np.fromiter((hashed >= threshold for hashed in drawn), bool, len(documents))] = 1
        return overlaps


def _counted(counts: Mapping[str, int], reason: str, number: int) -> dict[str, int]:
    return {reason: counts.get(reason, 0) + number} if number else {}


def _ended(encoded: Encoded, eod_id: int) -> tuple[Tokens, NDArray[np.int64]]:
    """The ids with EOD after each document."""
    lengths = encoded.lengths + 1
    tokens: NDArray[Any] = np.empty(len(encoded.ids) + len(lengths), np.uint32)
    is_text = np.ones(len(tokens), bool)
    is_text[np.cumsum(lengths) - 1] = False
    tokens[is_text] = encoded.ids
    tokens[~is_text] = eod_id
    return tokens, lengths


def _gathered(tokens: Tokens, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tokens:
    """Slices of the tokens, concatenated."""
    before = np.cumsum(lengths) - lengths
    places = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    gathered: Tokens = tokens[places]
    return gathered
