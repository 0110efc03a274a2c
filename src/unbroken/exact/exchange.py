"""The collectives of this package: moving bytes between ranks, never adding them.

A reduction inside a collective adds in an order of its own, which differs between world sizes. So ranks only exchange
data, and the owner of a slice adds. Gloo moves host memory only; several ranks that share one device, which NCCL does
not support, go through it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from unbroken.connection import noticing_loss

# Renamed in torch 2.13, where the older name warns.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class RankGroup:
    """The ranks that share the lanes; ``group`` is None for a single rank without a process group."""

    rank: int
    size: int
    group: "dist.ProcessGroup | None" = None

    def swap(self, received: torch.Tensor, sent: torch.Tensor) -> "Transfer":
        """Start an all-to-all: slice ``k`` of ``sent`` goes to rank ``k``; ``received`` is ordered by rank."""
        if self._is_staged(sent):
            host = torch.empty(received.shape, dtype=received.dtype)
            dist.all_to_all_single(host, sent.cpu(), group=self.group)
            received.copy_(host)
            return Transfer(None)
        return Transfer(dist.all_to_all_single(received, sent, group=self.group, async_op=True))

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> "Transfer":
        """Start an all-gather of every rank's ``part`` into ``whole``, by rank."""
        if self._is_staged(part):
            host = torch.empty(whole.shape, dtype=whole.dtype)
            _all_gather_single(host, part.cpu(), group=self.group)
            whole.copy_(host)
            return Transfer(None)
        return Transfer(_all_gather_single(whole, part, group=self.group, async_op=True))

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Every rank's ``part``, stacked by rank."""
        if self.size == 1:
            return part.unsqueeze(0)
        whole = torch.empty((self.size, *part.shape), dtype=part.dtype, device=part.device)
        self.gather(whole.view(-1), part.reshape(-1)).wait()
        return whole

    def add_up_as_stock(self, numbers: torch.Tensor) -> "Transfer":
        """Start torch's own all-reduce, in place; only for ``stock``, without exactness."""
        if self._is_staged(numbers):
            host = numbers.cpu()
            dist.all_reduce(host, group=self.group)
            numbers.copy_(host)
            return Transfer(None)
        return Transfer(dist.all_reduce(numbers, group=self.group, async_op=True))

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and dist.get_backend(self.group) == "gloo"


@dataclass(frozen=True)
class Transfer:
    """A collective in progress or complete."""

    work: "dist.Work | None"

    def wait(self) -> None:
        """Wait for it, on this thread or its stream.

        Raises:
            PeerLost: a rank is gone or does not respond.
        """
        if self.work is not None:
            with noticing_loss(dist.get_rank()):
                self.work.wait()


class StagedAllGather:
    """FSDP2's all-gather for ranks that share one GPU, through host memory; slow, for the self-test and tests.

    Has the methods of FSDP2's own, whose type is not public; ``set_custom_all_gather`` takes it, where torch has that.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A plain tensor."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather at once."""
        RankGroup(dist.get_rank(group), dist.get_world_size(group), group).gather(output_tensor, input_tensor).wait()
        return None
