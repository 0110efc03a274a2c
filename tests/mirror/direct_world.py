"""What the ranks of a world run that share no disk: each has a run directory of its own."""

import hashlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import unbroken
from tests.mirror.servers import environment


@dataclass(frozen=True)
class Alone:
    """One job; ``ports`` are those of the object store, one for each rank, none for a directory."""

    root: str
    url: str
    total: int
    ports: Sequence[int] = ()
    dies_at: int | None = None
    seed: int = 0


def train(job: Alone) -> tuple[int, str]:
    """Train a sharded model; returns the step it began at and a digest of this rank's weights."""
    rank = dist.get_rank()
    if job.ports:
        os.environ.update(environment(job.ports[rank]))
    torch.manual_seed(job.seed)
    model = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    # Its state has the shards of the weights and nothing that is the same on all ranks.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = unbroken.Settings(checkpoints=job.url, save_steps=2, audit="off", catch_signals=False, console=False)
    directory = Path(job.root) / f"host-{rank}" / "run"
    with unbroken.Run(directory, settings=settings, model=model, optimizer=optimizer) as run:
        began = run.step
        for step in run.steps(job.total):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            if step == job.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return began, weights(model)


def weights(model: nn.Module) -> str:
    """A digest of this rank's shards."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        digest.update(parameter.to_local().detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
