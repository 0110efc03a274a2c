"""What only torch can tell about a machine: its build, the GPUs it finds, their copy speed, and whether gloo connects.

For ``unbroken doctor``. Called in processes forked from the one that imported torch, because a question to CUDA makes
a process unfit for forking.
"""

import os
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from unbroken.doctor.self_test_process import TIMEOUT_VARIABLE
from unbroken.exact.forked import Forked, world

GLOO_LIMIT_S: Final = float(os.environ.get(TIMEOUT_VARIABLE, "30"))
_COPIED_BYTES: Final = 256 << 20


def torch_facts() -> dict[str, Any]:
    """The version and build of torch, and each GPU."""
    return {
        "version": str(torch.__version__),
        "build": getattr(torch.version, "git_version", None),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "has_gloo": dist.is_available() and dist.is_gloo_available(),
        "has_nccl": dist.is_available() and dist.is_nccl_available(),
        "gpus": [_gpu(number) for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
    }


def _gpu(number: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(number)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "copy_bytes_per_s": _copy_speed(number),
    }


def _copy_speed(number: int) -> float | None:
    """Bytes per second from a GPU to pinned memory, which is how a save copies; None if there is no memory for it."""
    try:
        source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=f"cuda:{number}")
        target = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
        # The first copy sets up the stream.
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(number)
        started_s = time.monotonic()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(number)
    except RuntimeError:
        return None
    return _COPIED_BYTES / max(time.monotonic() - started_s, 1e-9)


def gloo_ranks(folder: Path) -> list[Forked]:
    """Two ranks that connect as those of a job do: over the interface that gloo chooses or the environment names."""
    folder.mkdir()
    return world(2, _exchange, folder=folder, limit_s=GLOO_LIMIT_S)


def _exchange(rank: int) -> bool:
    received = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(received, torch.tensor([float(rank)]))
    return [float(each) for each in received] == [0.0, 1.0]
