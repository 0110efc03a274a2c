"""The canonical sum for a model under FSDP2 (``fully_shard``), through its custom reduce-scatter.

In place of a reduce-scatter, FSDP2 runs an all-to-all of the lane's gradients in their own dtype, and the owner of a
shard adds them in lane order into one float32 buffer, which is accumulator and ``grad`` at once. It overlaps with
backward as FSDP2's own does, and sends as many bytes.
"""

import contextlib
import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from unbroken import torch_private
from unbroken.errors import CannotFold, LaneBroken
from unbroken.exact.exchange import RankGroup
from unbroken.exact.sums import Accumulator, SumBuffers
from unbroken.torch_private import DefaultReduceScatter, ReduceScatter, param_groups, reduce_scatter_of


def shards_of(model: nn.Module) -> list[FSDPModule]:
    """The parts of a model that FSDP2 shards; none for a replicated model."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def compute_dtype_of(model: nn.Module) -> torch.dtype | None:
    """The type in which the sharded parts compute; None for that of their parameters."""
    policies = [torch_private.compute_policy(module) for module in shards_of(model)]
    return next((policy.param_dtype for policy in policies if policy.param_dtype is not None), None)


def ranks_of(parameters: Sequence[tuple[str, nn.Parameter]]) -> RankGroup:
    """The ranks that hold the shards.

    Raises:
        CannotFold: a parameter is not sharded by its rows over one mesh that all parameters share.
    """
    found: RankGroup | None = None
    for name, parameter in parameters:
        data = parameter.data
        if not isinstance(data, DTensor):
            raise CannotFold(name=name, reason="it is not sharded, and others are")
        mesh = data.device_mesh
        if mesh.ndim != 1 or tuple(data.placements) != (Shard(0),):
            placed = ", ".join(map(str, data.placements))
            raise CannotFold(name=name, reason=f"its placement is ({placed}), not (S(0)): rows over one mesh")
        group = mesh.get_group()
        if found is not None and not _are_same(group, found.group):
            raise CannotFold(name=name, reason="it is sharded over another mesh than the parameters before it")
        found = RankGroup(mesh.get_local_rank(), mesh.size(), group)
    if found is None:
        raise CannotFold(name="(none)", reason="the model has no trainable parameter")
    return found


def _are_same(one: dist.ProcessGroup, other: dist.ProcessGroup | None) -> bool:
    return other is not None and dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)


Hook = TypeVar("Hook", bound=ReduceScatter)


class HookedShards(Generic[Hook]):
    """The FSDP2 modules of a model, each with our reduce-scatter installed and set to sum only.

    Args:
        model: the model.
        make: makes the reduce-scatter of a module, given the one it would otherwise have.

    Raises:
        TorchTooOld: FSDP2 of this torch has a fixed reduce-scatter.
    """

    def __init__(self, model: nn.Module, make: Callable[[ReduceScatter], Hook]) -> None:
        self._parts: list[tuple[FSDPModule, Hook]] = []
        self._before: list[ReduceScatter] = []
        self._is_abandoned = False
        torch_private.require_custom_reduce_scatter()
        for module in shards_of(model):
            self._before.append(_without_us(module))
            hook = make(self._before[-1])
            module.set_custom_reduce_scatter(hook)
            # The division by the count of all lanes happens once, at the end.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            self._parts.append((module, hook))

    @property
    def modules(self) -> list[FSDPModule]:
        """The modules."""
        return [module for module, _ in self._parts]

    @property
    def hooks(self) -> list[Hook]:
        """The installed hooks."""
        return [hook for _, hook in self._parts]

    def begin_round(self) -> None:
        """Raise unless every module still has our reduce-scatter, and nothing is left of an interrupted step.

        Raises:
            LaneBroken: another reducer has the model; or a step was interrupted, and torch is older than 2.13, whose
                FSDP2 cannot drop it.
        """
        if not all(_asks(module, hook) for module, hook in self._parts):
            raise LaneBroken(complaint="the model belongs to another reducer; under FSDP2 it has one at a time")
        if self._is_abandoned:
            self._forget()

    def abandon(self) -> None:
        """Drop an interrupted forward or backward pass, and reshard the parameters."""
        self._is_abandoned = True
        # Reported at the start of the next step: now another error is being raised.
        with contextlib.suppress(RuntimeError, LaneBroken):
            self._forget()

    def _forget(self) -> None:
        for module in self.modules:
            if not torch_private.is_fsdp_root(module):
                continue
            if not hasattr(module, "reset_iter_state"):
                raise LaneBroken(complaint="after an error inside a lane, FSDP2 needs torch 2.13 or newer to continue")
            module.reset_iter_state()
        for parameter in (
            each for module in self.modules for group in param_groups(module) for each in group.fsdp_params
        ):
            if not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
                # Since torch 2.15 it is a view of the gradient below.
                parameter.unsharded_accumulated_grad = None
            if (whole := torch_private.unsharded_parameter(parameter)) is not None:
                whole.grad = None
        self._is_abandoned = False

    def give_back(self) -> None:
        """Restore FSDP2's own reduction, unless another reducer has the model by now."""
        for (module, hook), before in zip(self._parts, self._before, strict=True):
            if not _asks(module, hook):
                continue
            module.set_custom_reduce_scatter(before)
            module.set_gradient_divide_factor(cast("float", None))  # FSDP2's default
            module.set_force_sum_reduction_for_comms(False)
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_is_last_backward(True)
        self._parts.clear()
        self._before.clear()


