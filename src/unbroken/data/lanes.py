"""Who reads which samples of a step: arithmetic on numbers, without any data.

A step is ``global_batch`` consecutive samples, cut into lanes of equal size. Lane i belongs to rank ``i % world``, so a
rank reads its lanes in rising order, and all ranks together read every sample of the step once, in whatever world. The
cut into lanes does not depend on the world unless it is left open.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from unbroken.errors import LanesUnfit, TooManyRanks


@dataclass(frozen=True)
class Lanes:
    """One rank's share of every step; turn t is the t-th lane that this rank reads from where it began."""

    global_batch: int
    size: int
    rank: int
    world: int

    @property
    def per_step(self) -> int:
        """The lanes of a step, over all ranks."""
        return self.global_batch // self.size

    @property
    def mine(self) -> int:
        """The lanes of a step that this rank reads."""
        return -(-(self.per_step - self.rank) // self.world)

    def place(self, turn: int) -> tuple[int, int]:
        """Step, counted from where it began, and lane of a turn."""
        step, nth = divmod(turn, self.mine)
        return step, self.rank + nth * self.world

    def samples(self, turns: NDArray[np.int64], start: int) -> NDArray[np.int64]:
        """The samples of some turns, one after the other, where turn 0 belongs to the step that begins at ``start``."""
        step, nth = np.divmod(turns, self.mine)
        first = start + step * self.global_batch + (self.rank + nth * self.world) * self.size
        samples: NDArray[np.int64] = (first[:, None] + np.arange(self.size)).ravel()
        return samples


def cut_lanes(global_batch: int, size: int | None, rank: int, world: int) -> Lanes:
    """The lanes of one rank; without a size, one lane for each rank.

    Raises:
        LanesUnfit: the sizes do not divide each other, or a rank would have nothing to read.
    """
    if complaint := _complaint(global_batch, size, rank, world):
        raise LanesUnfit(global_batch=global_batch, lane=size, world=world, complaint=complaint)
    return Lanes(global_batch, size or global_batch // world, rank, world)


def _complaint(global_batch: int, size: int | None, rank: int, world: int) -> str | None:
    if world < 1 or not 0 <= rank < world:
        return f"rank {rank} is none of the {world} ranks"
    if global_batch < 1 or (size is not None and size < 1):
        return "a batch and a lane have at least one sample"
    if size is None and global_batch % world:
        return f"{global_batch} samples a step cannot be cut into one equal lane for each of {world} ranks"
    if size is None:
        return None
    if global_batch % size:
        return f"{global_batch} samples a step cannot be cut into lanes of {size}"
    if world > global_batch // size:
        return f"{global_batch // size} lanes a step leave {world - global_batch // size} of {world} ranks without any"
    return None


# ---- running them ----


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
