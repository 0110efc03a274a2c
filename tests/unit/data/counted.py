"""Shards that are only lengths, for tests of what never looks at tokens."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unbroken.data.packing.groups import OpenIndex
from unbroken.store.digest import digest_bytes


@dataclass(frozen=True)
class CountedShard:
    """A shard with these entries; its name stands for a path."""

    name: str
    lengths: NDArray[np.int64]
    prefixes: NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16))

    @property
    def entries(self) -> int:
        return self.lengths.size

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def index_digest(self) -> str:
        return digest_bytes(self.lengths.tobytes() + self._prefixes.tobytes()).hex()

    @property
    def idx_path(self) -> Path:
        return Path(self.name)

    @property
    def _prefixes(self) -> NDArray[np.uint16]:
        return self.prefixes if self.prefixes.size else np.zeros(self.entries, np.uint16)

    def offsets(self, first: int, last: int) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.lengths)])[first : last + 1]

    def prefixes_of(self, first: int, last: int) -> NDArray[np.uint16]:
        return self._prefixes[first:last]


@dataclass(frozen=True)
class CountedIndex:
    """The index of such a shard."""

    shard: CountedShard

    def offsets(self, first: int, last: int) -> NDArray[np.int64]:
        return self.shard.offsets(first, last)

    def prefixes(self, first: int, last: int) -> NDArray[np.uint16]:
        return self.shard.prefixes_of(first, last)


def index_of(shards: list[CountedShard]) -> OpenIndex:
    """What opens the indexes of these shards by their names."""
    by_path = {shard.idx_path: CountedIndex(shard) for shard in shards}
    return by_path.__getitem__


def web_like(documents: int, seed: int, *, median: int = 500) -> NDArray[np.int64]:
    """Lengths as crawled text has them: lognormal, from 16 tokens to 200,000, EOD included."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 1.1, documents)
    return np.clip(drawn, 16, 200_000).astype(np.int64) + 1
