"""The most memory that a step needs above its state, on each rank: the exact sum beside stock FSDP2 and stock DDP.

Every variant has a world of its own, so that nothing of another is counted. The state is what a rank holds of weights
and moments; what is measured above it are activations, gradients, and whatever travels.
"""

import ctypes
import gc
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bench.exact_variants import VARIANTS, Options
from unbroken import exact
from unbroken.testing.worlds import logs, spawn

STEPS = 3


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank."""

    state: int
    above: int


def peak(options: Options, name: str) -> Peak:
    """One rank of a world that computes steps of one variant."""
    exact.pin(options.device)
    torch.manual_seed(0)
    _settle()
    before = _held(options.device)
    variant = VARIANTS[name](options)
    _settle()
    # Building a model makes all of it before it is cut into shards; only steps are of interest.
    _reset(options.device)
    for _ in range(STEPS):
        variant.step()
    parameters = list(variant.model.parameters())
    moments = [each for kept in variant.optimizer.state.values() for each in kept.values()]
    state = sum(_local(each).nbytes for each in (*parameters, *moments) if isinstance(each, torch.Tensor))
    return Peak(state, _highest(options.device) - before - state)


def peaks(options: Options, ranks: int) -> dict[str, tuple[Peak, ...]]:
    """Every variant's ranks; on GPUs, where gloo moves nothing, the sharded ones alone."""
    found = {}
    for name in VARIANTS:
        if options.device == "cuda" and "FSDP2" not in name:
            continue
        ended = spawn(ranks, peak, replace(options), name, timeout_s=600)
        if not all(each.is_good for each in ended):
            raise SystemExit(logs(ended))
        found[name] = tuple(each.value for each in ended)
    return found


def _settle() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _held(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else _status("VmRSS")


def _highest(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _reset(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        # As the kernel is told to forget the high-water mark of this process.
        Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
