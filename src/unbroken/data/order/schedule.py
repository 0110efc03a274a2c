"""Which bucket each sample of a run is drawn from, and its how-manieth it is.

The answer is a short list of segments, worked out once: as long as the phases, the generations of the data and the
buckets that run dry, never as the samples. Nothing that comes later changes a sample, neither more steps nor more
epochs nor more phases nor more data: a segment is decided by what lies before it. The world is no part of it.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from unbroken.data.order.epoch_order import Epoch
from unbroken.data.order.keyed import subkey
from unbroken.data.order.mixture import apportion
from unbroken.data.order.segments import Dry, Generation, Line, OnDry, Phase, Segment
from unbroken.errors import BadMix

# ---- without phases ----


class Natural:
    """Whole epochs; data that joins in the middle of one, or just when it has ended, is read before the next.

    All buckets are in the same epoch, also one that it has not drawn from yet.
    """

    def __init__(self, line: Line) -> None:
        self.line = line
        self._generations = 0
        self._sequences: list[int] = []
        self._whole = Epoch()
        self._epochs = [Epoch()] * len(line.names)
        self._stop: int | None = 0  # where the last segment ends; None: nowhere

    def go_on(self, generation: Generation, until: int | None) -> int | None:
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
                line.dry += [Dry(line.sample, name, 0) for name in line.names]
                return line.sample
            if line.sample == self._stop:
                self._begin_epochs()
            stops = [stop for stop in (self._stop, until, last) if stop is not None]
            if not stops:
                return None
            line.advance(min(stops))
        return None

    def _grow(self, number: int, sequences: list[int]) -> None:
        """Let each bucket have its new size from now on, and finish the epoch that is being served with it."""
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
    """Phases one after the other, the last one again and again; ordinals carry over.

    Dry is what is asked for one sequence more than it has. Under ``halt`` the samples end there. Under ``renormalise``
    the bucket leaves, and the rest of the phase is apportioned over the others: so the samples of a halt are a prefix.
    """

    def __init__(self, line: Line, phases: Sequence[Phase]) -> None:
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

    def go_on(self, generation: Generation, until: int | None) -> int | None:
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
            dry = self._first_dry(segment)
            stops = [stop for stop in (self._stop, until, dry.sample if dry else None) if stop is not None]
            if not stops:
                return None
            line.advance(min(stops))
            if dry and dry.sample == line.sample and line.sample not in (self._stop, until):
                line.dry.append(dry)
                if generation.on_dry == "halt":
                    return line.sample
                self._gone.add(line.names.index(dry.bucket))
                self._segment = None
        return None

    def _take(self, generation: Generation) -> None:
        """Set what each bucket can give in all; one that was dry and has more now comes back into its phase."""
        line = self.line
        sequences = [generation.sequences.get(name, 0) for name in line.names]
        numbers = [epoch.number_at(drawn) for epoch, drawn in zip(self._epochs, line.drawn, strict=True)]
        line.grow(numbers)
        stands = zip(self._epochs, numbers, sequences, strict=True)
        self._epochs = [epoch.grown(number, count) for epoch, number, count in stands]
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
        """The rest of the phase over the buckets that are left, or None if there are none."""
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

    def _first_dry(self, segment: Segment) -> Dry | None:
        limits = ((self._asks_too_much(segment, bucket), bucket) for bucket in segment.buckets)
        asked = [(sample, bucket) for sample, bucket in limits if sample is not None]
        if not asked:
            return None
        sample, bucket = min(asked)
        return Dry(sample, self.line.names[bucket], segment.phase)

    def _asks_too_much(self, segment: Segment, bucket: int) -> int | None:
        """The first sample that asks a bucket for more than it has."""
        limit = self._limits[bucket]
        # Fewer epochs than before may lie behind what has been drawn already: then the next one asked for is too much.
        if limit is None:
            return None
        first_lacking = max(limit, self.line.drawn[bucket])
        # A segment that ends is one round of its pattern: most buckets are seen at a glance to outlast it.
        if self._stop is not None and first_lacking >= segment.drawn_after_a_round(bucket):
            return None
        return segment.sample_of(bucket, first_lacking)


# ---- the schedule ----

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
