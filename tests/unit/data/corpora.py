"""Small data folders for tests: real shards, written and listed the way the library does it."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from unbroken.data.corpus.listing import TokenizerIdentity
from unbroken.data.corpus.seal_shards import seal_shards
from unbroken.data.corpus.shards import Entries, write_shard
from unbroken.data.ingest.encoders import ByteEncoder
from unbroken.files import LOCAL

EOD = ByteEncoder.identity.eod_id


def texts_of(lengths: Sequence[int], seed: int = 0) -> list[str]:
    """Texts of so many letters each, no two alike."""
    letters = random.Random(seed)
    return ["".join(letters.choices("abcdefgh ijklmnop", k=length)) for length in lengths]


def write_bucket(folder: Path, shards: Sequence[Sequence[str]]) -> None:
    """Shards of byte tokens in a folder, one for each list of texts."""
    for number, texts in enumerate(shards):
        ids = [[*text.encode(), EOD] for text in texts]
        entries = Entries(
            np.array([each for row in ids for each in row], np.uint16),
            np.array([len(row) for row in ids], np.int64),
            np.zeros(len(ids), np.uint16),
        )
        write_shard(LOCAL, folder, f"{number:05d}-000", [entries], token_bytes=2)


def write_corpus(
    root: Path,
    buckets: Mapping[str, Sequence[Sequence[str]]],
    *,
    split: str = "train",
    tokenizer: TokenizerIdentity | None = ByteEncoder.identity,
    is_listed: bool = True,
) -> Path:
    """A data folder with these buckets; gives the folder back."""
    for name, shards in buckets.items():
        write_bucket(root / split / name, shards)
        if is_listed:
            seal_shards(root / split / name, tokenizer)
    return root
