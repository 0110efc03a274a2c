"""The parts of a schedule: phases and generations are its input, segments its output.

A segment is an interleave of buckets, repeated as often as needed, from a first sample on. ``SegmentLine`` is the list
of segments while it is computed, with the draws from each bucket so far.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unbroken.data.order.epoch_order import Growth
from unbroken.data.order.mixture import Interleave

OnExhausted = Literal["halt", "renormalise"]


@dataclass(frozen=True)
class Phase:
    """A number of samples, drawn from buckets in proportion to their weights."""

    samples: int
    mix: tuple[tuple[str, Fraction], ...]


@dataclass(frozen=True)
class DataGeneration:
    """The data from a sample on: sequences of each bucket, ``epochs``, and what to do when one is exhausted."""

    at_sample: int
    sequences: Mapping[str, int]
    epochs: int | None = 1
    on_exhausted: OnExhausted = "halt"


@dataclass(frozen=True)
class Exhausted:
    """An exhausted bucket, and the first sample that would have been drawn from it."""

    sample: int
    bucket: str
    phase: int


@dataclass(frozen=True)
class Segment:
    """Samples from ``first`` on, in a repeating pattern.

    Attributes:
        buckets: the buckets' numbers, in the order of the pattern's sources.
        drawn: draws from each of them before ``first``.
    """

    first: int
    phase: int
    buckets: tuple[int, ...]
    drawn: tuple[int, ...]
    pattern: Interleave

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The bucket of each sample and its ordinal in it."""
        rounds, slots = np.divmod(samples - self.first, self.pattern.slots)
        source, ordinal = self.pattern.locate(slots)
        ordinal += np.array(self.drawn, np.int64)[source]
        ordinal += rounds * np.array(self.pattern.quotas, np.int64)[source]
        return np.array(self.buckets, np.int64)[source], ordinal

    def served(self, sample: int) -> dict[int, int]:
        """Draws from each of the segment's buckets before a sample."""
        rounds, slot = divmod(sample - self.first, self.pattern.slots)
        each = zip(self.buckets, self.drawn, self.pattern.quotas, self.pattern.taken(slot), strict=True)
        return {bucket: drawn + rounds * quota + taken for bucket, drawn, quota, taken in each}

    def drawn_after_a_round(self, bucket: int) -> int:
        """Draws from a bucket after one round of the pattern."""
        source = self.buckets.index(bucket)
        return self.drawn[source] + self.pattern.quotas[source]

    def sample_of(self, bucket: int, ordinal: int) -> int | None:
        """The sample that draws an ordinal of a bucket if the pattern repeats forever; None: no sample."""
        source = self.buckets.index(bucket)
        quota = self.pattern.quotas[source]
        if not quota:
            return None
        rounds, rest = divmod(ordinal - self.drawn[source], quota)
        return self.first + rounds * self.pattern.slots + self.pattern.slot_of(source, rest)


class SegmentLine:
    """Segments as they are computed: the samples so far, and their draws from each bucket."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self.names = tuple(names)
        self.seed = seed
        self.segments: list[Segment] = []
        self.exhausted: list[Exhausted] = []
        self.sample = 0
        self.drawn = [0] * len(names)
        self.growth: list[dict[str, Growth]] = []

    def grow(self, epochs: Sequence[int]) -> None:
        """Record the draws and epoch of each bucket at the start of a generation: new sequences join there."""
        rows = zip(self.names, self.drawn, epochs, strict=True)
        self.growth.append({name: Growth(drawn, epoch) for name, drawn, epoch in rows})

    def begin(self, phase: int, buckets: Sequence[int], quotas: Sequence[int], key: int) -> Segment:
        """Start a new segment at the next sample."""
        drawn = tuple(self.drawn[bucket] for bucket in buckets)
        segment = Segment(self.sample, phase, tuple(buckets), drawn, Interleave(quotas, key))
        # A segment that starts where the previous one did replaces it: that one has no samples.
        if self.segments and self.segments[-1].first == self.sample:
            self.segments.pop()
        self.segments.append(segment)
        return segment

    def advance(self, sample: int) -> None:
        """Extend the last segment up to this sample."""
        for bucket, count in self.segments[-1].served(sample).items():
            self.drawn[bucket] = count
        self.sample = sample
