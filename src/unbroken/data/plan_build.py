"""One group's plan from the index of its shards: entries cut into windows, windows sorted, sequences packed.

A pure function of lengths, prefixes and the recipe: the same arrays on every machine and in every version of NumPy. No
token is read, and memory is bounded by the group.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unbroken.data.groups import Counted, Group, OpenIndex
from unbroken.data.keyed import subkey
from unbroken.data.pack import best_fit, lay_out, one_each
from unbroken.data.permute import Permutation
from unbroken.data.plan_file import FORMAT, Counts, GroupPlan, narrowest
from unbroken.data.shards import open_index
from unbroken.data.windows import Windows, cut
from unbroken.store.digest import digest_bytes

_TIES: Final = subkey(0, "windows of one length")


@dataclass(frozen=True)
class Recipe:
    """What besides the shards decides a plan."""

    max_length: int
    overlap: int
    packing: bool

    @property
    def stride(self) -> int:
        """Tokens from window to window of an entry."""
        return self.max_length - self.overlap

    def digest_of(self, purpose: str, ingredients: Iterable[object]) -> str:
        """The name of what this recipe makes of its ingredients."""
        return digest_bytes(json.dumps([purpose, FORMAT, astuple(self), list(ingredients)]).encode()).hex()


def build_group(group: Group, shards: Sequence[Counted], recipe: Recipe, index_of: OpenIndex = open_index) -> GroupPlan:
    """Cut and pack the entries of one group.

    Raises:
        ShardDamaged: an index is not in order.
        StorageFailed: the system refused to read.
    """
    begins, lengths, prefixes, before = [], [], [], 0
    for span in group:
        index = index_of(shards[span.shard].idx_path)
        offsets = index.offsets(span.first, span.last)
        begins.append(offsets[:-1] + (before - span.start_token))
        lengths.append(np.diff(offsets))
        prefixes.append(index.prefixes(span.first, span.last))
        before += span.tokens
    windows = cut(np.concatenate(lengths), np.concatenate(prefixes), recipe.max_length, recipe.overlap)
    position = np.concatenate(begins)[windows.entry] + windows.start
    return _packed(windows, position, before, recipe)


def _packed(windows: Windows, position: NDArray[np.int64], tokens: int, recipe: Recipe) -> GroupPlan:
    histogram = np.bincount(windows.length, minlength=recipe.max_length + 1)
    strategies = best_fit(histogram, recipe.max_length) if recipe.packing else one_each(histogram)
    masked_tokens = int(windows.masked.sum())
    counts = Counts(
        sequences=sum(strategy.sequences for strategy in strategies),
        windows=windows.length.size,
        fresh_tokens=int(windows.length.sum()) - masked_tokens,
        masked_tokens=masked_tokens,
        dropped_entries=windows.dropped_entries,
    )
    order = longest_first(windows.length, recipe.max_length)
    return GroupPlan(
        counts,
        lay_out(strategies, histogram),
        position[order].astype(narrowest(tokens, from_bytes=4)),
        windows.masked[order].astype(narrowest(recipe.max_length, from_bytes=2)),
    )


def longest_first(lengths: NDArray[np.int64], max_length: int) -> NDArray[np.int64]:
    """The windows by length, the longest first, those of one length in a keyed order.

    The tie order keeps neighbours of a shard from standing side by side in every sequence. The sort is stable, so every
    machine and every version of NumPy finds the same one.
    """
    if not lengths.size:
        return np.empty(0, np.int64)
    shuffled = Permutation(lengths.size, _TIES)(np.arange(lengths.size))
    shortfall = (max_length - lengths[shuffled]).astype(narrowest(max_length, from_bytes=2))
    return shuffled[np.argsort(shortfall, kind="stable")]
