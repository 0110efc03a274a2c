"""The schedule of a run without phases: every epoch is one pass over all buckets together, evenly mixed."""

from unbroken.data.epochs import Epoch
from unbroken.data.keyed import subkey
from unbroken.data.segments import Dry, Generation, Line


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
