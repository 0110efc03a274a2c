"""Training speed of the model in exact mode, beside plain models that are free to be non-deterministic.

Every variant does the same work per step: forward and backward under bf16 autocast with fp32 weights, compiled;
gradients clipped; fused AdamW. Each variant lives in a process of its own, so that no setting of one reaches another;
they take turns on the device. Each is trained twice from one seed, and its weights compared bit for bit: the exact ones
to prove it, the others to show that it means something.
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import runpy
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from typing import Any

# Read when the first product runs; without it deterministic algorithms are refused.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn

from bench.gpt_peers import Gpt2Block, LlamaBlock, Plain
from bench.measure import Samples, interleaved, write_results
from unbroken import exact
from unbroken.config.presets import preset
from unbroken.config.sections import ModelConfig, OptimizerConfig
from unbroken.exact.reducer import DeferringReducer
from unbroken.gpt.build import initialize
from unbroken.gpt.loss import LossSum
from unbroken.gpt.model import GPT
from unbroken.gpt.optimizer import AdamW, make_optimizer

VOCAB = 50304
LENGTH = 2048
BATCH = {"small": 16, "large": 8}
EQUAL_STEPS = 5


@dataclass
class Variant:
    """One model with its optimizer and its way to compute a loss."""

    model: nn.Module
    loss: Callable[[Tensor], Tensor]
    is_deterministic: bool
    fresh: Callable[[], None]
    optimizer: torch.optim.Optimizer = field(init=False)

    def restart(self) -> None:
        self.fresh()
        weights = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)

    def step(self, tokens: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(self.is_deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.loss(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def ours(config: ModelConfig, *, is_exact: bool) -> Variant:
    model = GPT(config, VOCAB).cuda()
    compiled = torch.compile(model)

    def loss(tokens: Tensor) -> Tensor:
        total, count = compiled(tokens, labels=tokens)
        mean: Tensor = total / count
        return mean

    return Variant(model, loss, is_exact, lambda: initialize(model, torch.Generator().manual_seed(7)))


class Trained(Variant):
    """Ours as the trainer runs it on one rank: a lane, its sum, the norm of any sharding, clipping inside the step."""

    compiled: Callable[..., LossSum]

    def restart(self) -> None:
        self.fresh()
        pinned = exact.pin(torch.device("cuda"))
        assert pinned is not None
        self.optimizer: AdamW = make_optimizer(self.model, OptimizerConfig())
        self.reducer = DeferringReducer(self.model, self.optimizer, lanes=1, seed=7, compute_dtype=torch.bfloat16)

    def step(self, tokens: Tensor) -> Tensor:
        for lane in self.reducer.lanes(0):
            total, count = self.compiled(tokens, labels=tokens)
            lane.backward(total, count=count)
        self.reducer.clip(1.0)
        self.optimizer.scale_next(self.reducer.pending_scale)
        self.optimizer.step()
        return self.reducer.loss


def trained(config: ModelConfig) -> Variant:
    plain = ours(config, is_exact=True)
    variant = Trained(plain.model, plain.loss, True, plain.fresh)
    variant.compiled = torch.compile(plain.model)
    return variant


def gpt2_shape(config: ModelConfig) -> ModelConfig:
    """The same size with the peer's blocks: layer norm, and an MLP of four times the width without a gate."""
    return replace(config, mlp_type="mlp", activation="gelu", norm="layernorm")


def peer(config: ModelConfig, kind: type[Gpt2Block] | type[LlamaBlock]) -> Variant:
    model = Plain(config, VOCAB, kind).cuda()
    compiled = torch.compile(model)
    first = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}

    def loss(tokens: Tensor) -> Tensor:
        targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        mean: Tensor = compiled(tokens, targets)
        return mean

    return Variant(model, loss, False, lambda: model.load_state_dict(first) and None)


MAKERS: dict[str, Callable[[ModelConfig], Variant]] = {
    "peer: GPT-2 blocks": lambda config: peer(config, Gpt2Block),
    "peer: Llama blocks": lambda config: peer(config, LlamaBlock),
    "ours, SDPA, not deterministic": lambda config: ours(config, is_exact=False),
    "ours, exact": lambda config: ours(config, is_exact=True),
    "ours, exact, the trainer": trained,
    "ours, exact, the trainer, GPT-2 blocks": lambda config: trained(gpt2_shape(config)),
    "ours, exact, GPT-2 blocks": lambda config: ours(gpt2_shape(config), is_exact=True),
}


def add_peers(path: str | None) -> None:
    """Model code of other projects, which is not kept here: ``PEERS`` of a file, by name a class and its loss.

    The class takes a ``ModelConfig`` and the size of the vocabulary, the loss a model and tokens.
    """
    for name, (kind, loss) in (runpy.run_path(path)["PEERS"] if path else {}).items():
        MAKERS[f"peer: {name}"] = functools.partial(foreign, kind=kind, loss=loss)


