"""Which rank runs which lane: lane ``i`` runs in round ``i // size`` on rank ``i % size``.

A lane is one micro-batch of fixed shape, and their list is the same in every world: that is why a lane's kernels, and
with them its bits, do not depend on how many ranks there are. Pure numbers; nothing here knows torch's collectives.
"""

from dataclasses import dataclass

import torch

from unbroken.errors import TooManyRanks


@dataclass(frozen=True)
class LanePlan:
    """The lanes of a step as one rank of a world sees them."""

    lanes: int
    size: int
    rank: int

    def __post_init__(self) -> None:
        """Refuse a world in which some rank would never have a lane."""
        if self.lanes != int(self.lanes) or self.lanes < 1:
            raise ValueError(f"a step has {self.lanes} lanes; it needs a whole number of them, one or more")
        if self.size > self.lanes:
            raise TooManyRanks(ranks=self.size, lanes=self.lanes)

    @property
    def rounds(self) -> int:
        """How many lanes the busiest rank runs one after the other."""
        return -(-self.lanes // self.size)

    def lane(self, round_number: int) -> int | None:
        """This rank's lane in a round; None where the last round has fewer lanes than there are ranks."""
        number = round_number * self.size + self.rank
        return number if number < self.lanes else None

    def present(self, round_number: int) -> int:
        """How many ranks have a lane in a round: the first ones."""
        return min(self.size, self.lanes - round_number * self.size)

    def in_lane_order(self, gathered: torch.Tensor) -> torch.Tensor:
        """What each rank said of each of its rounds (rank, round, …) as a list by lane (lane, …)."""
        return gathered.transpose(0, 1).flatten(0, 1)[: self.lanes]
