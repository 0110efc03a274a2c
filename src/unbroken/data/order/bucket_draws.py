"""The draws from one bucket of a stream: from the index of a draw to its group, sequence and windows.

A bucket that grew has one plan for each time it grew; groups are numbered over all plans in the order they joined, so
that growth never changes the number of an existing group.
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
class PlannedBucket:
    """Shards that joined a bucket together: their plan, and the stream's number of the first shard and group."""

    plan: BucketPlan
    first_shard: int
    first_group: int


def order_key(seed: int, bucket: str) -> int:
    """The key of the order in which a bucket's sequences are drawn."""
    return subkey(seed, "order", bucket)


class BucketDraws:
    """The draws from one bucket.

    Args:
        name: the bucket's name.
        planned: its plans, in the order in which they joined.
        growth: the ordinal and the epoch at which each joined.
        seed: the run's seed.
        shuffle: whether its sequences are shuffled.
    """

    def __init__(
        self, name: str, planned: Sequence[PlannedBucket], growth: Sequence[Growth], *, seed: int, shuffle: bool = True
    ) -> None:
        self.name = name
        self.planned = tuple(planned)
        counts = [each.plan.sequences for each in planned]
        self.order = BucketOrder(counts, growth, order_key(seed, name), shuffle=shuffle)
        self._firsts = np.array([each.first_group for each in planned], np.int64)
        self.group_digests = [each.plan.digest_of(group) for each in planned for group in range(each.plan.groups)]
        # The bucket's name is in the key: the same group in another bucket is another source.
        self.group_keys = np.array([subkey(0, name, digest) for digest in self.group_digests], np.uint64)

    def apart(self) -> "BucketDraws":
        """A copy with an order of its own, for another thread: an order caches and is not thread-safe."""
        apart = copy(self)
        apart.order = deepcopy(self.order)
        return apart

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return sum(each.plan.total_sequences for each in self.planned)

    def find(self, group: int) -> tuple[PlannedBucket, int]:
        """The plan of a group, and its number in that plan."""
        planned = self.planned[int(np.searchsorted(self._firsts, group, "right")) - 1]
        return planned, group - planned.first_group

    def shards_of(self, group: int) -> list[int]:
        """The stream's numbers of the shards that a group is read from."""
        planned, inner = self.find(group)
        return sorted({planned.first_shard + span.shard for span in planned.plan.spans_of(inner)})

    def windows(
        self, groups: NDArray[np.int64], sequences: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.int64], Slots]]:
        """The windows of sequences, group by group: the group, the indexes of its sequences, their windows."""
        by_group = np.argsort(groups, kind="stable")
        sorted_groups = groups[by_group]
        cuts = np.flatnonzero(np.diff(sorted_groups)) + 1
        for members in np.split(by_group, cuts):
            group = int(groups[members[0]])
            planned, inner = self.find(group)
            slots = planned.plan.windows_of(inner, sequences[members])
            yield group, members, replace(slots, shard=slots.shard + planned.first_shard)
