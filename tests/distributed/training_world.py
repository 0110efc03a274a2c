"""What the ranks of the tests' worlds run: a small training with everything in it that a resume could lose."""

import hashlib
import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import unbroken
from unbroken.errors import LeaseLost, NoRoom
from unbroken.loop import emergency
from unbroken.state import destination as saving
from unbroken.state import payload
from unbroken.state.items import make_items
from unbroken.state.naming import is_flat_sharded
from unbroken.state.stage import Buffers, Staged
from unbroken.store import capacity
from unbroken.store.commit import Draft, PartWriter
from unbroken.store.directory import Store

WIDTH = 13


@dataclass(frozen=True)
class Job:
    """One job of a run; the same on every rank but for what happens to the rank that is named."""

    directory: str
    wrap: str = "ddp"
    total: int = 8
    is_alike: bool = False
    save_steps: int | None = 2
    accept: tuple[str, ...] = ()
    victims: tuple[int, ...] = ()
    at_step: int | None = None
    what: str = ""
    pause_s: float = 0.0
    has_data: bool = True
    is_dropping: bool = True
    logging_steps: int = 1
    has_average: bool = True
    has_norm: bool = True
    odd_rank: int | None = None
    emergency_dir: str | None = None
    persistent_dir: str | None = None
    grace_seconds: float | None = None
    host: str | None = None
    ahead_s: float = 0.0


class Plain(nn.Module):
    """Odd widths, so that shards are uneven; a layer whose author called it ``module``."""

    def __init__(self, *, is_dropping: bool, has_norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.module = nn.BatchNorm1d(WIDTH) if has_norm else nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.25 if is_dropping else 0.0)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.module(self.first(x)))))  # type: ignore[no-any-return]


class Numbered(Dataset[torch.Tensor]):
    """Rows that can be told apart."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(8.0) * (index + 1))


class Average:
    """A user's own object over the model's parameters, sharded as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = [p.detach().clone() for p in model.parameters()]
        self.best = float("inf")
        self.note: object = None

    def update(self, model: nn.Module, loss: float) -> None:
        with torch.no_grad():
            for kept, p in zip(self.kept, model.parameters(), strict=True):
                kept.mul_(0.9).add_(p.detach(), alpha=0.1)
        self.best = min(self.best, loss)

    def state_dict(self) -> dict[str, Any]:
        if self.note == "raise":
            raise ZeroDivisionError("an error of the user's own")
        return {"kept": self.kept, "best": self.best, "note": self.note}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for mine, theirs in zip(self.kept, state["kept"], strict=True):
            mine.copy_(theirs)
        self.best = state["best"]


def wrapped(wrap: str, *, is_dropping: bool = True, has_norm: bool = True) -> nn.Module:
    """The same weights on every rank, wrapped as a test asks for."""
    torch.manual_seed(7)
    # Statistics over a batch need the replicas of DDP to mean anything.
    model: Any = Plain(is_dropping=is_dropping, has_norm=has_norm and "ddp" in wrap)
    size = dist.get_world_size()
    if wrap == "compile-ddp":
        return DistributedDataParallel(torch.compile(model, backend="eager"))
    if wrap == "ddp-compile":
        return torch.compile(DistributedDataParallel(model), backend="eager")  # type: ignore[return-value]
    if wrap == "ddp":
        # Buckets that stay as they are: else three ranks do not sum alike in the first step and in later ones.
        return DistributedDataParallel(model, find_unused_parameters=True)
    if wrap == "ddp-rebucketed":
        return DistributedDataParallel(model)
    if wrap in ("fsdp", "fsdp-compile"):
        mesh = init_device_mesh("cpu", (size,))
        if wrap == "fsdp-compile":
            model.first.compile(backend="eager")
            model = torch.compile(model, backend="eager")
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return cast("nn.Module", model)
    if wrap == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if wrap == "tp":
        mesh = init_device_mesh("cpu", (size,))
        plan: dict[str, ParallelStyle] = {
            "first": ColwiseParallel(output_layouts=Replicate()),
            "last": RowwiseParallel(input_layouts=Replicate()),
        }
        return parallelize_module(model, mesh, plan)
    return cast("nn.Module", model)


def seed(rank: int) -> None:
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)


