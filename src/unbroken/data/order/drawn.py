"""One bucket of a stream: from the how-manieth sequence drawn of it to the group, the sequence and its windows.

A bucket that grew has a plan for each time it did; groups are numbered over all of them, in the order they joined, so
that the numbers of those that stand never change.
"""

from collections.abc import Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unbroken.data.order.epoch_order import BucketOrder, Growth
from unbroken.data.order.keyed import subkey
from unbroken.data.packing.bucket_plan import BucketPlan, Slots


@dataclass(frozen=True)
class Planned:
    """The shards that joined a bucket together: their plan, the stream's number of the first of them."""

    plan: BucketPlan
    first_shard: int
    first_group: int


def order_key(seed: int, bucket: str) -> int:
    """What decides the order in which a bucket's sequences are drawn."""
    return subkey(seed, "order", bucket)


class DrawnBucket:
    """What is drawn of one bucket.

    Args:
        name: the bucket's name.
        planned: its plans, in the order in which they joined.
        growth: the ordinal at which each joined, and the epoch.
        seed: the run's seed.
        shuffle: whether its sequences are shuffled.
    """

    def __init__(
        self, name: str, planned: Sequence[Planned], growth: Sequence[Growth], *, seed: int, shuffle: bool = True
    ) -> None:
        self.name = name
        self.planned = tuple(planned)
        counts = [each.plan.sequences for each in planned]
        self.order = BucketOrder(counts, growth, order_key(seed, name), shuffle=shuffle)
        self._firsts = np.array([each.first_group for each in planned], np.int64)
        self.group_digests = [each.plan.digest_of(group) for each in planned for group in range(each.plan.groups)]
        # The same group in another bucket is another source: the bucket's name is in the key.
        self.group_keys = np.array([subkey(0, name, digest) for digest in self.group_digests], np.uint64)

    def apart(self) -> "DrawnBucket":
        """The same bucket with an order of its own: an order keeps what it found, and serves one thread."""
        apart = copy(self)
        apart.order = deepcopy(self.order)
        return apart

    @property
    def sequences(self) -> int:
        """How many it has."""
        return sum(each.plan.total_sequences for each in self.planned)

    def find(self, group: int) -> tuple[Planned, int]:
        """The plan that a group belongs to, and its number there."""
        planned = self.planned[int(np.searchsorted(self._firsts, group, "right")) - 1]
        return planned, group - planned.first_group

    def shards_of(self, group: int) -> list[int]:
        """The stream's numbers of the shards that a group is read from."""
        planned, inner = self.find(group)
        return sorted({planned.first_shard + span.shard for span in planned.plan.spans_of(inner)})

    def windows(
        self, groups: NDArray[np.int64], sequences: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.int64], Slots]]:
        """The windows of sequences, group by group: the group, which of those asked for are in it, their windows."""
        by_group = np.argsort(groups, kind="stable")
        sorted_groups = groups[by_group]
        cuts = np.flatnonzero(np.diff(sorted_groups)) + 1
        for members in np.split(by_group, cuts):
            group = int(groups[members[0]])
            planned, inner = self.find(group)
            slots = planned.plan.windows_of(inner, sequences[members])
            yield group, members, replace(slots, shard=slots.shard + planned.first_shard)
