"""Makes our golden shards: a bucket as this version of the format leaves it, kept in git.

    python -m tests.format.golden_shards      writes tests/format/golden/shards-1/ours; only for a new format

What is here must still open with every later version. Everything is fixed.
"""

from pathlib import Path

import numpy as np

from unbroken.data.corpus.listing import BakedWindows, Listing, SourceRecord, TokenizerIdentity, write_listing
from unbroken.data.corpus.shards import Entries, write_shard
from unbroken.files import LOCAL

GOLDEN = Path(__file__).parent / "golden" / "shards-1"
TOKENIZER = TokenizerIdentity("bytes", "xxh3-128:" + "ab" * 16, 257, 256)
SOURCES = (
    SourceRecord("2020/Zürich ✓.jsonl.gz", 1_234, "xxh3-128:" + "cd" * 16, 3, 12, {"empty": 2, "no text": 1}),
    SourceRecord("a.txt", 5, "xxh3-128:" + "ef" * 16, 1, 4, {}),
)


def entries(lengths: list[int], prefixes: list[int], first: int) -> Entries:
    """Entries of counted bytes, each ended by 256."""
    tokens = np.arange(first, first + sum(lengths), dtype=np.uint16) % 256
    tokens[np.cumsum(lengths) - 1] = 256
    return Entries(tokens, np.array(lengths), np.array(prefixes, np.uint16))


def make(root: Path) -> None:
    """Two shards and their list, in the bucket web."""
    folder = root / "train" / "web"
    shards = (
        write_shard(LOCAL, folder, "00000-000", [entries([3, 1], [0, 0], 0), entries([8], [2], 7)], token_bytes=2),
        write_shard(LOCAL, folder, "2020/00001-000", [entries([4], [0], 250)], token_bytes=2),
    )
    write_listing(LOCAL, folder, Listing(shards, TOKENIZER, BakedWindows(8, 2), SOURCES))


if __name__ == "__main__":
    make(GOLDEN / "ours")
