"""A curriculum drawn by hand, one sample after the other: what the arithmetic of schedules is held to."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from unbroken.data.order.keyed import subkey
from unbroken.data.order.mixture import Interleave, apportion
from unbroken.data.order.schedule import DataGeneration, Exhausted, Phase

Drawn = list[tuple[str, int]]


@dataclass
class Pile:
    """A bucket as a person reads it: sequences that are still unread in this epoch, and how many epochs were begun."""

    size: int = 0
    unread: int = 0
    epoch: int = 0
    drawn: int = 0

    def grow(self, size: int) -> None:
        self.unread += size - self.size
        self.size = size

    def has_more(self, epochs: int | None) -> bool:
        return self.size > 0 and (
            epochs is None or self.epoch < epochs - 1 or (self.epoch < epochs and self.unread > 0)
        )

    def draw(self) -> int:
        if not self.unread:
            self.epoch, self.unread = self.epoch + 1, self.size
        self.unread -= 1
        self.drawn += 1
        return self.drawn - 1


@dataclass
class ByHand:
    """A curriculum drawn one sample after the other, with a list instead of arithmetic."""

    phases: Sequence[Phase]
    seed: int
    piles: defaultdict[str, Pile] = field(default_factory=lambda: defaultdict(Pile))
    phase: int = 0
    within: int = 0
    cuts: int = 0
    gone: set[str] = field(default_factory=set)
    queue: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)  # the whole last phase, once it has been laid out
    exhausted: list[Exhausted] = field(default_factory=list)
    is_over: bool = False
    out: Drawn = field(default_factory=list)

    def fill(self) -> None:
        """Lay out the rest of the phase over the buckets that are left."""
        phase = self.phases[self.phase]
        mix = {name: weight for name, weight in sorted(phase.mix) if weight > 0 and name not in self.gone}
        if not mix:
            self.is_over = True
            return
        quotas = apportion(list(mix.values()), phase.samples - self.within)
        pattern = Interleave(quotas, subkey(self.seed, "mix", self.phase, self.cuts))
        self.cuts += 1
        source, _ = pattern.locate(np.arange(pattern.slots))
        self.queue = [list(mix)[number] for number in source.tolist()]
        if self.phase == len(self.phases) - 1 and not self.within:
            self.again = self.queue.copy()

    def lay_aside(self) -> None:
        """What was laid out does not hold any more."""
        self.queue, self.again = [], []

    def run(self, generation: DataGeneration, until: int) -> None:
        for name, size in generation.sequences.items():
            self.piles[name].grow(size)
        back = {name for name in self.gone if self.piles[name].has_more(generation.epochs)}
        self.gone -= back
        if back & {name for name, _ in self.phases[self.phase].mix}:
            self.lay_aside()
        self.exhausted = [each for each in self.exhausted if each.sample < len(self.out)]
        self.is_over = False
        while len(self.out) < until and not self.is_over:
            self.step(generation)

    def step(self, generation: DataGeneration) -> None:
        if not self.queue:
            if self.within == self.phases[self.phase].samples:
                self.within = 0
                if self.phase < len(self.phases) - 1:
                    self.phase, self.cuts = self.phase + 1, 0
            self.queue = self.again.copy()
            if not self.queue:
                self.fill()
            if self.is_over:
                return
        name = self.queue[0]
        if not self.piles[name].has_more(generation.epochs):
            self.exhausted.append(Exhausted(len(self.out), name, self.phase))
            self.is_over = generation.on_exhausted == "halt"
            if not self.is_over:
                self.gone.add(name)
                self.lay_aside()
            return
        self.queue.pop(0)
        self.within += 1
        self.out.append((name, self.piles[name].draw()))
