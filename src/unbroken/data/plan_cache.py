"""The cache of plans: content-addressed files that anybody may share, and delete at any time.

A file is put in place whole; nothing is synced, because every reader checks every byte and what does not prove itself
is built again. Builders of the same plan need not know of each other: they write the same bytes. A killed one leaves a
scratch file, which the next builder of the same bucket removes.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from unbroken.data.groups import Counted, Group, OpenIndex
from unbroken.data.plan_build import Recipe, build_group
from unbroken.data.plan_file import GroupPlan, GroupSummary, PlanDamaged, decode_plan, decode_summary, encode_plan
from unbroken.errors import StorageFailed
from unbroken.files import Files, told
from unbroken.quoting.log import logger

_SCRATCH_SUFFIX: Final = ".tmp"
_LARGEST_SUMMARY_BYTES: Final = 1 << 30

_log = logger(__name__)


@dataclass(frozen=True)
class PlanCache:
    """Finds plans in the cache, and builds those that are not there or do not prove themselves."""

    shards: Sequence[Counted]
    recipe: Recipe
    folder: Path
    files: Files
    index_of: OpenIndex
    token: str

    def digest_of(self, group: Group) -> str:
        """The name of a group's plan: the same entries, cut and packed the same way, have the same one."""
        spans = [(self.shards[span.shard].index_digest, span.first, span.last) for span in group]
        return self.recipe.digest_of("group", spans)

    def summarised(self, group: Group) -> GroupSummary:
        """What a group's plan has; it is in the cache from now on."""
        digest = self.digest_of(group)
        return GroupSummary(group, digest, self.plan_of(group, digest).counts)

    def plan_of(self, group: Group, digest: str) -> GroupPlan:
        """A group's plan, mapped from the cache; built if need be."""
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
            _log.warning("the cached plan %s is built again: %s", path, damage)
            return None

    def put(self, path: Path, data: bytes) -> None:
        """Put a file into the cache, whole or not at all; nothing is synced, for a reader checks every byte."""
        try:
            self._put(path, data)
        except StorageFailed as refusal:
            # Data that many share is often not to be written to: the cache can be elsewhere.
            raise replace(refusal, is_cache=True) from refusal

    def _put(self, path: Path, data: bytes) -> None:
        scratch = f".{path.name}-{self.token}{_SCRATCH_SUFFIX}"
        self.files.make_directory(self.folder)
        try:
            self.files.replace(path, data, scratch=scratch, durable=False)
        except StorageFailed:
            # Whoever built the same at the same time may have cleared our scratch file away: then it is there.
            if self.files.find(path) is None or self.files.read_bytes(path, limit_bytes=len(data)) != data:
                raise

    def clear_scratch(self, names: set[str]) -> None:
        """Remove what killed builders of these files left; they stand under their final names by now."""
        for node in self.files.list_directory(self.folder):
            final = node.name.removeprefix(".").partition("-")[0]
            if node.name.startswith(".") and node.name.endswith(_SCRATCH_SUFFIX) and final in names:
                # crash here: fewer scratch files, which no reader looks at.
                self.files.remove_file(self.folder / node.name)

    def summary(self, path: Path) -> list[GroupSummary] | None:
        """The groups of a bucket as the cache has them."""
        if self.files.find(path) is None:
            return None
        try:
            return decode_summary(self.files.read_bytes(path, limit_bytes=_LARGEST_SUMMARY_BYTES))
        except PlanDamaged as damage:
            _log.warning("the cached summary %s is made again: %s", path, damage)
            return None


def _mapped(path: Path) -> memoryview | None:
    with told("map", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        # The system maps no empty file.
        return np.memmap(path, np.uint8, mode="r").data if path.stat().st_size else memoryview(b"")
    return None