class ComputeDtypeGradients:
    """Makes FSDP2 round each gradient to the dtype in which the lane computes, as autograd does in a plain model.

    Since torch 2.15 FSDP2 keeps a gradient that autograd computed in float32, such as that of a norm's weight: more
    precise, but other bits than those of the replicated model and of older versions of torch.
    """

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        groups = [group for module in modules for group in param_groups(module)]
        self._before = [
            (group, [parameter.mp_policy for parameter in group.fsdp_params])
            for group in groups
            if any(hasattr(type(parameter), "unsharded_grad_dtype") for parameter in group.fsdp_params)
        ]
        for group, policies in self._before:
            _set_policies(group, [dataclasses.replace(each, reduce_dtype=each.param_dtype) for each in policies])

    def give_back(self) -> None:
        """Restore the policies of FSDP2's own reduction."""
        for group, policies in self._before:
            _set_policies(group, policies)
        self._before = []


def _set_policies(group: Any, policies: Sequence[Any]) -> None:  # noqa: ANN401 - FSDP2's own types, not public
    for parameter, policy in zip(group.fsdp_params, policies, strict=True):
        parameter.mp_policy = policy
    torch_private.update_mixed_precision(group)


def _without_us(module: FSDPModule) -> ReduceScatter:
    """The reduce-scatter of a module without a reducer: torch's own, which has no state, or the user's."""
    for group in param_groups(module):
        asked = reduce_scatter_of(group)
        if not isinstance(asked, LaneReduceScatter | DefaultReduceScatter):
            return asked
    return DefaultReduceScatter()


def _asks(module: FSDPModule, hook: ReduceScatter) -> bool:
    return all(reduce_scatter_of(group) is hook for group in param_groups(module))


class _Round:
    """The current round, shared by the hooks of all modules."""

    present: int = 0

    def __init__(self) -> None:
        self.buffers = SumBuffers()


