"""The canonical sum of a replicated model's gradients: a left fold over the lanes, in lane order, in float32.

Every rank owns one slice of each bucket. After each round an all-to-all sends it that slice of every lane of the round,
in the lane's dtype, and it adds them in lane order into one accumulator; after the last round the slices are gathered.
With one rank this is ordinary gradient accumulation. The traffic is that of a reduce-scatter and an all-gather, the
same as an all-reduce, and overlaps with backward.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from unbroken.exact.buckets import BUCKET_BYTES, BucketFiller, GradientBucket
from unbroken.exact.exchange import RankGroup, Transfer
from unbroken.exact.sums import Accumulator, SumBuffers, put

# Buckets in flight. A fixed number, so that all ranks issue collectives in the same order whatever arrives first.
_IN_FLIGHT = 2


class Reduction(Protocol):
    """How a ``Reducer`` sums the gradients of the lanes."""

    runs_spare_lanes: bool
    """Whether a rank without a lane in the last round must compute one anyway, which is not counted."""

    def begin_round(self, present: int, *, is_first: bool, is_last: bool) -> None:
        """Start a round in which the first ``present`` ranks have a lane."""

    def end_round(self) -> None:
        """End this rank's lane of the round, if it has one."""

    def finish(self) -> None:
        """After the last round: every parameter's ``grad`` is the sum over all lanes."""

    def used(self) -> int | None:
        """A hash of the parameters this rank's lanes used, if the sums are right only when all ranks use the same.

        None if each parameter has its own place in the sums.
        """

    def abandon(self) -> None:
        """Drop an interrupted step."""

    def release(self) -> None:
        """Restore the parameters as they were before."""


@dataclass(frozen=True)
class _Flight:
    number: int
    received: torch.Tensor
    sent: torch.Tensor
    arrival: Transfer


class ReplicatedFold:
    """The fold for parameters that every rank holds whole."""

    runs_spare_lanes = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype_of: Callable[[nn.Parameter], torch.dtype],
        ranks: RankGroup,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._ranks = ranks
        self._filling = BucketFiller(parameters, dtype_of, self._put, self._full, bucket_bytes)
        self._buckets = self._filling.buckets
        self._buffers = SumBuffers()
        kept = SumBuffers()
        self._sums = [
            Accumulator(each.padded(ranks.size), each.device, kept, pieces=ranks.size, piece=ranks.rank)
            for each in self._buckets
        ]
        self._sending: dict[int, torch.Tensor] = {}
        self._flying: deque[_Flight] = deque()
        self._gathering: list[Transfer] = []
        self._present, self._is_first, self._is_last = 0, True, False

    def begin_round(self, present: int, *, is_first: bool, is_last: bool) -> None:
        """A round begins in which the first ``present`` ranks have a lane."""
        self._present, self._is_first, self._is_last = present, is_first, is_last
        for total in self._sums if is_first else ():
            total.give_up()
        self._filling.open()

    def end_round(self) -> None:
        """Send the incomplete buckets; without a lane, zeros that are not added."""
        self._filling.close()
        while self._flying:
            self._land()

    def finish(self) -> None:
        """Wait for the slices of the others; the gradients are views of the gathered buckets."""
        for arrival in self._gathering:
            arrival.wait()
        self._gathering.clear()
        self._filling.hand_out(self._sums)

    def used(self) -> None:
        """Each parameter has its place in a bucket, whether a lane uses it or not."""

    def abandon(self) -> None:
        """Drop what is in flight; the process group itself may be broken."""
        self._filling.abandon()
        self._buffers.clear()
        self._sending.clear()
        self._flying.clear()
        self._gathering.clear()
        for total in self._sums:
            total.abandon()

    def release(self) -> None:
        """Take the hooks off the parameters."""
        self.abandon()
        self._filling.release()

    def _put(self, number: int, place: int, gradient: torch.Tensor | None) -> None:
        bucket = self._buckets[number]
        if self._ranks.size == 1:
            put(bucket.view(self._sums[number].tensor, place), gradient, is_first=self._is_first)
            return
        if number not in self._sending:
            self._sending[number] = self._empty(bucket)
        room = bucket.view(self._sending[number], place)
        if gradient is None:
            room.zero_()
        else:
            room.copy_(gradient)

    def _empty(self, bucket: GradientBucket) -> torch.Tensor:
        flat = self._buffers.take(bucket.padded(self._ranks.size), bucket.dtype, bucket.device)
        flat[bucket.numel :].zero_()
        return flat

    def _full(self, number: int) -> None:
        if self._ranks.size == 1:
            return
        sent = self._sending.pop(number)
        received = self._buffers.take(sent.numel(), sent.dtype, sent.device)
        self._flying.append(_Flight(number, received, sent, self._ranks.swap(received, sent)))
        if len(self._flying) > _IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        flight = self._flying.popleft()
        flight.arrival.wait()
        total = self._sums[flight.number]
        # A rank without a lane sent zeros; adding them would turn -0.0 into +0.0.
        for part in flight.received.view(self._ranks.size, -1)[: self._present]:
            total.add(part)
        self._buffers.give(flight.sent, flight.received)
        if self._is_last:
            self._gathering.append(self._ranks.gather(total.tensor, total.mine))
