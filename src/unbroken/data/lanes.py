"""Lane arithmetic: which rank runs which lanes of a step, in which round, and which samples a lane holds.

A step is a fixed number of lanes (micro-batches) of equal size. Rank r of w runs lanes r, r + w, r + 2w, ..., one in
each round; only the last round may have fewer lanes than ranks. The loader reads samples by it, the reducer runs
gradients by it and the evaluation runs val/ by it, so they always agree.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import LanesUnfit, TooManyRanks

if TYPE_CHECKING:
    import torch

_Round = TypeVar("_Round", int, NDArray[np.int64])


@dataclass(frozen=True)
class RankLanes:
    """The lanes of a step that one rank runs."""

    lanes: int
    world: int
    rank: int

    @property
    def rounds(self) -> int:
        """Lanes that the busiest rank runs one after the other."""
        return -(-self.lanes // self.world)

    @property
    def count(self) -> int:
        """Lanes that this rank runs."""
        return -(-(self.lanes - self.rank) // self.world)

    def nth(self, round_number: _Round) -> _Round:
        """This rank's lane in a round, or in each of several; in the last round it may lie past the end of the step."""
        return round_number * self.world + self.rank

    def lane(self, round_number: int) -> int | None:
        """This rank's lane in a round; None if the last round has fewer lanes than ranks and this rank has none."""
        number = self.nth(round_number)
        return number if number < self.lanes else None

    def present(self, round_number: int) -> int:
        """How many ranks, from rank 0 on, have a lane in a round."""
        return min(self.world, self.lanes - round_number * self.world)

    def in_lane_order(self, gathered: "torch.Tensor") -> "torch.Tensor":
        """Values gathered as (rank, round, ...), reordered to (lane, ...)."""
        return gathered.transpose(0, 1).flatten(0, 1)[: self.lanes]


@dataclass(frozen=True)
class LaneSamples:
    """The samples of one rank's lanes over many steps; turn t is the t-th lane this rank reads."""

    of_rank: RankLanes
    size: int

    @property
    def global_batch(self) -> int:
        """Samples of a step, over all ranks."""
        return self.of_rank.lanes * self.size

    @property
    def per_step(self) -> int:
        """Lanes that this rank reads in each step."""
        return self.of_rank.count

    def place(self, turn: int) -> tuple[int, int]:
        """Step, counted from turn 0, and lane of a turn."""
        step, round_number = divmod(turn, self.per_step)
        return step, self.of_rank.nth(round_number)

    def samples(self, turns: NDArray[np.int64], start: int) -> NDArray[np.int64]:
        """The samples of some turns, concatenated; turn 0 belongs to the step that starts at sample ``start``."""
        step, round_number = np.divmod(turns, self.per_step)
        first = start + step * self.global_batch + self.of_rank.nth(round_number) * self.size
        samples: NDArray[np.int64] = (first[:, None] + np.arange(self.size)).ravel()
        return samples


def rank_lanes(lanes: int, world: int, rank: int) -> RankLanes:
    """The lanes of one rank, in a step that has a lane for every rank.

    Raises:
        TooManyRanks: there are more ranks than lanes.
        ValueError: the number of lanes is not a whole number above 0.
    """
    if lanes != int(lanes) or lanes < 1:
        raise ValueError(f"a step has {lanes} lanes; it needs a whole number of them, one or more")
    if world > lanes:
        raise TooManyRanks(ranks=world, lanes=lanes)
    return RankLanes(lanes, world, rank)


def cut_lanes(global_batch: int, size: int | None, rank: int, world: int) -> LaneSamples:
    """The samples of one rank's lanes; without a size, one lane for each rank.

    Raises:
        LanesUnfit: the sizes do not divide each other, or a rank would have nothing to read.
    """
    if complaint := _complaint(global_batch, size, rank, world):
        raise LanesUnfit(global_batch=global_batch, lane=size, world=world, complaint=complaint)
    size = size or global_batch // world
    return LaneSamples(RankLanes(global_batch // size, world, rank), size)


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
