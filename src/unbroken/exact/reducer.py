"""``Reducer``: gradients with the same bits on any number of ranks, for any training loop.

It distributes the lanes of each step over the ranks, seeds the RNG of every lane, sums gradients, losses and counts in
lane order, and clips by a norm that does not depend on the sharding. After the loop over ``lanes``, every parameter's
``grad`` is that of the whole step on every rank.
"""

import os
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from unbroken.data.lanes import rank_lanes
from unbroken.errors import ArithmeticDiffers, CannotFold, LaneBroken, NoProcessGroup
from unbroken.exact.buckets import BUCKET_BYTES
from unbroken.exact.exchange import RankGroup
from unbroken.exact.lane_rng import LaneRng
from unbroken.exact.norm import clip_factor, fold, gradient_norm, scale
from unbroken.exact.precision import Lowered
from unbroken.exact.reduction import Reduction, ReplicatedFold
from unbroken.exact.self_tested import require_exact
from unbroken.exact.sharded import ShardedFold, compute_dtype_of, ranks_of, shards_of
from unbroken.exact.stock import NOT_PROMISED, ReplicatedStock, ShardedStock, stock_norm
from unbroken.quoting.log import logger

_log = logger(__name__)

_SUMMING = (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel, FullyShardedDataParallel)


class Lane:
    """One micro-batch of the step.

    Attributes:
        number: its index in the step; its data must depend on this and the step, never on the rank.
        is_spare: this rank has no lane in the last round and repeats its previous lane, because the collectives of the
            others need it; the result is not counted.
    """

    def __init__(self, number: int, *, is_spare: bool, is_silenced: bool, needs_scale: bool) -> None:
        self.number, self.is_spare = number, is_spare
        self._is_silenced, self._needs_scale = is_silenced, needs_scale
        self._has_begun = False
        self._result: tuple[torch.Tensor, int | torch.Tensor] | None = None

    def backward(
        self, loss: torch.Tensor, *, count: int | torch.Tensor = 1, scaled: torch.Tensor | None = None
    ) -> None:
        """Compute the lane's gradients.

        Args:
            loss: a scalar. With ``count``, a sum over that many elements, such as unmasked tokens: losses and gradients
                are divided by the count of all lanes. Without, a mean; all lanes have equal weight.
            count: the number of elements in the sum; a tensor does not cause a synchronisation.
            scaled: the scaled loss to differentiate, ``scaler.scale(loss)``. Required in float16.

        Raises:
            LaneBroken: called twice in this lane, or ``scaled`` is missing in float16.
        """
        if self._needs_scale and scaled is None:
            raise LaneBroken(
                complaint="a lane in float16 needs scaled=scaler.scale(loss): small gradients would silently "
                "become zero (pass scaled=loss to train without a loss scale)"
            )
        if self._has_begun:
            raise LaneBroken(complaint=f"lane {self.number} called backward twice; a lane is one micro-batch")
        self._has_begun = True
        goal = loss if scaled is None else scaled
        (goal * 0.0 if self._is_silenced else goal).backward()  # type: ignore[no-untyped-call]
        # Last, so that a lane whose error the loop caught does not count as computed.
        self._result = (loss.detach(), count)


