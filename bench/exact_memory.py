"""The most memory that a step needs above its state, on each rank: the exact sum beside stock FSDP2 and stock DDP.

Every variant has a world of its own, so that nothing of another is counted. The state is what a rank holds of weights
and moments; what is measured above it are activations, gradients, and whatever travels.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from bench.exact_variants import VARIANTS, Exact, Options, Stock
from unbroken import exact
from unbroken.testing.worlds import logs, spawn

STEPS = 3
Made = Exact | Stock


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank."""

    state: int
    above: int


def peak(options: Options, name: str) -> Peak:
    """One rank of a world that computes steps of one variant."""
    exact.pin(options.device)
    torch.manual_seed(0)
    count = _on_device if options.device == "cuda" else _on_host
    variant, highest = count(lambda: VARIANTS[name](options))
    parameters = list(variant.model.parameters())
    moments = [each for kept in variant.optimizer.state.values() for each in kept.values()]
    state = sum(_local(each).nbytes for each in (*parameters, *moments) if isinstance(each, torch.Tensor))
    return Peak(state, highest - state)


def peaks(options: Options, ranks: int) -> dict[str, tuple[Peak, ...]]:
    """Every variant's ranks; on GPUs, where gloo moves nothing, the sharded ones alone."""
    found = {}
    for name in VARIANTS:
        if options.device == "cuda" and "FSDP2" not in name:
            continue
        ended = spawn(ranks, peak, replace(options), name, timeout_seconds=600)
        if not all(each.is_good for each in ended):
            raise SystemExit(logs(ended))
        found[name] = tuple(each.value for each in ended)
    return found


def _on_host(make: Callable[[], Made]) -> tuple[Made, int]:
    """The most bytes that torch holds during the steps, as it counts them itself.

    What the system says of a process is mostly about what its allocator keeps, and is another number each time.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        made = make()
        with record_function("steps"):
            for _ in range(STEPS):
                made.step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    # Building a model makes all of it before it is cut into shards; only steps are of interest.
    begun = next(event["ts"] for event in events if event["name"] == "steps")
    return made, max(event["args"]["Total Allocated"] for event in events if _counts(event) and event["ts"] >= begun)


def _counts(event: dict[str, Any]) -> bool:
    return bool(event["name"] == "[memory]" and event["args"]["Device Type"] == 0)


def _on_device(make: Callable[[], Made]) -> tuple[Made, int]:
    made = make()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        made.step()
    return made, torch.cuda.max_memory_allocated()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
