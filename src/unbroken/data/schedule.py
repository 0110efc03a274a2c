"""Which bucket each sample of a run is drawn from, and its how-manieth it is.

The answer is a short list of segments, worked out once: as long as the phases, the generations of the data and the
buckets that run dry, never as the samples. Nothing that comes later changes a sample, neither more steps nor more
epochs nor more phases nor more data: a segment is decided by what lies before it. The world is no part of it.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from unbroken.data.curriculum import Curriculum
from unbroken.data.natural import Natural
from unbroken.data.segments import Dry, Generation, Line, OnDry, Phase
from unbroken.errors import BadMix

__all__ = ["Dry", "Generation", "OnDry", "Phase", "Schedule"]


class Schedule:
    """The whole run as segments.

    Without phases every epoch is one pass over all buckets together. With phases each has its quotas, ordinals carry
    over from phase to phase, and the last one repeats. A bucket is dry when it has been read ``epochs`` times. A change
    of sequences, epochs or ``on_dry`` is a generation of its own, from the sample at which it was made.

    Attributes:
        buckets: every bucket's name, sorted; ``locate`` gives their numbers.
        end: how many samples there are; None: without end.
        dry: the buckets that run dry, in order; after a halt the last one is why. Without phases all end together.
        growth: for each generation and bucket, where what joins it stands.

    Raises:
        BadMix: a phase names a bucket that is not there, or has no samples or no usable weights.
        ValueError: generations that do not follow each other, or take sequences away.
    """

    def __init__(self, phases: Sequence[Phase] | None, generations: Sequence[Generation], *, seed: int) -> None:
        _require_growth(generations)
        self.buckets = tuple(sorted({name for each in generations for name in each.sequences}))
        _require_usable(phases, self.buckets)
        line = Line(self.buckets, seed)
        plan = Natural(line) if phases is None else Curriculum(line, phases)
        self.end: int | None = None
        for number, generation in enumerate(generations):
            if line.sample != generation.at_sample:
                raise ValueError(f"a generation begins at sample {generation.at_sample}, data ends at {line.sample}")
            # What was dry just here may have more now; if not, it is found dry again.
            line.dry = [each for each in line.dry if each.sample < line.sample]
            following = generations[number + 1 : number + 2]
            self.end = plan.go_on(generation, following[0].at_sample if following else None)
        self.segments = tuple(line.segments)
        self.dry = tuple(line.dry)
        self.growth = tuple(line.growth)
        self._firsts = np.array([segment.first for segment in self.segments], np.int64)

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The number of each sample's bucket and its ordinal in that bucket.

        Raises:
            IndexError: a sample is negative or lies beyond the end.
        """
        if samples.size:
            self._require_sample(int(samples.min()))
            self._require_sample(int(samples.max()) + 1)
        bucket, ordinal = np.empty_like(samples), np.empty_like(samples)
        numbers = np.searchsorted(self._firsts, samples, "right") - 1
        for number in np.unique(numbers).tolist():
            here = numbers == number
            bucket[here], ordinal[here] = self.segments[number].locate(samples[here])
        return bucket, ordinal

    def served(self, sample: int) -> dict[str, int]:
        """How many sequences of each bucket have been drawn before a sample.

        Raises:
            IndexError: the sample is negative or lies beyond the end.
        """
        self._require_sample(sample)
        drawn = dict.fromkeys(self.buckets, 0)
        ends = [*self._firsts[1:].tolist(), sample]
        # A bucket that has left the mix is known by the last segment that had it.
        for segment, end in zip(self.segments, ends, strict=False):
            if segment.first < sample:
                found = segment.served(min(sample, end))
                drawn.update({self.buckets[bucket]: count for bucket, count in found.items()})
        return drawn

    def phase_at(self, sample: int) -> int:
        """The number of the phase that a sample belongs to; 0 where there are no phases."""
        number = int(np.searchsorted(self._firsts, sample, "right")) - 1
        return self.segments[number].phase if number >= 0 else 0

    def _require_sample(self, sample: int) -> None:
        if sample < 0 or (self.end is not None and sample > self.end):
            raise IndexError(f"sample {sample} is not one of the {self.end} there are")


def _require_growth(generations: Sequence[Generation]) -> None:
    if not generations or generations[0].at_sample != 0:
        raise ValueError("the first generation begins at sample 0")
    for before, after in pairwise(generations):
        shrunk = [name for name, count in before.sequences.items() if after.sequences.get(name, 0) < count]
        if shrunk or after.at_sample < before.at_sample:
            raise ValueError(f"a generation only adds, and later: {shrunk or after.at_sample}")


def _require_usable(phases: Sequence[Phase] | None, buckets: Sequence[str]) -> None:
    if phases is None:
        return
    problems = [problem for number, phase in enumerate(phases) for problem in _problems(number, phase, buckets)]
    if problems or not phases:
        raise BadMix(problems=tuple(problems) or ("the curriculum has no phases",), buckets=tuple(buckets))


def _problems(number: int, phase: Phase, buckets: Sequence[str]) -> Iterator[str]:
    name = f"phase {number + 1}"
    if phase.samples < 1:
        yield f"{name} has no samples: it is shorter than one sequence"
    for bucket, weight in phase.mix:
        if bucket not in buckets:
            yield f"{name} names the bucket {bucket!r}, which is not there"
        if weight < 0:
            yield f"{name} gives {bucket!r} a weight below 0"
    if not any(weight > 0 for _, weight in phase.mix):
        yield f"{name} has no weight above 0"
