"""The schedule: which bucket each sample of a run is drawn from, and the index of that draw.

It is a short list of segments, computed once; its length grows with the phases, the generations of the data and the
exhausted buckets, not with the samples. Nothing later changes an earlier sample: neither more steps, epochs or phases
nor more data. It does not depend on the world size.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from unbroken.data.order.epoch_order import Epoch
from unbroken.data.order.keyed import subkey
from unbroken.data.order.mixture import apportion
from unbroken.data.order.segments import DataGeneration, Exhausted, OnExhausted, Phase, Segment, SegmentLine
from unbroken.errors import BadMix

# ---- without phases ----


class Natural:
    """Whole epochs over all buckets; data that joins during or right after an epoch is read before the next.

    All buckets are in the same epoch, even one that has no draws yet.
    """

    def __init__(self, line: SegmentLine) -> None:
        self.line = line
        self._generations = 0
        self._sequences: list[int] = []
        self._whole = Epoch()
        self._epochs = [Epoch()] * len(line.names)
        self._stop: int | None = 0  # where the last segment ends; None: nowhere

    def extend(self, generation: DataGeneration, until: int | None) -> int | None:
        """Decide samples up to ``until``; where they end before that, or None if they never do."""
        line = self.line
        sequences = [generation.sequences.get(name, 0) for name in line.names]
        number = self._whole.number_at(line.sample)
        line.grow([number] * len(sequences))
        if sequences != self._sequences:
            self._grow(number, sequences)
        last = self._whole.limit(generation.epochs)
        while until is None or line.sample < until:
            if last is not None and line.sample >= last:
                line.exhausted += [Exhausted(line.sample, name, 0) for name in line.names]
                return line.sample
            if line.sample == self._stop:
                self._begin_epochs()
            stops = [stop for stop in (self._stop, until, last) if stop is not None]
            if not stops:
                return None
            line.advance(min(stops))
        return None

    def _grow(self, number: int, sequences: list[int]) -> None:
        """Give each bucket its new size, and finish the epoch in progress with it."""
        line = self.line
        self._whole = self._whole.grown(number, sum(sequences))
        self._epochs = [epoch.grown(number, count) for epoch, count in zip(self._epochs, sequences, strict=True)]
        rest = [epoch.end_of(number) - drawn for epoch, drawn in zip(self._epochs, line.drawn, strict=True)]
        self._sequences = sequences
        self._stop = line.sample
        self._generations += 1
        if any(rest) and rest != sequences:
            line.begin(0, range(len(rest)), rest, self._key("rest"))
            self._stop = line.sample + sum(rest)

    def _begin_epochs(self) -> None:
        self.line.begin(0, range(len(self._sequences)), self._sequences, self._key("epoch"))
        self._stop = None

    def _key(self, part: str) -> int:
        return subkey(self.line.seed, "natural", self._generations, part)


# ---- with phases ----


class Curriculum:
    """Phases in order, the last one repeated; ordinals carry over.

    A bucket is exhausted at the first draw beyond its sequences. Under ``halt`` the samples end there. Under
    ``renormalise`` the bucket leaves, and the rest of the phase is divided among the others; so the samples under
    ``halt`` are a prefix.
    """

    def __init__(self, line: SegmentLine, phases: Sequence[Phase]) -> None:
        self.line = line
        self.phases = phases
        self._weights = [dict(phase.mix) for phase in phases]
        self._epochs = [Epoch()] * len(line.names)
        self._limits: list[int | None] = []
        self._gone: set[int] = set()
        self._phase, self._phase_first = 0, 0
        self._cuts = 0
        self._segment: Segment | None = None
        self._stop: int | None = 0  # where the segment ends; None: nowhere

    def extend(self, generation: DataGeneration, until: int | None) -> int | None:
        """Decide samples up to ``until``; where they end before that, or None if they never do."""
        line = self.line
        self._take(generation)
        while until is None or line.sample < until:
            if line.sample == self._stop:
                self._segment = None
                self._enter_phase()
            segment = self._segment or self._begin()
            if segment is None:
                return line.sample
            exhausted = self._first_exhausted(segment)
            stops = [stop for stop in (self._stop, until, exhausted.sample if exhausted else None) if stop is not None]
            if not stops:
                return None
            line.advance(min(stops))
            if exhausted and exhausted.sample == line.sample and line.sample not in (self._stop, until):
                line.exhausted.append(exhausted)
                if generation.on_exhausted == "halt":
                    return line.sample
                self._gone.add(line.names.index(exhausted.bucket))
                self._segment = None
        return None

    def _take(self, generation: DataGeneration) -> None:
        """Set the total draws of each bucket; an exhausted bucket that has more now returns to its phase."""
        line = self.line
        sequences = [generation.sequences.get(name, 0) for name in line.names]
        numbers = [epoch.number_at(drawn) for epoch, drawn in zip(self._epochs, line.drawn, strict=True)]
        line.grow(numbers)
        rows = zip(self._epochs, numbers, sequences, strict=True)
        self._epochs = [epoch.grown(number, count) for epoch, number, count in rows]
        self._limits = [epoch.limit(generation.epochs) for epoch in self._epochs]
        back = {bucket for bucket in self._gone if self._has_more(bucket)}
        self._gone -= back
        if back & {line.names.index(name) for name in self._weights[self._phase]}:
            self._segment = None

    def _has_more(self, bucket: int) -> bool:
        limit = self._limits[bucket]
        return limit is None or limit > self.line.drawn[bucket]

    def _enter_phase(self) -> None:
        line = self.line
        if self._phase < len(self.phases) - 1:
            ends = self._phase_first + self.phases[self._phase].samples
            if line.sample == ends:
                self._phase, self._phase_first, self._cuts = self._phase + 1, ends, 0

    def _begin(self) -> Segment | None:
        """The rest of the phase over the remaining buckets; None if there are none."""
        line, phase, weights = self.line, self.phases[self._phase], self._weights[self._phase]
        buckets = [
            number for number, name in enumerate(line.names) if number not in self._gone and weights.get(name, 0) > 0
        ]
        if not buckets:
            return None
        is_last = self._phase == len(self.phases) - 1
        rest = phase.samples - (line.sample - self._phase_first) % phase.samples
        quotas = apportion([weights[line.names[bucket]] for bucket in buckets], rest)
        key = subkey(line.seed, "mix", self._phase, self._cuts)
        self._cuts += 1
        self._segment = line.begin(self._phase, buckets, quotas, key)
        self._stop = None if is_last and rest == phase.samples else line.sample + rest
        return self._segment

    def _first_exhausted(self, segment: Segment) -> Exhausted | None:
        limits = ((self._first_lacking(segment, bucket), bucket) for bucket in segment.buckets)
        asked = [(sample, bucket) for sample, bucket in limits if sample is not None]
        if not asked:
            return None
        sample, bucket = min(asked)
        return Exhausted(sample, self.line.names[bucket], segment.phase)

    def _first_lacking(self, segment: Segment, bucket: int) -> int | None:
        """The first sample that needs more of a bucket than it has."""
        limit = self._limits[bucket]
        # With fewer epochs than before, more may have been drawn than there is: then the next draw is too much.
        if limit is None:
            return None
        first_lacking = max(limit, self.line.drawn[bucket])
        # A segment that ends is one round of its pattern; most buckets outlast it, which is cheap to see.
        if self._stop is not None and first_lacking >= segment.drawn_after_a_round(bucket):
            return None
        return segment.sample_of(bucket, first_lacking)


# ---- the schedule ----

__all__ = ["DataGeneration", "Exhausted", "OnExhausted", "Phase", "Schedule"]


class Schedule:
    """The whole run as segments.

    Without phases every epoch is one pass over all buckets together. With phases each has its quotas, ordinals carry
    over from phase to phase, and the last one repeats. A bucket is exhausted after ``epochs`` passes. A change of
    sequences, epochs or ``on_exhausted`` starts a new generation at the sample where it was made.

    Attributes:
        buckets: every bucket's name, sorted; ``locate`` gives their numbers.
        end: the number of samples; None: without end.
        exhausted: the exhausted buckets, in order; the last one causes a halt. Without phases all end together.
        growth: for each generation and bucket, where new sequences join.

    Raises:
        BadMix: a phase names an unknown bucket, or has no samples or no usable weights.
        ValueError: the generations are not in order, or remove sequences.
    """

    def __init__(self, phases: Sequence[Phase] | None, generations: Sequence[DataGeneration], *, seed: int) -> None:
        _require_growth(generations)
        self.buckets = tuple(sorted({name for each in generations for name in each.sequences}))
        _require_usable(phases, self.buckets)
        line = SegmentLine(self.buckets, seed)
        plan = Natural(line) if phases is None else Curriculum(line, phases)
        self.end: int | None = None
        for number, generation in enumerate(generations):
            if line.sample != generation.at_sample:
                raise ValueError(f"a generation starts at sample {generation.at_sample}, data ends at {line.sample}")
            # A bucket exhausted at this sample may have more now; if not, it is found exhausted again.
            line.exhausted = [each for each in line.exhausted if each.sample < line.sample]
            following = generations[number + 1 : number + 2]
            self.end = plan.extend(generation, following[0].at_sample if following else None)
        self.segments = tuple(line.segments)
        self.exhausted = tuple(line.exhausted)
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
        # The count of a bucket that left the mix is in the last segment that had it.
        for segment, end in zip(self.segments, ends, strict=False):
            if segment.first < sample:
                found = segment.served(min(sample, end))
                drawn.update({self.buckets[bucket]: count for bucket, count in found.items()})
        return drawn

    def phase_at(self, sample: int) -> int:
        """The phase of a sample; 0 without phases."""
        number = int(np.searchsorted(self._firsts, sample, "right")) - 1
        return self.segments[number].phase if number >= 0 else 0

    def _require_sample(self, sample: int) -> None:
        if sample < 0 or (self.end is not None and sample > self.end):
            raise IndexError(f"sample {sample} is out of range: there are {self.end}")


def _require_growth(generations: Sequence[DataGeneration]) -> None:
    if not generations or generations[0].at_sample != 0:
        raise ValueError("the first generation must start at sample 0")
    for before, after in pairwise(generations):
        shrunk = [name for name, count in before.sequences.items() if after.sequences.get(name, 0) < count]
        if shrunk or after.at_sample < before.at_sample:
            raise ValueError(f"a generation must add sequences, at a later sample: {shrunk or after.at_sample}")


def _require_usable(phases: Sequence[Phase] | None, buckets: Sequence[str]) -> None:
    if phases is None:
        return
    problems = [problem for number, phase in enumerate(phases) for problem in _problems(number, phase, buckets)]
    if problems or not phases:
        raise BadMix(problems=tuple(problems) or ("the curriculum has no phases",), buckets=tuple(buckets))


def _problems(number: int, phase: Phase, buckets: Sequence[str]) -> Iterator[str]:
    name = f"phase {number + 1}"
    if phase.samples < 1:
        yield f"{name} is shorter than one sequence"
    for bucket, weight in phase.mix:
        if bucket not in buckets:
            yield f"{name} names the bucket {bucket!r}, which does not exist"
        if weight < 0:
            yield f"{name} gives {bucket!r} a weight below 0"
    if not any(weight > 0 for _, weight in phase.mix):
        yield f"{name} has no weight above 0"
