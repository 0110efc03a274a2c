"""A tiny training inside the test's own process, for what needs no kill."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbroken import Run, Settings
from unbroken.disk import Disk
from unbroken.files import LOCAL

Body = Callable[[Run, int], None]


def model(seed: int = 0, width: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))


def adam(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def tiny(seed: int = 0, width: int = 4) -> dict[str, Any]:
    module = model(seed, width)
    return {"model": module, "optimizer": adam(module)}


def job(directory: Path, total: int, settings: Settings | None = None, body: Body | None = None, **objects: Any) -> Run:  # noqa: ANN401
    """One job to a target; the model learns from noise if there is an optimizer."""
    plain = settings or Settings(save_steps=2, audit="off", catch_signals=False)
    with Run(directory, settings=plain, **objects) as run:
        for step in run.steps(total):
            learn(objects)
            run.log(loss=1.0 / (step + 1))
            if body is not None:
                body(run, step)
    return run


def learn(objects: dict[str, Any]) -> None:
    optimizer = objects.get("optimizer")
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def bits(module: nn.Module) -> dict[str, bytes]:
    """Every tensor of a module, bit by bit."""
    return {
        name: bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()) if value.numel() else b""
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def quietly(**changes: Any) -> Settings:  # noqa: ANN401
    return Settings(**{"save_steps": 2, "audit": "off", "catch_signals": False, **changes})


@contextmanager
def disk(other: Disk) -> Iterator[None]:
    """Another disk under everything that this process does."""
    before = LOCAL.disk
    object.__setattr__(LOCAL, "disk", other)
    try:
        yield
    finally:
        object.__setattr__(LOCAL, "disk", before)
