"""One unit of work: read its documents, encode them, write its shards, say what was taken from where.

Promises that the shards of a unit depend on its documents, the tokenizer and the options alone, and that a unit with a
document that cannot be read publishes nothing. Memory is bounded by one shard for each target folder.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from unbroken.data.corpus.shards import (
    BIN_SUFFIX,
    IDX_SUFFIX,
    Entries,
    ShardRecord,
    Tokens,
    token_bytes_for,
    write_shard,
)
from unbroken.data.ingest.accelerate import ENGINE, Accelerator
from unbroken.data.ingest.documents import Bad, Batch, Reader, Stretch
from unbroken.data.ingest.encoders import Encoded, Encoder
from unbroken.data.ingest.sources import Source
from unbroken.data.ingest.units import Unit
from unbroken.data.ingest.workbench import Options, SourceShare, UnitRecord
from unbroken.data.packing.windows import cut
from unbroken.errors import BadDocuments, ControlToken, SourcesChanged
from unbroken.files import Files, storage_errors
from unbroken.store.digest import BlockDigester

TRAIN: Final = "train"
VAL: Final = "val"
REFERENCE: Final = "reference"
EMPTY: Final = "empty"
SHORT: Final = "short"
_MOST_PROBLEMS: Final = 20
_FIRSTS: Final = 2
_HASH_RANGE: Final = 1 << 64


@dataclass(frozen=True)
class Terms:
    """What all units of a tokenization have in common."""

    files: Files
    input_dir: Path
    output_dir: Path
    options: Options
    encoder: Encoder
    command: str
    skip_bad: bool = False

    def targets(self, folder: str) -> tuple[str, ...]:
        """The folders below the output that documents of an input folder go to: one, or one for each split."""
        if self.options.val_fraction is None:
            return (folder,)
        return tuple(f"{split}/{folder}" if folder else split for split in (TRAIN, VAL))


def clear_unit(terms: Terms, unit: Unit) -> None:
    """Remove what an earlier attempt left of a unit: shards that no record speaks of.

    Raises:
        StorageFailed: the system refused.
    """
    for target in terms.targets(unit.folder):
        directory = terms.output_dir / target
        if terms.files.find(directory) is None:
            continue
        for node in terms.files.list_directory(directory):
            own = node.name.removeprefix(".writing-")
            if own.startswith(f"{unit.stem}-") and own.endswith((BIN_SUFFIX, IDX_SUFFIX)):
                # crash here: fewer files of a unit that no record speaks of.
                terms.files.remove_file(directory / node.name)


def do_unit(terms: Terms, unit: Unit, advance: Callable[[int], None] = lambda _: None) -> UnitRecord:
    """Tokenize a unit and publish its shards; what is returned is still to be recorded.

    Raises:
        BadDocuments: documents cannot be read and are not to be skipped.
        SourceBroken: a file ends too early or is not what its suffix says.
        SourcesChanged: a file changed while it was read.
        ControlToken: text became a control token.
        EnginesDiffer: the faster engine gave other ids than the reference.
        PackageMissing: a format needs a package that is not installed.
        StorageFailed: the system refused.
    """
    clear_unit(terms, unit)
    work = _Work(terms, unit)
    for stretch in unit.stretches:
        work.take(stretch, advance)
    work.require_sound()
    engine = ENGINE if isinstance(terms.encoder, Accelerator) else REFERENCE
    return UnitRecord(engine, {target: side.close() for target, side in work.sides.items()}, work.shares)


@dataclass
class _Side:
    """The shards of one unit in one target folder; entries wait until a shard is full."""

    terms: Terms
    target: str
    stem: str
    waiting: list[Entries] = field(default_factory=list)
    waiting_tokens: int = 0
    records: list[ShardRecord] = field(default_factory=list)

    def add(self, entries: Entries) -> Iterator[int]:
        """Take entries in order; yields the numbers of those that begin a shard."""
        ends = np.cumsum(entries.lengths)
        first = 0
        while first < len(ends):
            if not self.waiting:
                yield from range(first, min(first + _FIRSTS, len(ends)))
            start = int(ends[first] - entries.lengths[first])
            room = self.terms.options.shard_tokens - self.waiting_tokens
            last = int(np.searchsorted(ends, start + room, side="right"))
            if last == first and not self.waiting:
                # A document of more tokens than a shard should have is a shard of its own.
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
        directory = self.terms.output_dir / self.target
        token_bytes = token_bytes_for(self.terms.encoder.identity.vocab_size)
        # crash here: shards that no record speaks of; the next start does their unit again.
        self.records.append(write_shard(self.terms.files, directory, name, self.waiting, token_bytes=token_bytes))
        self.waiting, self.waiting_tokens = [], 0

    def close(self) -> list[ShardRecord]:
        """Write what waits; every shard of this side."""
        if self.waiting:
            self._write()
        return self.records


class _Work:
    """A unit while it is being done."""

    def __init__(self, terms: Terms, unit: Unit) -> None:
        self.terms = terms
        self.sides = {target: _Side(terms, target, unit.stem) for target in terms.targets(unit.folder)}
        self.shares: list[SourceShare] = []
        self._problems: list[Bad] = []
        self._is_more = False
        # One place behind the vocabulary stands for every id beyond it: no encoder may give one.
        self._is_forbidden = np.zeros(terms.encoder.identity.vocab_size + 1, bool)
        self._is_forbidden[[*terms.encoder.control, -1]] = True

    def take(self, stretch: Stretch, advance: Callable[[int], None]) -> None:
        """Tokenize one stretch of a file."""
        share = SourceShare(stretch)
        reader = Reader(
            self.terms.input_dir, self.terms.options.text_field, lambda bad: self._report(share, bad), advance
        )
        digester = BlockDigester()
        before = self._look(stretch)
        for batch in reader.batches(stretch, Source(stretch.name, 0).kind, digester):
            if self._is_more:
                break
            if not self._problems:
                self._encode(batch, share)
        if self._look(stretch) != before:
            raise SourcesChanged(output=self.terms.output_dir, changed=(stretch.name,), is_finished=False)
        share.blocks = tuple(block.hex() for block in digester.finish().blocks)
        self.shares.append(share)

    def require_sound(self) -> None:
        """Pass if every document could be read."""
        if self._problems:
            problems = tuple(str(problem) for problem in self._problems)
            raise BadDocuments(problems=problems, is_more=self._is_more, command=self.terms.command)

    def _look(self, stretch: Stretch) -> tuple[int, int]:
        path = self.terms.input_dir / stretch.name
        with storage_errors("look at", path):
            found = path.stat()
        return found.st_size, found.st_mtime_ns

    def _report(self, share: SourceShare, bad: Bad) -> None:
        if self.terms.skip_bad:
            share.skipped[bad.cause] = share.skipped.get(bad.cause, 0) + 1
        elif len(self._problems) < _MOST_PROBLEMS:
            self._problems.append(bad)
        else:
            self._is_more = True

    def _encode(self, batch: Batch, share: SourceShare) -> None:
        batch = self._long_enough(batch, share)
        if not batch.texts:
            return
        encoder = self.terms.encoder
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
        if isinstance(encoder, Accelerator):
            encoder.check(batch, encoded, firsts)

    def _long_enough(self, batch: Batch, share: SourceShare) -> Batch:
        least = max(1, self.terms.options.min_text_length)
        if all(len(text) >= least for text in batch.texts):
            return batch
        kept = Batch()
        for text, line in zip(batch.texts, batch.lines, strict=True):
            if len(text) >= least:
                kept.add(text, line)
            else:
                share.skipped |= _counted(share.skipped, SHORT if text else EMPTY, 1)
        return kept

    def _require_no_control(self, batch: Batch, encoded: Encoded, stretch: Stretch) -> None:
        forbidden = self._is_forbidden[np.minimum(encoded.ids, len(self._is_forbidden) - 1)]
        if forbidden.any():
            place = int(np.argmax(forbidden))
            document = int(np.searchsorted(encoded.offsets, place, side="right")) - 1
            # Lines are counted from where the stretch begins.
            behind = f" from byte {stretch.first:,}" if stretch.first else ""
            raise ControlToken(
                place=f"{stretch.name}:{batch.lines[document]}{behind}",
                token=int(encoded.ids[place]),
                tokenizer=self.terms.encoder.identity.name,
            )

    def _split(self, batch: Batch, encoded: Encoded) -> Mapping[str, NDArray[np.int64]]:
        """The documents for each target folder, by number; the same text goes to the same side wherever it stands."""
        is_kept = encoded.lengths > 0
        fraction = self.terms.options.val_fraction
        if fraction is None:
            return {next(iter(self.sides)): np.flatnonzero(is_kept)}
        threshold = int(Fraction(fraction) * _HASH_RANGE)
        is_val = np.fromiter((xxhash.xxh3_64_intdigest(text) < threshold for text in batch.encoded), bool, len(is_kept))
        train, val = self.sides
        return {train: np.flatnonzero(is_kept & ~is_val), val: np.flatnonzero(is_kept & is_val)}

    def _entries(
        self, batch: Batch, tokens: Tokens, lengths: NDArray[np.int64], documents: NDArray[np.int64]
    ) -> tuple[Entries, NDArray[np.int64]]:
        """The entries of some documents, whole or cut into windows, and the document each belongs to."""
        starts = np.cumsum(lengths) - lengths
        options = self.terms.options
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

    def _overlaps(self, batch: Batch, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """The overlap of each document's windows; whether it gets one by chance is decided by its text."""
        options = self.terms.options
        # One token at least is shared: the first of a window is not trained.
        overlaps = np.full(len(documents), options.overlap_size or 1, np.int64)
        if options.overlap_probability is not None:
            threshold, texts = int(Fraction(options.overlap_probability) * _HASH_RANGE), batch.encoded
            # Another hash than that of the split: a document's side must not tell its overlap.
            drawn = (xxhash.xxh3_64_intdigest(texts[each], seed=1) for each in documents.tolist())
            overlaps[np.fromiter((hashed >= threshold for hashed in drawn), bool, len(documents))] = 1
        return overlaps


def _counted(counts: Mapping[str, int], reason: str, number: int) -> dict[str, int]:
    return {reason: counts.get(reason, 0) + number} if number else {}


def _ended(encoded: Encoded, eod_id: int) -> tuple[Tokens, NDArray[np.int64]]:
    """The ids with EOD behind each document."""
    lengths = encoded.lengths + 1
    tokens: NDArray[Any] = np.empty(len(encoded.ids) + len(lengths), np.uint32)
    is_text = np.ones(len(tokens), bool)
    is_text[np.cumsum(lengths) - 1] = False
    tokens[is_text] = encoded.ids
    tokens[~is_text] = eod_id
    return tokens, lengths


def _gathered(tokens: Tokens, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tokens:
    """Pieces of the tokens laid end to end."""
    before = np.cumsum(lengths) - lengths
    places = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    gathered: Tokens = tokens[places]
    return gathered