def digest(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    data = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(f"{whole.dtype}{tuple(whole.shape)}".encode() + data, digest_size=8).hexdigest()


def weights(model: nn.Module) -> dict[str, str]:
    """The digest of every whole tensor of a model by its author's name."""
    if is_flat_sharded(model):
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        return {name: digest(cast("torch.Tensor", value)) for name, value in whole.items()}
    (item,) = make_items({"model": model})
    return {name: digest(value) for name, value in item.take().items()}


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The digest of every whole tensor that an optimizer keeps."""
    if is_flat_sharded(model):
        options = StateDictOptions(full_state_dict=True)
        state = cast("Any", get_optimizer_state_dict(model, optimizer, options=options)["state"])
    else:
        item = make_items({"model": model, "optimizer": optimizer})[1]
        state = item.take()["state"]
    return {
        f"{name}.{key}": digest(value)
        for name, kept in state.items()
        for key, value in kept.items()
        if isinstance(value, torch.Tensor)
    }


def happen(job: Job, step: int) -> None:
    """What befalls the named ranks in the body of a step."""
    if step != job.at_step or dist.get_rank() not in job.victims:
        return
    if job.what == "kill-saved":
        # The save of the last edge runs beside this step: without waiting, whether it is committed would be chance.
        saved = Path(job.directory) / f"checkpoints/checkpoint-{step - step % (job.save_steps or 1)}"
        while not saved.exists():
            time.sleep(0.005)
    if job.what in ("kill", "kill-saved"):
        os.kill(os.getpid(), signal.SIGKILL)
    if job.what in signal.Signals.__members__:
        os.kill(os.getpid(), signal.Signals[job.what])
    if job.what == "slow":
        # Longer than a step, so that the others wait for its answer.
        time.sleep(0.5)
    if job.what == "hang":
        time.sleep(600)
    if job.what == "raise":
        raise ZeroDivisionError("an error of the user's own")


def prepare(job: Job) -> None:
    """What befalls the named ranks inside a save."""
    if dist.get_rank() not in job.victims or job.at_step is None:
        return
    if job.what == "no room":
        refuse_room(job.at_step)
    if job.what == "no memory":
        refuse_memory(job.at_step // (job.save_steps or 1))
    write = payload.write

    def failing(staged: Staged, draft: PartWriter, rank: int, *, files: int | None = None) -> payload.Written:
        assert isinstance(draft, Draft)
        if draft.name.step != job.at_step:
            return write(staged, draft, rank, files=files)
        if job.what == "kill-in-save":
            write(staged, draft, rank, files=files)
            os.kill(os.getpid(), signal.SIGKILL)
        if job.what == "full-disk":
            # The rank's own part cannot be created: something else has its name.
            path = draft.path / f"state/__{dist.get_rank()}_0.distcp"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
        if job.what == "surprise":
            raise ZeroDivisionError("not an error of ours")
        return write(staged, draft, rank, files=files)

    payload.write = failing


def befall_one(job: Job, objects: dict[str, object]) -> None:
    """Make one rank hand over something else than the others."""
    if job.what == "no item":
        objects["extra"] = 3
    if job.what == "one more":
        objects["extra"] = Unwilling()
    if job.what == "other model":
        other = nn.Linear(3, 3)
        objects["model"], objects["optimizer"] = other, torch.optim.AdamW(other.parameters())
    if job.what == "broken object":
        objects["average"] = Unwilling()


class Unwilling:
    """An object that cannot load what it saved."""

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: object) -> None:
        raise ZeroDivisionError("an error of the user's own")


def lose(run: unbroken.Run) -> None:
    """Let the first rank learn that another job has taken its run."""
    renewal = run._open.opened.renewal
    assert renewal is not None
    renewal.lost = LeaseLost(path=run.directory, mine=1, current=2)


def refuse_room(number: int) -> None:
    """Let the first save of a number of saves find no room."""
    asked: list[int] = []
    require = capacity.require_room

    def refused(store: Store, **named: Any) -> None:  # noqa: ANN401 - whatever room is asked for
        asked.append(1)
        if len(asked) == number:
            raise NoRoom(
                path=store.root,
                needed_bytes=9,
                reserve_bytes=0,
                free_bytes=1,
                needed_inodes=1,
                reserve_inodes=0,
                free_inodes=9,
                prunable_bytes=0,
            )
        require(store, **named)

    # Where the saver has it from; its module does not lend it on.
    vars(saving)["require_room"] = refused


def refuse_memory(number: int) -> None:
    """Let one of the saves ask for more memory than any machine has."""
    asked: list[int] = []
    sizes = Buffers._arena_sizes

    def too_many(buffers: Buffers, size_bytes: int) -> list[int]:
        asked.append(size_bytes)
        return [1 << 60] if len(asked) == number else sizes(buffers, size_bytes)

    Buffers._arena_sizes = too_many  # type: ignore[method-assign,assignment]


def spoil(job: Job, run: unbroken.Run, average: Average, step: int) -> None:
    """Give the named ranks something that cannot be saved at the edge of one step, and can be at the next ones."""
    is_now = step + 1 == job.at_step and dist.get_rank() in job.victims
    odd = {"pickle": object(), "sparse": torch.eye(3).to_sparse(), "raise in a save": "raise"}
    average.note = odd.get(job.what) if is_now else None
    run.counters["odd"] = object() if is_now and job.what == "counter" else step


def settings_of(job: Job) -> unbroken.Settings:
    """The settings of a job; told another host's name it is on that host, and its victims' clocks may be ahead."""
    if job.host is not None:
        vars(emergency)["host_name"] = lambda: job.host
    if job.ahead_s and dist.get_rank() in job.victims:
        now_s = time.time
        vars(time)["time"] = lambda: now_s() + job.ahead_s
    return unbroken.Settings(
        save_steps=job.save_steps,
        keep_last_k=None,
        accept=job.accept,
        logging_steps=job.logging_steps,
        audit="off",
        emergency_dir=job.emergency_dir,
        persistent_dir=job.persistent_dir,
        grace_seconds=job.grace_seconds,
    )


def train(job: Job) -> dict[str, Any]:
    """Train as a user would, and tell everything that must be the same however often it was interrupted."""
    rank, size = dist.get_rank(), dist.get_world_size()
    prepare(job)
    model = wrapped(job.wrap, is_dropping=job.is_dropping, has_norm=job.has_norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    average = Average(model)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if job.has_average:
        objects["average"] = average
    if rank == job.odd_rank:
        befall_one(job, objects)
    if job.has_data:
        share = (1, 0) if job.is_alike else (size, rank)
        sampler: DistributedSampler[torch.Tensor] = DistributedSampler(Numbered(), *share, shuffle=True, seed=3)
        objects["data"] = DataLoader(Numbered(), batch_size=4, sampler=sampler)
    seed(0 if job.is_alike else rank)
    settings = settings_of(job)
    losses: dict[int, str] = {}
    with unbroken.Run(job.directory, settings=settings, **objects) as run:
        for step in run.steps(job.total):
            happen(job, step)
            spoil(job, run, average, step)
            time.sleep(job.pause_s)
            batch = next(run.data) if job.has_data else torch.sin(torch.arange(32.0)).reshape(4, 8) * (step + 1)
            noise = float(np.random.rand()) + random.random()
            optimizer.zero_grad()
            loss = model(batch).square().mean() + 0.0 * noise
            loss.backward()
            optimizer.step()
            scheduler.step()
            average.update(model, loss.item())
            value = loss.item() + noise
            if job.what == "lost" and step == job.at_step and rank in job.victims:
                lose(run)
            # Twice: once more at the edge where the first is answered.
            if job.what == "ask for saves" and rank in job.victims and step - (job.at_step or 0) in (0, 1):
                run.save()
            if job.what == "dump" and step == job.at_step and rank in job.victims:
                run.save_emergency()
            losses[step] = value.hex()
            if job.what == "nan" and step == job.at_step and rank in job.victims:
                value = float("nan")
            run.log(loss=value)
        results: dict[str, Any] = {"resumed_from": run.resumed_from, "step": run.step, "is_stopped": run.is_stopped}
        if job.has_data:
            results["served"] = (run.data.epoch, run.data.served)
    results |= {
        "losses": losses,
        "weights": weights(model),
        "moments": moments(model, optimizer),
        "average": [digest(kept) for kept in average.kept],
        "rates": scheduler.get_last_lr(),
        "generators": [random.random(), float(np.random.rand()), torch.rand(2).tolist()],
    }
    return results


def in_different_directories(root: str) -> None:
    """A world whose last rank sees another directory."""
    last = dist.get_rank() == dist.get_world_size() - 1
    with unbroken.Run(Path(root) / ("elsewhere" if last else "here"), model=nn.Linear(2, 2)):
        raise AssertionError("it was let in")


def exact(results: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same however often a training was interrupted."""
    keys = ("weights", "moments", "average", "rates", "generators", "served", "step")
    return {key: results[key] for key in keys if key in results}
