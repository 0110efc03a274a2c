"""Small odd models, drawn from a seed: fewer rows than ranks, frozen, unused and tied parameters, every type and scale;
each is called in a spawned world.
"""

import itertools
import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from unbroken import exact
from unbroken.exact.norm import scale
from unbroken.exact.reducer import DeferringReducer

LOW = (None, torch.bfloat16, torch.float16)
MOST_RANKS = 3


@dataclass(frozen=True)
class Odd:
    """What is drawn of a model and of how it is summed; nothing of it is the world's."""

    widths: tuple[int, ...]
    frozen: int
    has_unused: bool
    is_tied: bool
    dtype: torch.dtype | None
    lanes: int
    bucket_bytes: int
    defers: bool
    overflowing: int | None

    @classmethod
    def drawn(cls, seed: int) -> "Odd":
        """The case of a seed."""
        draw = random.Random(seed)
        lanes = draw.randint(MOST_RANKS, 7)
        return cls(
            widths=tuple(draw.randint(1, 5) for _ in range(draw.randint(3, 5))),
            frozen=draw.randint(0, 2),
            has_unused=draw.random() < 0.5,
            is_tied=draw.random() < 0.5,
            dtype=draw.choice(LOW),
            lanes=lanes,
            bucket_bytes=draw.choice((1, 30, 100, 1 << 20)),
            defers=draw.random() < 0.5,
            overflowing=draw.randrange(lanes) if draw.random() < 0.2 else None,
        )


class OddModel(nn.Module):
    """Layers of the drawn widths, the second perhaps used twice, and perhaps one that nobody uses."""

    def __init__(self, odd: Odd) -> None:
        super().__init__()
        torch.manual_seed(1)
        widths = odd.widths
        self.layers = nn.ModuleList(nn.Linear(one, two) for one, two in itertools.pairwise(widths))
        self.layers[odd.frozen % len(self.layers)].requires_grad_(False)
        self.unused = nn.Linear(2, 3) if odd.has_unused else None
        self.again = nn.Linear(widths[-1], widths[-1])
        self.tied = nn.Linear(widths[-1], widths[-1])
        if odd.is_tied:
            self.tied.weight = self.again.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(self.again.weight.dtype)
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        found: torch.Tensor = self.tied(torch.dropout(self.again(rows), 0.3, self.training))
        return found.float().square().sum()


def _step(odd: Odd, model: OddModel, reducer: exact.Reducer, step: int) -> list[str]:
    """One step of plain descent; the bits of losses, norm and gradients."""
    for lane in reducer.lanes(step):
        generator = torch.Generator().manual_seed(100 * step + lane.number)
        loss = model(torch.randn(2, odd.widths[0], generator=generator))
        scaled = loss * 1e9 if lane.number == odd.overflowing else loss
        lane.backward(loss, count=lane.number % 3, scaled=scaled)
    norm = reducer.clip(0.7)
    if isinstance(reducer, DeferringReducer):
        scale(reducer.gradients(), reducer.pending_scale)
    bits = [each.hex() for each in (*reducer.losses.tolist(), float(reducer.loss), float(norm))]
    for _, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            bits.append("none")
            continue
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        bits += [each.hex() for each in whole.flatten().tolist()]
        with torch.no_grad():
            parameter.sub_(torch.nan_to_num(gradient) * 0.1)
    return bits


def bits_each(seeds: tuple[int, ...], is_sharded: bool) -> list[list[str]]:
    """The bits of two steps of each seed's case, in this world."""
    found = []
    for odd in map(Odd.drawn, seeds):
        model = OddModel(odd)
        if is_sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            policy = MixedPrecisionPolicy(param_dtype=odd.dtype)
            for module in (*model.layers, model):
                fully_shard(module, mesh=mesh, mp_policy=policy)
        kind = DeferringReducer if odd.defers else exact.Reducer
        reducer = kind(
            model,
            lanes=odd.lanes,
            seed=3,
            compute_dtype=None if is_sharded else odd.dtype,
            bucket_bytes=odd.bucket_bytes,
        )
        found.append([bit for step in range(2) for bit in _step(odd, model, reducer, step)])
        reducer.close()
    return found
