"""Loops of two ranks that are left early, by all ranks or by one, and one whose optimizer steps every third step."""

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import unbroken
from unbroken.errors import UnbrokenError

QUIET = unbroken.Settings(save_steps=None, audit="off", catch_signals=False)


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _sharded_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 3), 1.0 + dist.get_rank())).square().mean().backward()
    optimizer.step()


def leave(directory: str, leavers: tuple[int, ...]) -> tuple[str, int]:
    """Five steps, then some ranks break; how it ended, and at which step."""
    model, optimizer = _model()
    run = unbroken.Run(directory, settings=QUIET, model=model, optimizer=optimizer)
    try:
        with run:
            for step in run.steps(20):
                _step(model, optimizer)
                if step == 4 and dist.get_rank() in leavers:
                    break
    except UnbrokenError as refused:
        cause = getattr(refused, "cause", refused)
        return cause.kind, run.step
    return "left", run.step


def finish_on_one(directory: str) -> int:
    """One rank alone finishes the run; the step at which all end."""
    model, optimizer = _model()
    with unbroken.Run(directory, settings=QUIET, model=model, optimizer=optimizer) as run:
        for step in run.steps(20):
            _step(model, optimizer)
            if step == 4 and dist.get_rank() == 1:
                run.finish("converged")
    return run.step


def accumulate(directory: str, how: str, stop_at: int | None) -> list[float]:
    """One step per micro-batch, gradients reduced at every third: the weights."""
    model, optimizer = _model() if how == "ddp" else _sharded_model()
    with unbroken.Run(directory, settings=QUIET, model=model, optimizer=optimizer) as run:
        for step in run.steps(30):
            if step == stop_at:
                run.save(by_all=True)
                run.stop()
            is_last = step % 3 == 2
            noise = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            if isinstance(model, FSDPModule):
                # Its parameters show no gradient until all have been reduced.
                model.set_requires_gradient_sync(is_last)
            with model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else nullcontext():
                model(noise).square().mean().backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    weight = next(model.parameters()).detach()
    return [float(value) for value in (weight.full_tensor() if isinstance(weight, DTensor) else weight).reshape(-1)]


def newest(directory: str) -> Path:
    """The newest checkpoint of a run."""
    return Path(directory) / "checkpoints" / "latest"
