"""The packing plan of a bucket: how its entries become sequences, built once and cached.

A plan holds lengths and offsets, no tokens, and does not depend on the seed. Each group has one file, named by a digest
of its inputs, so a cache can be shared by runs, ranks and hosts and deleted at any time. A damaged file is rebuilt.
Groups are memory-mapped on use, a bounded number at a time.
"""

import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unbroken.data.corpus.shards import open_index
from unbroken.data.order.keyed import mix64
from unbroken.data.packing.group_plan import (
    GroupPlan,
    GroupSummary,
    PlanDamaged,
    Recipe,
    build_group,
    decode_plan,
    decode_summary,
    encode_plan,
    encode_summary,
)
from unbroken.data.packing.groups import Counted, Group, OpenIndex, form_groups
from unbroken.data.packing.windows import require_cuttable
from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Files, storage_errors
from unbroken.quoting.log import logger

# ---- the cache ----

_SCRATCH_SUFFIX: Final = ".tmp"
_LARGEST_SUMMARY_BYTES: Final = 1 << 30

_log = logger(__name__)


@dataclass(frozen=True)
class PlanCache:
    """Finds plans in the cache, and builds those that are missing or damaged."""

    shards: Sequence[Counted]
    recipe: Recipe
    folder: Path
    files: Files
    index_of: OpenIndex
    token: str

    def digest_of(self, group: Group) -> str:
        """The name of a group's plan: a digest of its entries and of how they are cut and packed."""
        spans = [(self.shards[span.shard].index_digest, span.first, span.last) for span in group]
        return self.recipe.digest_of("group", spans)

    def summarised(self, group: Group) -> GroupSummary:
        """The summary of a group's plan, which is built if needed."""
        digest = self.digest_of(group)
        return GroupSummary(group, digest, self.plan_of(group, digest).counts)

    def plan_of(self, group: Group, digest: str) -> GroupPlan:
        """A group's plan, mapped from the cache; built if needed."""
        path = self.folder / f"{digest}.plan"
        cached = self._cached(path)
        if cached is not None:
            return cached
        plan = build_group(group, self.shards, self.recipe, self.index_of)
        self.put(path, encode_plan(plan))
        return plan

    def _cached(self, path: Path) -> GroupPlan | None:
        mapped = _mapped(path)
        try:
            return None if mapped is None else decode_plan(mapped)
        except PlanDamaged as damage:
            _log.warning("rebuilding the cached plan %s: %s", path, damage)
            return None

    def put(self, path: Path, data: bytes) -> None:
        """Write a cache file atomically; it is not synced, since readers verify every byte."""
        try:
            self._put(path, data)
        except StorageFailed as refusal:
            # Shared data is often read-only; the cache can be elsewhere.
            raise replace(refusal, is_cache=True) from refusal

    def _put(self, path: Path, data: bytes) -> None:
        scratch = f".{path.name}-{self.token}{_SCRATCH_SUFFIX}"
        self.files.make_directory(self.folder)
        try:
            self.files.replace(path, data, scratch=scratch, durable=False)
        except StorageFailed:
            # A concurrent builder of the same file may have removed our scratch file: then the file exists.
            if self.files.find(path) is None or self.files.read_bytes(path, limit_bytes=len(data)) != data:
                raise

    def clear_scratch(self, names: set[str]) -> None:
        """Remove scratch files that killed builders left; the final files exist by now."""
        for node in self.files.list_directory(self.folder):
            final = node.name.removeprefix(".").partition("-")[0]
            if node.name.startswith(".") and node.name.endswith(_SCRATCH_SUFFIX) and final in names:
                # crash here: fewer scratch files, which readers ignore.
                self.files.remove_file(self.folder / node.name)

    def summary(self, path: Path) -> list[GroupSummary] | None:
        """The cached summary of a bucket's groups."""
        if self.files.find(path) is None:
            return None
        try:
            return decode_summary(self.files.read_bytes(path, limit_bytes=_LARGEST_SUMMARY_BYTES))
        except PlanDamaged as damage:
            _log.warning("rebuilding the cached summary %s: %s", path, damage)
            return None


