"""The canonical sum for a model under FSDP2 (``fully_shard``), through its custom reduce-scatter.

In place of a reduce-scatter, FSDP2 runs an all-to-all of the lane's gradients in their own type, and the owner of a
shard adds them in lane order into one float32 buffer, which is accumulator and ``grad`` at once. It runs where FSDP2
runs its own, beside backward, and sends as many bytes.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter  # the hook's type; it has no public name
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, Shard

from unbroken.errors import CannotFold, LaneBroken
from unbroken.exact.buffers import Buffers
from unbroken.exact.exchange import Ranks
from unbroken.exact.sums import Accumulator


def shards_of(model: nn.Module) -> list[FSDPModule]:
    """The parts of a model that FSDP2 shards; none for a replicated model."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def compute_dtype_of(model: nn.Module) -> torch.dtype | None:
    """The type in which the sharded parts compute; None for that of their parameters."""
    # FSDP2 tells its policy to nobody.
    policies = [module._get_fsdp_state()._mp_policy for module in shards_of(model)]
    return next((policy.param_dtype for policy in policies if policy.param_dtype is not None), None)


def ranks_of(parameters: Sequence[tuple[str, nn.Parameter]]) -> Ranks:
    """The ranks that hold the shards.

    Raises:
        CannotFold: a parameter is not sharded by its rows over one mesh that all parameters share.
    """
    found: Ranks | None = None
    for name, parameter in parameters:
        data = parameter.data
        if not isinstance(data, DTensor):
            raise CannotFold(name=name, reason="it is not sharded, and others are")
        mesh = data.device_mesh
        if mesh.ndim != 1 or tuple(data.placements) != (Shard(0),):
            placed = ", ".join(map(str, data.placements))
            raise CannotFold(name=name, reason=f"it is placed as ({placed}); the fold takes rows over one mesh: (S(0))")
        group = mesh.get_group()
        if found is not None and not _are_same(group, found.group):
            raise CannotFold(name=name, reason="it is sharded over another mesh than the parameters before it")
        found = Ranks(mesh.get_local_rank(), mesh.size(), group)
    if found is None:
        raise CannotFold(name="(none)", reason="the model has no trainable parameter")
    return found


def _are_same(one: dist.ProcessGroup, other: dist.ProcessGroup | None) -> bool:
    return other is not None and dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)


def give_back(shards: Sequence[FSDPModule]) -> None:
    """Let FSDP2 sum and divide the gradients of these as it does unasked."""
    for module in shards:
        module.set_custom_reduce_scatter(DefaultReduceScatter())
        module.set_gradient_divide_factor(cast("float", None))  # as FSDP2 has it before anybody sets one
        module.set_force_sum_reduction_for_comms(False)
        module.set_requires_gradient_sync(True, recurse=False)


class _Round:
    """What the hooks of all shards know of the round that is being computed."""

    present: int = 0

    def __init__(self) -> None:
        self.buffers = Buffers()


class LaneReduceScatter(ReduceScatter):
    """The hook of one FSDP2 module: it is asked for the send buffer, then for the output, then to run."""

    def __init__(self, ranks: Ranks, round_: _Round) -> None:
        self._ranks, self._round = ranks, round_
        self._sum: Accumulator | None = None
        self._has_sent = False

    def begin_round(self, *, is_first: bool) -> None:
        """The next buffer that is asked for is a send buffer."""
        self._has_sent = False
        if is_first:
            # Freed like any gradient: forward and backward need the memory before the next sum does.
            self._sum = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The send buffer in the lane's type, then the output in float32: a narrow wire and a wide sum."""
        self._has_sent = not self._has_sent
        if self._has_sent:
            return torch.empty(size, dtype=dtype, device=device)
        if self._ranks.size == 1:
            # FSDP2 copies the gradient in here by itself and adds it to ``grad``: with one rank that is the fold.
            return torch.empty(size, dtype=torch.float32, device=device)
        numel = math.prod(map(int, size))
        if self._sum is None:
            self._sum = Accumulator(numel, device, Buffers())
        if self._sum.numel != numel:
            raise LaneBroken(complaint="a lane has gradients for other parameters than the lanes before it")
        return self._sum.tensor

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Swap slices and add those of this round's lanes, in lane order."""
        assert self._sum is not None
        buffers = self._round.buffers
        received = buffers.take(input_tensor.numel(), input_tensor.dtype, input_tensor.device)
        self._ranks.swap(received, input_tensor).wait()
        # Only ranks that have a lane: the others computed a spare one.
        for part in received.view(self._ranks.size, -1)[: self._round.present]:
            self._sum.add(part)
        buffers.give(received)
        return None


class ShardedFold:
    """The fold for parameters sharded by FSDP2."""

    # Forward and backward gather parameters: a rank that stayed away would let the others wait for ever.
    runs_spare_lanes = True

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
        self._parameters, self._ranks = list(parameters), ranks
        self._round = _Round()
        self._shards = shards_of(model)
        self._hooks: list[LaneReduceScatter] = []
        for module in self._shards:
            hook = LaneReduceScatter(ranks, self._round)
            module.set_custom_reduce_scatter(hook)
            # Nothing but a sum: the division by the count of all lanes comes once, at the end.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            self._hooks.append(hook)

    def begin_round(self, present: int, *, is_first: bool, is_last: bool) -> None:
        """A round begins in which the first ``present`` ranks have a lane."""
        self._round.present = present
        for hook in self._hooks:
            hook.begin_round(is_first=is_first)
        if is_first or self._ranks.size > 1:
            # The sum so far is in the hooks; FSDP2 would add it to itself. With one rank, FSDP2 keeps it.
            for parameter in self._parameters:
                parameter.grad = None

    def end_round(self) -> None:
        """FSDP2 has waited for its reductions when backward returns."""

    def finish(self) -> None:
        """The gradients are the hooks' accumulators already."""

    def abandon(self) -> None:
        """The next step's first round begins with new sums."""
        self._round.buffers.clear()

    def release(self) -> None:
        """Let FSDP2 reduce as it does by itself."""
        give_back(self._shards)
        self._hooks.clear()
