"""The variants that ``bench.exact`` compares: our step and the peers', with the same lanes, model and optimizer."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from unbroken import exact

VOCABULARY = 2048
BATCH = 4
SEED = 1
MAX_NORM = 1.0


@dataclass(frozen=True)
class Options:
    """What is measured, the same on every rank."""

    width: int
    layers: int
    length: int
    rounds: int
    repeats: int
    is_low: bool
    device: str = "cpu"

    @property
    def dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.is_low else None


class Model(nn.Module):
    """A plain transformer."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width = options.width
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(options.layers)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(options: Options, step: int, lane: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * step + lane)
    return torch.randint(0, VOCABULARY, (BATCH, options.length), generator=generator).to(options.device)


def mesh_of(device: str) -> DeviceMesh:
    if device == "cpu":
        return init_device_mesh("cpu", (dist.get_world_size(),))
    torch.cuda.set_device(dist.get_rank())
    return DeviceMesh.from_group(dist.new_group(backend="nccl"), "cuda")


def make(options: Options, *, is_sharded: bool, reduce_dtype: torch.dtype | None = None) -> Model:
    torch.manual_seed(0)
    model = Model(options).to(options.device)
    if is_sharded:
        mesh = mesh_of(options.device)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(options.dtype, reduce_dtype))
    return model


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=True)


class Exact:
    """Our step."""

    def __init__(self, options: Options, *, is_sharded: bool) -> None:
        self.model = make(options, is_sharded=is_sharded)
        self.optimizer = adamw(self.model.parameters())
        self.reducer = exact.Reducer(
            self.model,
            self.optimizer,
            lanes=options.rounds * dist.get_world_size(),
            seed=SEED,
            compute_dtype=None if is_sharded else options.dtype,
        )
        self.options, self.number = options, 0

    def step(self) -> None:
        for lane in self.reducer.lanes(self.number):
            lane.backward(self.model(batch(self.options, self.number, lane.number)))
        self.reducer.clip(MAX_NORM)
        self.optimizer.step()
        self.number += 1


class Stock:
    """The peers' step, summed in float32 as ours is.

    Either gradients are kept back until the last round, which needs room for all of them unsharded; or every round is
    reduced, as ours is, and no rank ever holds them all.
    """

    def __init__(self, options: Options, *, is_sharded: bool, is_held_back: bool = True) -> None:
        inner = make(options, is_sharded=is_sharded, reduce_dtype=torch.float32 if options.is_low else None)
        self.is_held_back = is_held_back
        self.model: nn.Module = inner if is_sharded else DistributedDataParallel(inner)
        self.optimizer = adamw(self.model.parameters())
        self.options, self.number = options, 0

    def step(self) -> None:
        rounds, size = self.options.rounds, dist.get_world_size()
        for round_number in range(rounds):
            is_last = round_number == rounds - 1 or not self.is_held_back
            held: object = nullcontext()
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(is_last)
                self.model.set_is_last_backward(is_last)
            elif isinstance(self.model, DistributedDataParallel) and not is_last:
                held = self.model.no_sync()
            tokens = batch(self.options, self.number, round_number * size + dist.get_rank())
            with held, torch.autocast("cpu", torch.bfloat16, enabled=self._is_autocast):  # type: ignore[attr-defined]
                (self.model(tokens) / rounds).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1

    @property
    def _is_autocast(self) -> bool:
        return self.options.is_low and isinstance(self.model, DistributedDataParallel)


VARIANTS: dict[str, Callable[[Options], Exact | Stock]] = {
    "DDP": lambda options: Stock(options, is_sharded=False),
    "exact, replicated": lambda options: Exact(options, is_sharded=False),
    "FSDP2": lambda options: Stock(options, is_sharded=True),
    "FSDP2, every round": lambda options: Stock(options, is_sharded=True, is_held_back=False),
    "exact, FSDP2": lambda options: Exact(options, is_sharded=True),
}
PAIRS = (("exact, replicated", "DDP"), ("exact, FSDP2", "FSDP2"), ("exact, FSDP2", "FSDP2, every round"))