def _mapped(path: Path) -> memoryview | None:
    with storage_errors("map", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        # An empty file cannot be mapped.
        return np.memmap(path, np.uint8, mode="r").data if path.stat().st_size else memoryview(b"")
    return None


# ---- plans ----

FOLDER: Final = "plans"
# Two shuffle windows of groups: the current one and the next.
MAPPED_GROUPS: Final = 32


@dataclass(frozen=True)
class Slots:
    """The windows of some sequences, one sequence after the other.

    Attributes:
        counts: windows of each sequence.
        shard: the shard of each window, by its number in the plan.
        offset: its first token in that shard's ``.bin``.
        length: its tokens.
        masked: how many of the first ones are masked.
    """

    counts: NDArray[np.int64]
    shard: NDArray[np.int64]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    masked: NDArray[np.int64]


class _Places:
    """From positions in a group to shards and offsets there."""

    def __init__(self, spans: Group) -> None:
        self._begins = np.cumsum([0, *(span.tokens for span in spans[:-1])])
        self._shift = np.array([span.start_token for span in spans]) - self._begins
        self._shard = np.array([span.shard for span in spans])

    def locate(self, position: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The shard of each position, and its token offset there."""
        span = np.searchsorted(self._begins, position, side="right") - 1
        return self._shard[span], position + self._shift[span]


@dataclass(frozen=True)
class _Mapped:
    """A group that is in use."""

    plan: GroupPlan
    places: _Places


class BucketPlan:
    """The sequences of a bucket, by group; their windows are looked up, never held."""

    def __init__(self, cache: PlanCache, summaries: Sequence[GroupSummary], mapped_groups: int = MAPPED_GROUPS) -> None:
        self._cache = cache
        self._mapped_groups = mapped_groups
        self._summaries = summaries
        self._mapped: OrderedDict[int, _Mapped] = OrderedDict()
        counts = [summary.counts for summary in summaries]
        self.groups = len(summaries)
        self.sequences = np.array([count.sequences for count in counts], np.int64)
        self.total_sequences = int(self.sequences.sum())
        self.windows = sum(count.windows for count in counts)
        self.fresh_tokens = sum(count.fresh_tokens for count in counts)
        self.masked_tokens = sum(count.masked_tokens for count in counts)
        self.dropped_entries = sum(count.dropped_entries for count in counts)

    def __getstate__(self) -> dict[str, object]:
        # A worker process maps what it uses itself; a pickled map would arrive as a copy.
        return {**self.__dict__, "_mapped": OrderedDict()}

    @property
    def fill(self) -> Fraction:
        """The fill of the sequences, from 0 to 1; 1 if there are none."""
        room = self.total_sequences * self._cache.recipe.max_length
        return Fraction(self.fresh_tokens + self.masked_tokens, room) if room else Fraction(1)

    def digest_of(self, group: int) -> str:
        """The name of a group's plan."""
        return self._summaries[group].digest

    def spans_of(self, group: int) -> Group:
        """The spans of entries in a group."""
        return self._summaries[group].spans

    def histogram(self) -> NDArray[np.int64]:
        """The number of windows of each length from 0 to ``max_length``; reads every group."""
        total = np.zeros(self._cache.recipe.max_length + 1, np.int64)
        for group in range(self.groups):
            layout = self._group(group).plan.layout
            times = np.repeat(np.diff(layout.cumulative), np.diff(layout.first))
            np.add.at(total, layout.length, times)
        return total

    def windows_of(self, group: int, sequences: NDArray[np.int64]) -> Slots:
        """The windows of some sequences of a group, in their order in each sequence.

        Raises:
            ShardDamaged: the group's plan had to be built again, and an index is damaged.
            StorageFailed: the same, with an I/O error.
        """
        mapped = self._group(group)
        plan, layout = mapped.plan, mapped.plan.layout
        strategy = np.searchsorted(layout.cumulative, sequences, side="right") - 1
        first = layout.first[strategy]
        counts = layout.first[strategy + 1] - first
        ends = np.cumsum(counts)
        place = np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(ends - counts, counts)
        # Packing puts long windows first; a keyed rotation puts short ones anywhere.
        turn = (mix64(sequences.astype(np.uint64)) % counts.astype(np.uint64)).astype(np.int64)
        turned = place + np.repeat(turn, counts)
        turned -= np.repeat(counts, counts) * (turned >= np.repeat(counts, counts))
        slot = np.repeat(first, counts) + turned
        window = layout.base[slot] + np.repeat(sequences - layout.cumulative[strategy], counts)
        shard, offset = mapped.places.locate(plan.position[window].astype(np.int64))
        return Slots(counts, shard, offset, layout.length[slot], plan.masked[window].astype(np.int64))

    def _group(self, group: int) -> _Mapped:
        mapped = self._mapped.get(group)
        if mapped is None:
            summary = self._summaries[group]
            plan = self._cache.plan_of(summary.spans, summary.digest)
            mapped = self._mapped[group] = _Mapped(plan, _Places(summary.spans))
            if len(self._mapped) > self._mapped_groups:
                # The map and its pages are freed with its last array.
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(group)
        return mapped


def open_plan(
    shards: Sequence[Counted],
    *,
    max_length: int,
    overlap: int,
    packing: bool,
    cache: Path,
    files: Files = LOCAL,
    progress: Callable[[int], None] | None = None,
    threads: int = 1,
    index_of: OpenIndex = open_index,
    token: str | None = None,
    mapped_groups: int = MAPPED_GROUPS,
) -> BucketPlan:
    """The plan of a bucket's shards, from the cache or built into it, one group after the other.

    Args:
        shards: the shards of the bucket, in order.
        max_length: tokens of a sequence.
        overlap: tokens a window repeats of the previous one.
        packing: pack many windows into a sequence; if False, one.
        cache: a directory that may be shared, and deleted at any time.
        files: where the cache lies.
        progress: called after each group with its entries; not called if everything is cached.
        threads: groups built at the same time; memory grows with them.
        index_of: opens an index.
        token: unique to this builder, random by default; used only in the names of scratch files.
        mapped_groups: the number of groups that stay mapped.

    Raises:
        ShardDamaged: an index is damaged.
        StorageFailed: an I/O error while reading an index or writing the cache.
        ValueError: windows of fewer than 2 tokens, or an overlap of more than half a window.
    """
    require_cuttable(max_length, overlap)
    recipe = Recipe(max_length, overlap, packing)
    plans = PlanCache(shards, recipe, cache / FOLDER, files, index_of, token or secrets.token_hex(8))
    name = recipe.digest_of("bucket", [(shard.index_digest, shard.entries, shard.tokens) for shard in shards])
    path = plans.folder / f"{name}.json"
    summaries = plans.summary(path)
    if summaries is None:
        summaries = list(_summarised(plans, threads, progress))
        # crash here: plans of some groups and no summary; the next opening finds those plans and builds the others.
        plans.put(path, encode_summary(summaries))
        plans.clear_scratch({path.name, *(f"{summary.digest}.plan" for summary in summaries)})
    return BucketPlan(plans, summaries, mapped_groups)


def _summarised(plans: PlanCache, threads: int, progress: Callable[[int], None] | None) -> Iterator[GroupSummary]:
    groups = form_groups(plans.shards, stride=plans.recipe.stride, index_of=plans.index_of)
    with ThreadPoolExecutor(threads) as pool:
        for summary in pool.map(plans.summarised, groups):
            yield summary
            if progress:
                progress(sum(span.entries for span in summary.spans))
