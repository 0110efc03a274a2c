"""Cut the input into units of work, by names and sizes only.

A unit is what one worker tokenizes at a time and records as a whole. Because the cut depends only on the list of files,
any number of workers makes the same shards under the same names, and a restart knows what is left to do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from unbroken.data.ingest.documents import Stretch
from unbroken.data.ingest.sources import TextSource
from unbroken.store.digest import BLOCK_BYTES

# A multiple of a digest's block, so that the digests of byte ranges combine to that of their file.
UNIT_BYTES: Final = 4 * BLOCK_BYTES
# Text compresses to about a quarter; an estimate is enough, since only the joining of small files depends on it.
_COMPRESSION: Final = 4


@dataclass(frozen=True)
class Unit:
    """Byte ranges of the files of one folder, in order; ``number`` counts the units of that folder."""

    folder: str
    number: int
    stretches: tuple[Stretch, ...]

    @property
    def stem(self) -> str:
        """The prefix of the names of its shards."""
        return f"{self.number:05d}"

    @property
    def size_bytes(self) -> int:
        """The bytes it reads."""
        return sum(stretch.last - stretch.first for stretch in self.stretches)

    def __str__(self) -> str:
        names = list(dict.fromkeys(stretch.name for stretch in self.stretches))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        first = self.stretches[0].first
        return f"{names[0]}{more}" + (f" from byte {first:,}" if first else "")


def cut_units(sources: Sequence[TextSource], first_numbers: Mapping[str, int]) -> Iterator[Unit]:
    """Cut files, sorted by name, into units; ``first_numbers`` is the number of existing units per folder."""
    for folder, files in groupby(sorted(sources, key=lambda each: (each.folder, each.name)), lambda each: each.folder):
        for number, stretches in enumerate(_joined(files), start=first_numbers.get(folder, 0)):
            yield Unit(folder, number, tuple(stretches))


def _joined(files: Iterator[TextSource]) -> Iterator[list[Stretch]]:
    """Small files together up to ``UNIT_BYTES``; large plain ones in pieces."""
    waiting: list[Stretch] = []
    weight = 0
    for source in files:
        pieces = _stretches(source)
        own = source.size_bytes * (1 if source.kind in ("jsonl", "txt") else _COMPRESSION)
        if waiting and (len(pieces) > 1 or weight + own > UNIT_BYTES):
            yield waiting
            waiting, weight = [], 0
        if len(pieces) > 1:
            yield from ([piece] for piece in pieces)
            continue
        waiting += pieces
        weight += own
    if waiting:
        yield waiting


def _stretches(source: TextSource) -> list[Stretch]:
    if source.kind != "jsonl" or source.size_bytes <= UNIT_BYTES:
        return [Stretch(source.name, 0, source.size_bytes)]
    starts = range(0, source.size_bytes, UNIT_BYTES)
    return [Stretch(source.name, first, min(first + UNIT_BYTES, source.size_bytes)) for first in starts]