def foreign(
    config: ModelConfig, *, kind: Callable[[ModelConfig, int], nn.Module], loss: Callable[[nn.Module, Tensor], Tensor]
) -> Variant:
    model = kind(config, VOCAB).cuda()
    compiled: Any = torch.compile(model)
    first = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    return Variant(model, lambda tokens: loss(compiled, tokens), False, lambda: model.load_state_dict(first) and None)


def batch_of(size: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (BATCH[size], LENGTH), generator=generator).cuda()


def prepared(size: str, name: str) -> tuple[Variant, dict[str, Any]]:
    """A variant that is compiled and warm, its peak memory, and whether two trainings give one set of bits."""
    begun = time.perf_counter()
    variant = MAKERS[name](preset(size).model)
    ends = []
    for _ in range(2):
        variant.restart()
        for step in range(EQUAL_STEPS):
            torch.cuda.reset_peak_memory_stats()
            loss = variant.step(batch_of(size, step))
        ends.append([p.detach().cpu() for p in variant.model.parameters()])
    facts = {
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "repeats_bit_for_bit": all(torch.equal(a, b) for a, b in zip(*ends, strict=True)),
        "loss_after_5_steps": float(loss),
        "parameters": sum(p.numel() for p in variant.model.parameters()),
        "prepared_s": round(time.perf_counter() - begun, 1),
    }
    # What the allocator keeps for itself is room that the next variant needs.
    torch.cuda.empty_cache()
    return variant, facts


def serve(size: str, name: str, steps: int, peers: str | None, room: Semaphore, link: Connection) -> None:
    """A variant's process: prepare, then run some steps whenever it is its turn."""
    add_peers(peers)
    # Small ones are prepared side by side; of the large ones the device holds two at most while they train.
    with room if size == "large" else contextlib.nullcontext():
        variant, facts = prepared(size, name)
    link.send(facts)
    batches = [batch_of(size, step) for step in range(4)]
    while link.recv():
        variant.step(batches[0])
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for step in range(steps):
            variant.step(batches[step % len(batches)])
        end.record()
        torch.cuda.synchronize()
        link.send(BATCH[size] * LENGTH * steps / (start.elapsed_time(end) / 1000))
        torch.cuda.empty_cache()


def measure(sizes: list[str], names: list[str], rounds: int, steps: int, peers: str | None) -> None:
    """One size after the other: its variants are prepared, then take turns."""
    facts: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for size in sizes:
        facts[size] = measure_size(size, names, rounds, steps, peers)
        # Kept after each size: whoever stops a long measurement has what was measured until then.
        write_results("gpt", facts)


def measure_size(size: str, names: list[str], rounds: int, steps: int, peers: str | None) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    room = context.Semaphore(2 if len(names) == 2 else 1)
    links: dict[str, Connection] = {}
    processes = []
    for name in names:
        links[name], theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(size, name, steps, peers, room, theirs), daemon=True))
        processes[-1].start()
        # Held by its process alone: when that ends, whoever waits for its word is told so.
        theirs.close()
    facts: dict[str, Any] = {}
    for name in names:
        facts[name] = links[name].recv()
        print(size, name, facts[name], flush=True)
    for name, samples in interleaved({name: turn(links[name]) for name in names}, rounds).items():
        facts[name] |= summary_of(preset(size).model, samples, facts[name]["parameters"])
        print(f"{size:6} {name:30} {facts[name]}", flush=True)
    for link, process in zip(links.values(), processes, strict=True):
        link.send(False)
        process.join()
    return facts


def turn(link: Connection) -> Callable[[], float]:
    def once() -> float:
        link.send(True)
        speed: float = link.recv()
        return speed

    return once


def summary_of(config: ModelConfig, samples: Samples, parameters: int) -> dict[str, object]:
    return {
        "tokens_per_s": round(samples.median),
        "spread": samples.spread,
        "mfu_of_989": round(samples.median * model_flops(config, parameters) / 989e12, 4),
        "samples": [round(value) for value in samples.values],
    }


def model_flops(config: ModelConfig, parameters: int) -> float:
    """Per token, forward and backward: six for each weight, and causal attention over half of the length."""
    return 6 * parameters + 6 * config.n_layer * config.n_embd * LENGTH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(BATCH), action="append")
    parser.add_argument("--only", metavar="VARIANT", action="append", help=f"one of {', '.join(MAKERS)}")
    parser.add_argument("--peers", metavar="FILE", help="model code of other projects; see add_peers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    add_peers(asked.peers)
    if unknown := set(asked.only or ()) - set(MAKERS):
        parser.error(f"no such variant: {', '.join(sorted(unknown))}; there are {', '.join(MAKERS)}")
    measure(asked.size or list(BATCH), asked.only or list(MAKERS), asked.rounds, asked.steps, asked.peers)


if __name__ == "__main__":
    main()
