"""FSDP2's all-gather for ranks that share one GPU: gloo moves host memory only, and NCCL refuses a shared device.

Slow, for tests. Needs a torch whose FSDP2 has ``set_custom_all_gather``.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from unbroken.exact.exchange import RankGroup


class StagedAllGather:
    """Gathers through host memory; has the methods of FSDP2's own all-gather, whose type is not public."""

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
