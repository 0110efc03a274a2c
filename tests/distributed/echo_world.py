"""What ranks run of which one fails inside the script's own collectives."""

import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import unbroken

FAILS_AT = 3


def fail(what: str) -> None:
    """Fail as a test asks for."""
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        raise SystemExit(3)
    raise ValueError("the label is 1001 of 1000")


def train(directory: str, what: str, victim: int, wrap: str) -> None:
    """Train until the victim fails in the backward pass of its fourth step, while the others wait for it there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    wrapped: nn.Module = DistributedDataParallel(model) if wrap == "ddp" else model
    if wrap == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    settings = unbroken.Settings(audit="off", save_steps=2)
    with unbroken.Run(directory, settings=settings, model=wrapped, optimizer=optimizer) as run:
        for step in run.steps(8):
            out = wrapped(torch.ones(2, 4))
            if step == FAILS_AT and dist.get_rank() == victim:
                out.register_hook(lambda _: fail(what))
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
