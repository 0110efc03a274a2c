"""Small shards and corpora for tests, made by the real writer."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from unbroken.data.corpus.listing import Listing, TokenizerIdentity, write_listing
from unbroken.data.corpus.shards import Entries, ShardRecord, write_shard
from unbroken.files import LOCAL

BYTES = TokenizerIdentity("bytes", "b" * 32, 257, 256)
Documents = Sequence[Sequence[int]]


def entries_of(documents: Iterable[Sequence[int]], prefixes: Sequence[int] | None = None) -> Entries:
    """Documents end to end."""
    lists = [list(document) for document in documents]
    return Entries(
        np.array([token for each in lists for token in each], np.uint32),
        np.array([len(each) for each in lists], np.int64),
        np.array(prefixes if prefixes is not None else [0] * len(lists), np.uint16),
    )


def make_shard(folder: Path, stem: str, documents: Documents, token_bytes: int = 2) -> ShardRecord:
    """One shard on disk."""
    return write_shard(LOCAL, folder, stem, [entries_of(documents)], token_bytes=token_bytes)


def make_bucket(folder: Path, shards: Mapping[str, Documents], tokenizer: TokenizerIdentity | None = BYTES) -> None:
    """Shards in a folder, with their list."""
    records = tuple(make_shard(folder, stem, documents) for stem, documents in shards.items())
    write_listing(LOCAL, folder, Listing(records, tokenizer))
