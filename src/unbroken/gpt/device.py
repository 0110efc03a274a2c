"""Devices: the one to load a model on, and the one of each rank of a job."""

import contextlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from unbroken.config import TrainingConfig
from unbroken.connection import init_gloo
from unbroken.errors import DeviceFull, DeviceMissing
from unbroken.world import World

DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def chosen_device(asked: str | None = None) -> torch.device:
    """The given device, or the best one of this machine.

    Raises:
        DeviceMissing: the device does not exist.
    """
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = _devices()
    try:
        device = torch.device(asked)
    except RuntimeError as unknown:
        raise DeviceMissing(device=asked, available=available) from unknown
    if not any(torch.device(each).type == device.type and device.index in (None, _number(each)) for each in available):
        raise DeviceMissing(device=asked, available=available)
    return device


def chosen_dtype(asked: str | None, device: torch.device) -> torch.dtype:
    """The dtype to compute in: as given, or bf16 on a GPU and fp32 on a CPU."""
    if asked is not None:
        return DTYPES[asked]
    is_wide = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if is_wide else torch.float32


@contextmanager
def noticing_full(device: torch.device, doing: str, *, is_training: bool = False) -> Iterator[None]:
    """Report running out of memory as ``DeviceFull``.

    Raises:
        DeviceFull: an allocation inside failed.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as refused:
        # The CPU allocator has no error class of its own.
        is_full = isinstance(refused, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(refused)
        if not is_full:
            raise
        raise DeviceFull(device=str(device), doing=doing, is_training=is_training) from refused


def _devices() -> tuple[str, ...]:
    gpus = tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    return ("cpu", *gpus, *(("mps",) if torch.backends.mps.is_available() else ()))


def _number(device: str) -> int:
    return torch.device(device).index or 0


# ---- the ranks of a job ----

_TYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": None}


@dataclass(frozen=True)
class RankDevice:
    """One rank: its world and its device."""

    world: World
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which logs and writes for all."""
        return self.world.is_first

    def compute_dtype(self, training: TrainingConfig) -> torch.dtype | None:
        """The type of the forward pass; None is float32."""
        if training.mixed_precision is not None:
            return _TYPES[training.mixed_precision]
        is_wide = self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if is_wide else None


@contextlib.contextmanager
def joined() -> Iterator[RankDevice]:
    """Join the ranks that a launcher started; a single rank needs no process group."""
    has_cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if has_cuda else torch.device("cpu")
    if has_cuda:
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        # The number of threads decides how a product is split: it must not depend on the machine.
        torch.set_num_threads(1)
    is_ours = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if is_ours:
        _init_process_group(_backend(has_cuda=has_cuda))
    try:
        yield RankDevice(World.current(), device)
    finally:
        if is_ours:
            dist.destroy_process_group()


def seed_rng(seed: int) -> None:
    """Seed the global RNGs alike on every rank: a checkpoint then has one RNG state for any number of ranks.

    Training does not draw from them: lanes have RNGs of their own.
    """
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def _init_process_group(backend: str) -> None:
    if backend != "gloo":
        dist.init_process_group(backend)
        return
    store, rank, size = next(iter(rendezvous("env://")))
    store.set_timeout(dist.default_pg_timeout)
    init_gloo(store, rank, size, dist.default_pg_timeout.total_seconds())


def _backend(*, has_cuda: bool) -> str:
    # NCCL refuses several ranks on one device.
    has_own_device = has_cuda and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    return "nccl" if has_own_device else "gloo"
