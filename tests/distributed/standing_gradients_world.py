"""Loops of two ranks that use gradients of the step before, or drop them, in each wrapping; interrupted and whole."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import unbroken
from unbroken.store.directory import Store

TOTAL = 8


def _wrapped(how: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    if how == "fsdp2":
        fully_shard(model)
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=how == "ddp buckets")


def _backward(model: nn.Module, step: int) -> None:
    rows = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    model(rows).square().mean().backward()


def _step(loop: str, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if loop == "steps first":
        optimizer.step()
        optimizer.zero_grad()
        _backward(model, step)
        return
    if loop == "drops":
        optimizer.zero_grad()
    _backward(model, step)
    optimizer.step()


def _job(directory: Path, how: str, loop: str, stop_at: int | None = None) -> list[list[float]]:
    model = _wrapped(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    settings = unbroken.Settings(save_steps=1, keep_last_k=None, audit="off", catch_signals=False)
    with unbroken.Run(directory, settings=settings, model=model, optimizer=optimizer) as run:
        if loop == "steps first":
            _backward(model, 100)
        for step in run.steps(TOTAL):
            if step == stop_at:
                run.save(by_all=True)
                run.stop()
            _step(loop, model, optimizer, step)
    found: list[list[float]] = []
    for parameter in model.parameters():
        for each in (parameter, *optimizer.state[parameter].values()):
            whole = each.full_tensor() if isinstance(each, DTensor) else each
            found.append(whole.detach().reshape(-1).tolist())
    return found


def interrupted(directory: str, how: str, loop: str) -> dict[str, Any]:
    """Whether a run of three jobs ends as one that was not interrupted, which saves have gradients, and the notices."""
    top = Path(directory)
    whole = _job(top / "whole", how, loop)
    _job(top / "run", how, loop, stop_at=0)
    _job(top / "run", how, loop, stop_at=4)
    is_same = _job(top / "run", how, loop) == whole
    store = Store(top / "run" / "checkpoints")
    manifests = [store.read_manifest(path.parent.name) for path in store.root.glob("*/manifest.json")]
    lines = [line for path in (top / "run" / "journal").iterdir() for line in path.read_text().splitlines()]
    return {
        "is_same": is_same,
        "stored": {m.step for m in manifests if any(name.startswith("gradients.") for name in m.tensors)},
        "notices": sum("gradients" in fact.get("text", "") for fact in map(json.loads, lines)),
    }