class LaneReduceScatter(ReduceScatter):
    """The hook of one FSDP2 module; FSDP2 calls ``allocate`` for the send buffer and the output, then the hook."""

    def __init__(self, ranks: RankGroup, round_: _Round) -> None:
        self._ranks, self._round = ranks, round_
        self._sum: Accumulator | None = None
        self._numel: int | None = None
        self._has_sent = False

    def begin_round(self, *, is_first: bool) -> None:
        """Start a round: the next ``allocate`` is for a send buffer."""
        self._has_sent = False
        if is_first:
            # Freed like any gradient: forward and backward need the memory before the next sum.
            self._sum = self._numel = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The send buffer in the lane's type, then the output in float32: a narrow wire and a wide sum."""
        self._has_sent = not self._has_sent
        if self._has_sent:
            return torch.empty(size, dtype=dtype, device=device)
        numel = math.prod(map(int, size))
        if self._numel not in (None, numel):
            raise LaneBroken(complaint="a lane has gradients for other parameters than the lanes before it")
        self._numel = numel
        if self._ranks.size == 1:
            # FSDP2 copies the gradient in here and adds it to ``grad``: with one rank that is the fold.
            return torch.empty(size, dtype=torch.float32, device=device)
        if self._sum is None:
            self._sum = Accumulator(numel, device, SumBuffers())
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
        if self._ranks.size == 1:
            # Only torch 2.9 calls it then; newer versions copy by themselves.
            output_tensor.copy_(input_tensor)
            return None
        assert self._sum is not None
        buffers = self._round.buffers
        received = buffers.take(input_tensor.numel(), input_tensor.dtype, input_tensor.device)
        self._ranks.swap(received, input_tensor).wait()
        # Only ranks with a lane: the others computed a spare one.
        for part in received.view(self._ranks.size, -1)[: self._round.present]:
            self._sum.add(part)
        buffers.give(received)
        return None


class ShardedFold:
    """The fold for parameters sharded by FSDP2."""

    # Forward and backward gather parameters: a rank that skipped them would hang the others.
    runs_spare_lanes = True

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], ranks: RankGroup) -> None:
        self._model, self._parameters, self._ranks = model, list(parameters), ranks
        self._round = _Round()
        self._held = HookedShards(model, lambda _: LaneReduceScatter(ranks, self._round))
        self._rounding = ComputeDtypeGradients(self._held.modules)
        self._used: list[bool] | None = None

    def begin_round(self, present: int, *, is_first: bool, is_last: bool) -> None:
        """A round begins in which the first ``present`` ranks have a lane."""
        self._held.begin_round()
        self._round.present = present
        for hook in self._held.hooks:
            hook.begin_round(is_first=is_first)
        if is_first:
            self._used = None
        if is_first or self._ranks.size > 1:
            # The sum so far is in the hooks; FSDP2 would add it to itself. With one rank, FSDP2 keeps it.
            for parameter in self._parameters:
                parameter.grad = None

    def end_round(self) -> None:
        """FSDP2 has waited for its reductions when backward returns.

        Raises:
            LaneBroken: this lane and those before it have gradients for different parameters.
        """
        # FSDP2 sends the gradients a lane has, one after the other: a different set of parameters would be added to the
        # wrong sums.
        used = [parameter.grad is not None for parameter in self._parameters]
        if self._used not in (None, used):
            place = next(place for place, (one, two) in enumerate(zip(self._used, used, strict=True)) if one != two)
            named = {id(parameter): name for name, parameter in self._model.named_parameters()}
            name = named.get(id(self._parameters[place]), "?")
            raise LaneBroken(
                complaint=f"some lanes use {name!r} and others do not; under FSDP2 all lanes use the same parameters"
            )
        self._used = used

    def finish(self) -> None:
        """The gradients are the accumulators of the hooks; one that no lane has is zero, as in a plain model."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def used(self) -> int:
        """If ranks used different parameters, FSDP2 would mix up their sums."""
        return zlib.crc32(bytes(self._used or ()))

    def abandon(self) -> None:
        """The first round of the next step starts new sums."""
        self._round.buffers.clear()
        self._held.abandon()

    def release(self) -> None:
        """Restore FSDP2's own reduction."""
        self._rounding.give_back()
        self._held.give_back()
