"""The schedule of a run with phases: exact quotas per phase, and what happens when a bucket runs dry."""

from collections.abc import Sequence

from unbroken.data.epochs import Epoch
from unbroken.data.keyed import subkey
from unbroken.data.mixture import apportion
from unbroken.data.segments import Dry, Generation, Line, Phase, Segment


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
