"""The opt-out: the same lanes, summed by torch's own collectives.

To measure what exactness costs, or if it is not needed. Lanes, spare lanes and RNG are the same; sums and norm are
torch's, whose order depends on the number of ranks.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from unbroken.exact.buckets import BUCKET_BYTES, BucketFiller
from unbroken.exact.exchange import RankGroup, Transfer
from unbroken.exact.sharded import HookedShards
from unbroken.exact.sums import LazyBuffer, SumBuffers, put

NOT_PROMISED: Final = (
    "stock reductions: the bits may differ with another number of ranks, between a replicated and a sharded model, and "
    "when the communication library picks another algorithm for the same ranks"
)


class ReplicatedStock:
    """Local sums of lanes on every rank, and one all-reduce during the last backward, as DDP does."""

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
        kept = SumBuffers()
        self._sums = [LazyBuffer(each.numel, each.device, kept) for each in self._filling.buckets]
        self._arrivals: list[Transfer] = []
        self._is_first, self._is_last = True, False

    def begin_round(self, present: int, *, is_first: bool, is_last: bool) -> None:
        """A round begins in which the first ``present`` ranks have a lane."""
        self._is_first, self._is_last = is_first, is_last
        for each in self._sums if is_first else ():
            each.give_up()
        self._filling.open()

    def end_round(self) -> None:
        """Missing gradients count as zero."""
        self._filling.close()

    def finish(self) -> None:
        """Wait for the sums over all ranks."""
        for arrival in self._arrivals:
            arrival.wait()
        self._arrivals.clear()
        self._filling.hand_out(self._sums)

    def used(self) -> None:
        """Each parameter has its place in a bucket, whether a lane uses it or not."""

    def abandon(self) -> None:
        """Drop what is in flight."""
        self._filling.abandon()
        self._arrivals.clear()
        for each in self._sums:
            each.abandon()

    def release(self) -> None:
        """Take the hooks off the parameters."""
        self.abandon()
        self._filling.release()

    def _put(self, number: int, place: int, gradient: torch.Tensor | None) -> None:
        total = self._filling.buckets[number].view(self._sums[number].tensor, place)
        put(total, gradient, is_first=self._is_first)

    def _full(self, number: int) -> None:
        if self._is_last and self._ranks.size > 1:
            self._arrivals.append(self._ranks.add_up_as_stock(self._sums[number].tensor))


class ShardedStock:
    """FSDP2's own reduce-scatter, once a step."""

    runs_spare_lanes = True

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._held = HookedShards(model, lambda before: before)
        self._parameters = list(parameters)

    def begin_round(self, present: int, *, is_first: bool, is_last: bool) -> None:
        """Start a round; only the last one communicates."""
        self._held.begin_round()
        for parameter in self._parameters if is_first else ():
            parameter.grad = None
        for module in self._held.modules:
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_is_last_backward(is_last)

    def end_round(self) -> None:
        """FSDP2 keeps the sum of this rank's lanes."""

    def finish(self) -> None:
        """FSDP2 has put the sums into the gradients."""

    def used(self) -> None:
        """Not checked."""

    def abandon(self) -> None:
        """Drop the sum that FSDP2 has kept."""
        self._held.abandon()

    def release(self) -> None:
        """Restore FSDP2's own division."""
        self._held.give_back()


def stock_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Torch's own norm of all gradients together. Collective where they are sharded."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).double()
