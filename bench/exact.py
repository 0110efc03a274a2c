"""What the exact sum costs: whole steps of it beside stock DDP and stock FSDP2, on gloo ranks of this machine.

    python -m bench.exact [--ranks 2] [--width 256] [--layers 4] [--repeats 5]

Ratios are to the stock peer that holds the model in the same way, taken in one run, interleaved. Every variant computes
the same lanes with deterministic kernels, clips and steps the same optimizer.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.measure import Samples, interleaved, write_results
from unbroken import exact
from unbroken.amounts import plural
from unbroken.report.style import Style
from unbroken.report.table import Column, table
from unbroken.testing.worlds import logs, spawn

VOCABULARY = 2048
LENGTH = 64
BATCH = 4
SEED = 1
MAX_NORM = 1.0
PAIRS = (("exact, replicated", "DDP"), ("exact, FSDP2", "FSDP2"))


@dataclass(frozen=True)
class Options:
    """What is measured, the same on every rank."""

    width: int
    layers: int
    rounds: int
    repeats: int
    is_low: bool

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


def batch(step: int, lane: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * step + lane)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def make(options: Options, *, is_sharded: bool) -> Model:
    torch.manual_seed(0)
    model = Model(options)
    if is_sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=options.dtype))
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
        self.number = 0

    def step(self) -> None:
        for lane in self.reducer.lanes(self.number):
            lane.backward(self.model(batch(self.number, lane.number)))
        self.reducer.clip(MAX_NORM)
        self.optimizer.step()
        self.number += 1


class Stock:
    """The peers' step: gradients are kept back until the last round, as their manuals say."""

    def __init__(self, options: Options, *, is_sharded: bool) -> None:
        inner = make(options, is_sharded=is_sharded)
        self.model: nn.Module = inner if is_sharded else DistributedDataParallel(inner)
        self.optimizer = adamw(self.model.parameters())
        self.options, self.number = options, 0

    def step(self) -> None:
        rounds, size = self.options.rounds, dist.get_world_size()
        for round_number in range(rounds):
            is_last = round_number == rounds - 1
            held: object = nullcontext()
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(is_last)
                self.model.set_is_last_backward(is_last)
            elif isinstance(self.model, DistributedDataParallel) and not is_last:
                held = self.model.no_sync()
            tokens = batch(self.number, round_number * size + dist.get_rank())
            with held, torch.autocast("cpu", torch.bfloat16, enabled=self._is_autocast):  # type: ignore[attr-defined]
                (self.model(tokens) / rounds).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1

    @property
    def _is_autocast(self) -> bool:
        return self.options.is_low and isinstance(self.model, DistributedDataParallel)


def timed(step: Callable[[], None], cpu_s: list[float]) -> Callable[[], float]:
    def once() -> float:
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        step()
        dist.barrier()
        # Of all threads of this rank, those that move bytes too: what a busy machine does not distort.
        cpu_s.append(time.process_time() - cpu_began)
        return time.perf_counter() - began

    return once


@dataclass(frozen=True)
class Measured:
    """Seconds of steps by variant: by the clock, and of the processor."""

    parameters: int
    wall: dict[str, Samples]
    cpu: dict[str, Samples]


def measure(options: Options) -> Measured:
    """Every variant's steps, in turn, on every rank."""
    exact.pin("cpu")
    variants: dict[str, Exact | Stock] = {
        "DDP": Stock(options, is_sharded=False),
        "exact, replicated": Exact(options, is_sharded=False),
        "FSDP2": Stock(options, is_sharded=True),
        "exact, FSDP2": Exact(options, is_sharded=True),
    }
    cpu_s: dict[str, list[float]] = {name: [] for name in variants}
    wall = interleaved({name: timed(each.step, cpu_s[name]) for name, each in variants.items()}, options.repeats)
    numel = sum(p.numel() for p in variants["DDP"].model.parameters())
    return Measured(numel, wall, {name: Samples(tuple(values[1:])) for name, values in cpu_s.items()})


def ratio(ours: Samples, peers: Samples) -> Samples:
    """Step by step: a slow minute of a shared machine hits both."""
    return Samples(tuple(a / b for a, b in zip(ours.values, peers.values, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    rows, figures = [], {}
    for is_low in (False, True):
        for rounds in (1, 4):
            options = Options(asked.width, asked.layers, rounds, asked.repeats, is_low)
            ended = spawn(asked.ranks, measure, options, timeout_s=600)
            if not all(each.is_good for each in ended):
                raise SystemExit(logs(ended))
            found: Measured = ended[0].value
            kind = f"{'bf16' if is_low else 'fp32'}, {plural(rounds, 'lane')} a rank"
            for ours, peer in PAIRS:
                wall, cpu = ratio(found.wall[ours], found.wall[peer]), ratio(found.cpu[ours], found.cpu[peer])
                rows.append((kind, peer, f"{cpu.median:.2f}", cpu.spread, f"{wall.median:.2f}", wall.spread))
                figures[f"{kind}, {peer}"] = {
                    "stock_s": found.wall[peer].values,
                    "exact_s": found.wall[ours].values,
                    "wall_ratio": wall.median,
                    "stock_cpu_s": found.cpu[peer].values,
                    "exact_cpu_s": found.cpu[ours].values,
                    "cpu_ratio": cpu.median,
                }
    columns = [Column("lanes"), Column("peer"), Column("cpu", True), Column("spread"), Column("wall", True)]
    print(f"{found.parameters / 1e6:.1f} M parameters, {asked.ranks} ranks; exact over stock, whole steps")
    print(table([*columns, Column("spread")], rows, style=Style(False)))
    print(write_results("exact", {"parameters": found.parameters, "ranks": asked.ranks, "figures": figures}))


if __name__ == "__main__":
    main()
