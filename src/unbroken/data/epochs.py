"""Where the epochs of one bucket begin and end when the bucket may grow.

An epoch is one pass over all sequences the bucket has. What is added while an epoch is being served belongs to that
epoch. Where one has ended and the next has not begun, the schedule says which it is: an ordinal alone cannot.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Growth:
    """When sequences join a bucket: the next ordinal to be drawn, and the epoch that they are read in first."""

    ordinal: int
    epoch: int


@dataclass(frozen=True)
class Epoch:
    """The epoch that a bucket is in: its number, its first ordinal, and its sequences, which later epochs have too."""

    number: int = 0
    first: int = 0
    sequences: int = 0

    def number_at(self, served: int) -> int:
        """The epoch that is being served, or has just ended, when ``served`` ordinals have been drawn."""
        return self.number + (max(served - self.first - 1, 0) // self.sequences if self.sequences else 0)

    def grown(self, number: int, sequences: int) -> "Epoch":
        """A later epoch, or this one, when the bucket comes to hold ``sequences`` in it."""
        return Epoch(number, self.end_of(number) - self.sequences, sequences)

    def end_of(self, number: int) -> int:
        """The ordinal at which an epoch ends, of this one and later ones."""
        return self.first + (number - self.number + 1) * self.sequences

    def limit(self, epochs: int | None) -> int | None:
        """How many ordinals there are in all if the bucket is read ``epochs`` times; None: there is no end."""
        if not self.sequences:
            return self.first
        return None if epochs is None else self.end_of(epochs - 1)
