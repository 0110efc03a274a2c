"""Small trainings that call ``dcp.save`` and ``dcp.load`` themselves, each described by a dict."""

import contextlib
import hashlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from unbroken.frameworks import dcp as unbroken_dcp

# Once, before the forks: an optimizer imports much when it is made.
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])

SAMPLES = 8
WIDTH = 32


class Training:
    """Model and optimizer as one ``Stateful``, as torch's own recipe has it."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )
        if dist.is_initialized():
            for layer in (self.model[0], self.model[2]):
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, step: int) -> torch.Tensor:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        made = torch.Generator().manual_seed(step)
        batch = torch.randn(SAMPLES, WIDTH, generator=made)[rank::size]
        loss: torch.Tensor = (self.model(batch) - batch).square().mean()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def digest(self) -> str:
        """All weights and moments, gathered."""
        found = hashlib.sha256()
        for name, value in sorted(_flat("", self.state_dict())):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            shown = whole.numpy().tobytes() if isinstance(whole, torch.Tensor) else repr(whole).encode()
            found.update(name.encode() + shown)
        return found.hexdigest()


def _flat(at: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{at}.{key}", inner)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _flat(f"{at}.{place}", inner)
    else:
        yield at, value


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    if "RANK" not in os.environ:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(job: dict[str, Any]) -> None:
    """Do one job. ``plain``: without unbroken. ``result``: where its end is written."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with process_group():
        found = plain(job) if job.get("plain") else ours(job)
        if int(os.environ.get("RANK", "0")) == 0:
            Path(job["result"]).write_text(json.dumps(found))


def plain(job: dict[str, Any]) -> dict[str, Any]:
    """As torch's own documentation has it: one folder per step, and the newest is loaded."""
    training, first = Training(), 0
    folders = sorted(Path(job["directory"]).glob("step-*"), key=lambda each: int(each.name[5:]))
    if folders:
        first = int(folders[-1].name[5:])
        dcp.load({"training": training}, checkpoint_id=folders[-1])
    began = training.digest()
    for step in range(first + 1, job.get("steps", 12) + 1):
        training.step(step)
        if step % 4 == 0:
            if job.get("torn") == step:
                die_while_writing()
            dcp.save({"training": training}, checkpoint_id=Path(job["directory"], f"step-{step}"))
    return {"digest": training.digest(), "began": began, "first": first}


def die_while_writing() -> None:
    """SIGKILL once the first file has some bytes."""
    real_save = torch.save

    def torch_save(value: object, path: Any, *rest: Any, **more: Any) -> None:  # noqa: ANN401
        real_save(value, path, *rest, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(torch, "save", torch_save)  # noqa: B010 - typed otherwise


def ours(job: dict[str, Any]) -> dict[str, Any]:
    """With unbroken: the same training in its writer and its reader."""
    training = Training()
    options = {"save_steps": 4, "keep_last_k": 2, **job.get("options", {})}
    with unbroken_dcp.Checkpoints(job["directory"], **options) as checkpoints:
        if checkpoints.path:
            dcp.load({"training": training}, storage_reader=checkpoints.reader())
        began, first, saving = training.digest(), checkpoints.step, None
        for step in range(first + 1, job.get("steps", 12) + 1):
            loss = training.step(step)
            if step in job.get("signals", {}).values():
                os.kill(os.getpid(), getattr(signal, next(iter(job["signals"]))))
            if checkpoints.step_done(step, loss=loss if not dist.is_initialized() else float(step)):
                state = {"training": training}
                if job.get("in_background"):
                    saving = dcp.async_save(state, storage_writer=checkpoints.writer(step))
                else:
                    dcp.save(state, storage_writer=checkpoints.writer(step))
            if saving is not None and step % 2 == 0:
                wait: Any = saving
                wait.result()
                saving = None
            if checkpoints.is_stopping:
                break
        is_stopping, step = checkpoints.is_stopping, checkpoints.step
    return {"digest": training.digest(), "began": began, "first": first, "step": step, "is_stopping": is_stopping}


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
