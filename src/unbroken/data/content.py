"""Reading the tokens of a shard whole: the digest of its ``.bin`` and the highest id in it, in one pass."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unbroken.data.shards import Index, ShardRecord
from unbroken.files import LOCAL, Files
from unbroken.store.digest import BLOCK_BYTES, BlockDigester


@dataclass(frozen=True)
class Content:
    """What a pass over a ``.bin`` found; ``highest`` is -1 where there is no token."""

    digest: str
    highest: int

    def complaints(self, record: ShardRecord | None, vocab_size: int | None) -> Iterator[str]:
        """What is wrong with it, measured against its list and a vocabulary."""
        if record is not None and record.bin_digest != self.digest:
            yield f"its bytes have the digest {self.digest} and {record.bin_digest} is listed"
        if vocab_size is not None and self.highest >= vocab_size:
            yield f"it holds the token {self.highest:,}; the vocabulary has {vocab_size:,}"


def read_content(bin_path: Path, index: Index, files: Files = LOCAL) -> Content:
    """Read every token of a shard once, block by block.

    Raises:
        StorageFailed: the system refused to read.
    """
    digester = BlockDigester()
    highest = -1
    buffer = memoryview(bytearray(min(BLOCK_BYTES, max(index.bin_bytes, index.token_bytes))))
    with files.reading(bin_path) as source:
        offset = 0
        while taken := source.fill(offset, buffer):
            digester.update(buffer[:taken])
            tokens = np.frombuffer(buffer[: taken - taken % index.token_bytes], index.dtype)
            highest = max(highest, int(tokens.max(initial=0)))
            offset += taken
    return Content(digester.finish().whole, highest)
