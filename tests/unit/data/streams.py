"""Corpora of known documents and streams over them, for tests of what reads them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.data.making import make_bucket
from unbroken.data.corpus.catalogue import open_corpus
from unbroken.data.stream import Stream

EOD = 256
Lengths = Mapping[str, Mapping[str, Sequence[int]]]


def documents(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Documents of given lengths, each ended by EOD, of tokens that hardly repeat."""
    drawn = np.random.default_rng(seed)
    return [[*drawn.integers(0, EOD, length - 1).tolist(), EOD] for length in lengths]


def make_corpus(root: Path, buckets: Lengths, split: str = "train") -> None:
    """Buckets of shards of documents with these lengths."""
    for bucket, shards in buckets.items():
        made = {stem: documents(lengths, _seed(bucket, stem)) for stem, lengths in shards.items()}
        make_bucket(root / split / bucket, made)


def _seed(bucket: str, stem: str) -> int:
    return sum(f"{bucket}/{stem}".encode())


def lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths from 1 to the longest."""
    found: list[int] = np.random.default_rng(seed).integers(1, longest + 1, count).tolist()
    return found


TWO_BUCKETS: Lengths = {
    "code": {"0": lengths(40, 90, 1), "1": lengths(25, 90, 2)},
    "web": {"a/0": lengths(60, 70, 3)},
}


def make_stream(root: Path, buckets: Lengths = TWO_BUCKETS, **more: Any) -> Stream:  # noqa: ANN401 - as Stream takes it
    """A stream over a fresh corpus, of sequences of 32 tokens unless said otherwise."""
    make_corpus(root, buckets)
    return open_stream(root, **more)


def open_stream(root: Path, **more: Any) -> Stream:  # noqa: ANN401 - as Stream takes it
    """A stream over the corpus as it stands."""
    return Stream(open_corpus(root), **{"max_length": 32, "overlap_size": 4, "seed": 5, **more})


def held(root: Path, split: str = "train") -> dict[tuple[str, str, int], list[int]]:
    """Every document of a corpus, by bucket, shard and number, read plainly."""
    found = {}
    for shard in open_corpus(root, split).shards:
        tokens = np.fromfile(shard.bin_path, np.uint16 if shard.token_bytes == 2 else np.uint32)
        offsets = shard.index.offsets(0, shard.entries)
        for number in range(shard.entries):
            document = tokens[offsets[number] : offsets[number + 1]].tolist()
            found[shard.bucket, shard.name, number] = document
    return found