class Reducer:
    """Sums the lanes of each step, with the same bits on any world size.

    Args:
        model: the module itself, not wrapped in DDP; plain on every rank, or under ``fully_shard``. All ranks must
            start with the same parameters.
        optimizer: checked, if given: its arithmetic must not depend on the sharding.
        lanes: micro-batches of a step over all ranks; fixed for the whole run.
        seed: the seed of the RNG of all lanes.
        compute_dtype: for a plain model, the dtype in which lanes compute; the parameters stay float32. For a model
            under ``fully_shard``, set it in its ``MixedPrecisionPolicy``.
        stock: opt out of exactness: torch's own sums and norm. Bits then depend on the number of ranks, on the sharding
            and on the communication library.
        bucket_bytes: for a plain model, the size of a communication bucket.

    Raises:
        TooManyRanks: there are more ranks than lanes.
        CannotFold: a parameter, the model or the optimizer is not supported.
        NoProcessGroup: the launcher says that there are several ranks and no process group was initialised.
        NotExactHere: the self-test of ``exact.pin`` found other bits for this layout and precision.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        lanes: int,
        seed: int,
        compute_dtype: torch.dtype | None = None,
        stock: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        _require_foldable(model, named, optimizer, compute_dtype)
        self._parameters = [parameter for _, parameter in named]
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._is_sharded = bool(shards_of(model))
        self._ranks = ranks_of(named) if self._is_sharded else _all_ranks()
        self._plan = rank_lanes(lanes, self._ranks.size, self._ranks.rank)
        self._seed, self._is_stock = seed, stock
        self._dtype = compute_dtype_of(model) if self._is_sharded else compute_dtype
        if not stock:
            layout = "sharded" if self._is_sharded else "replicated"
            require_exact(layout, self._dtype, self._parameters[0].device)
        self._precision = Lowered(list(model.parameters()), compute_dtype)
        self._reduction = self._make_reduction(model, bucket_bytes)
        self._open: Callable[[], Generator[Lane, None, None] | None] = lambda: None
        self._is_closed = False
        self._are_alike = False
        self._losses: torch.Tensor | None = None
        self._count: torch.Tensor | None = None
        self._pending_scale: torch.Tensor | None = None
        if stock and self._ranks.rank == 0:
            _log.warning("not exact: %s", NOT_PROMISED)

    def _make_reduction(self, model: nn.Module, bucket_bytes: int) -> Reduction:
        if self._is_sharded:
            if self._is_stock:
                return ShardedStock(model, self._parameters)
            return ShardedFold(model, self._parameters, self._ranks)
        kind = ReplicatedStock if self._is_stock else ReplicatedFold
        return kind(self._parameters, self._precision.dtype_of, self._ranks, bucket_bytes=bucket_bytes)

    # ---- a step ----

    def lanes(self, step: int) -> Iterator[Lane]:
        """Iterate over the lanes of a step that this rank computes. Collective.

        Inside a lane the global RNGs are the lane's own, and a plain model computes in ``compute_dtype``. After the
        loop, gradients, ``loss`` and ``count`` are those of all lanes.

        Raises:
            LaneBroken: a lane ended without ``backward``, or the reducer was closed or replaced.
        """
        self._require_in_charge()
        if (left_open := self._open()) is not None:
            # An error left it; while its traceback is alive, parameters and RNGs are not restored.
            left_open.close()
        lanes = self._lanes(step)
        self._open = weakref.ref(lanes)
        return lanes

    def _require_in_charge(self) -> None:
        if self._is_closed:
            raise LaneBroken(complaint="the reducer is closed")
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise LaneBroken(
                    complaint=f"{name!r} was frozen when the reducer was made and is trainable now: make a new reducer"
                )

    def _lanes(self, step: int) -> Generator[Lane, None, None]:
        self._losses = self._count = self._pending_scale = None
        done: list[Lane] = []
        try:
            with self._precision.lowered(), LaneRng(self._seed, step) as rng:
                for parameter in self._parameters:
                    parameter.grad = None
                for round_number in range(self._plan.rounds):
                    yield from self._round(round_number, rng, done)
            self._reduction.finish()
            self._fold_results([lane for lane in done if not lane.is_spare])
        except BaseException:
            self._reduction.abandon()
            raise
        self._multiply(1.0 / self.count.clamp(min=1))

    def _multiply(self, factor: torch.Tensor) -> None:
        scale(self.gradients(), factor)

    def _round(self, number: int, rng: LaneRng, done: list[Lane]) -> Iterator[Lane]:
        plan, is_last = self._plan, number == self._plan.rounds - 1
        self._reduction.begin_round(plan.present(number), is_first=number == 0, is_last=is_last)
        mine = plan.lane(number)
        if mine is not None or self._reduction.runs_spare_lanes:
            is_spare = mine is None
            # The lane of the previous round: its data is in memory.
            at = mine if mine is not None else plan.nth(number - 1)
            is_silenced, needs_scale = is_spare and self._is_stock, self._dtype is torch.float16
            lane = Lane(at, is_spare=is_spare, is_silenced=is_silenced, needs_scale=needs_scale)
            rng.enter(at)
            yield lane
            if lane._result is None:
                raise LaneBroken(complaint=f"lane {at} ended without lane.backward(loss)")
            done.append(lane)
        self._reduction.end_round()

    def _fold_results(self, done: list[Lane]) -> None:
        """Losses and counts of all lanes, in lane order, on every rank."""
        device = self._parameters[0].device
        used = self._reduction.used()
        mine = torch.zeros((self._plan.rounds, 3), dtype=torch.float64, device=device)
        mine[:, 2] = used or 0
        for row, lane in zip(mine, done, strict=False):
            assert lane._result is not None
            loss, count = lane._result
            row[0] = loss.double()
            row[1] = count
        said = self._plan.in_lane_order(self._ranks.gathered(mine))
        if used is not None:
            self._require_alike(said[:, 2])
        self._losses = said[:, 0]
        self._count = fold(said[:, 1])

    def _require_alike(self, used: torch.Tensor) -> None:
        if used.is_cuda and self._are_alike:
            return  # checking synchronises with the device: done once
        if not bool((used == used[0]).all()):
            raise LaneBroken(
                complaint="lanes of different ranks use different parameters; under FSDP2 all must use the same"
            )
        self._are_alike = True

    # ---- results ----

    @property
    def losses(self) -> torch.Tensor:
        """The loss of every lane, in lane order, in float64; the same on every rank."""
        if self._losses is None:
            raise LaneBroken(complaint="the step's lanes are not all computed yet")
        return self._losses

    @property
    def count(self) -> torch.Tensor:
        """The count of all lanes together: the number of lanes, or the sum of the ``count`` arguments."""
        if self._count is None:
            raise LaneBroken(complaint="the step's lanes are not all computed yet")
        return self._count

    @property
    def loss(self) -> torch.Tensor:
        """The loss of the step: the sum over all lanes, divided by their count."""
        return fold(self.losses) / self.count.clamp(min=1)

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of the trainable parameters, in the model's order; shards where those are sharded."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def norm(self) -> torch.Tensor:
        """The 2-norm of all gradients together. Collective where they are sharded.

        Raises:
            LaneBroken: there are no gradients.
        """
        gradients = self.gradients()
        if not gradients:
            raise LaneBroken(complaint="there are no gradients yet: compute the lanes of a step first")
        norm = stock_norm(gradients) if self._is_stock else gradient_norm(gradients, self._ranks)
        return norm if self._pending_scale is None else norm * self._pending_scale

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm is at most ``max_norm``; returns what it was. Collective.

        Raises:
            ValueError: ``max_norm`` is not above 0.
            LaneBroken: there are no gradients.
        """
        # Written as "not above", so that NaN is rejected too.
        if not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, is {max_norm}")
        norm = self.norm()
        self._multiply(clip_factor(norm, max_norm))
        return norm

    def computing(self) -> AbstractContextManager[None]:
        """Compute outside the lanes in the dtype of the lanes, as an evaluation does."""
        return self._precision.lowered()

    def close(self) -> None:
        """Remove the hooks from the model; the reducer cannot be used afterwards.

        Without it the reducer lives as long as the model.
        """
        if (left_open := self._open()) is not None:
            left_open.close()
        self._reduction.release()
        self._is_closed = True

    # ---- state ----

    @property
    def is_exact_on_any_world(self) -> bool:
        """Whether its steps have the same bits on any number of ranks; False with ``stock``."""
        return not self._is_stock

    def state_dict(self) -> dict[str, Any]:
        """What the bits depend on; register the reducer with ``Run``, and a change is an error at resume."""
        return {
            "lanes": self._plan.lanes,
            "seed": self._seed,
            "compute_dtype": str(self._dtype or torch.float32).removeprefix("torch."),
            "reduction": "stock" if self._is_stock else "fold",
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise unless the checkpoint has the same lanes, seed, dtype and reduction.

        Raises:
            ArithmeticDiffers: they differ; each difference is named.
        """
        here = self.state_dict()
        differences = tuple((key, str(state.get(key)), str(here[key])) for key in here if state.get(key) != here[key])
        if differences:
            raise ArithmeticDiffers(differences=differences)


class DeferringReducer(Reducer):
    """Leaves the gradients as sums, for an optimizer that multiplies them by ``pending_scale`` as it reads them.

    Saves a pass over all gradients. Not public: a loop that forgets the factor trains with wrong gradients.
    """

    @property
    def pending_scale(self) -> torch.Tensor:
        """The factor of this step's gradients: one over the count, times that of ``clip``."""
        if self._pending_scale is None:
            raise LaneBroken(complaint="the step's lanes are not all computed yet")
        return self._pending_scale

    def _multiply(self, factor: torch.Tensor) -> None:
        self._pending_scale = factor if self._pending_scale is None else self._pending_scale * factor


def _all_ranks() -> RankGroup:
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise NoProcessGroup(world_size=int(os.environ["WORLD_SIZE"]))
        return RankGroup(0, 1)
    return RankGroup(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def _require_foldable(
    model: nn.Module,
    named: list[tuple[str, nn.Parameter]],
    optimizer: torch.optim.Optimizer | None,
    compute_dtype: torch.dtype | None,
) -> None:
    for module in model.modules():
        if isinstance(module, _SUMMING):
            raise CannotFold(name=type(module).__name__, reason="it sums gradients itself; pass the module inside it")
    if not named:
        raise CannotFold(name=type(model).__name__, reason="it has no trainable parameter")
    if compute_dtype is not None and shards_of(model):
        raise CannotFold(
            name="compute_dtype", reason="for a sharded model, set it in the MixedPrecisionPolicy of fully_shard"
        )
    for name, parameter in named:
        if parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise CannotFold(name=name, reason=f"it is kept in {dtype}; keep float32 and compute in a lower precision")
        if isinstance(parameter.data, DTensor) and not shards_of(model):
            raise CannotFold(name=name, reason="it is a DTensor, but no part of the model is under fully_shard")
    for group in optimizer.param_groups if optimizer is not None else ():
        if group.get("fused") and any(not parameter.is_cuda for parameter in group["params"]):
            raise CannotFold(
                name=type(optimizer).__name__,
                reason="fused=True on the CPU rounds by an element's position in its shard; use foreach=True",
            )
