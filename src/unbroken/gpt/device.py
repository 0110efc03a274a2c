"""Which device a model is asked on: the one that is named, if it is there, or the GPU, where there is one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from unbroken.errors import DeviceFull, DeviceMissing

DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def chosen_device(asked: str | None = None) -> torch.device:
    """The device that was asked for, or the best one here.

    Raises:
        DeviceMissing: there is no such device.
    """
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = _devices()
    try:
        device = torch.device(asked)
    except RuntimeError as unknown:
        raise DeviceMissing(asked=asked, there=there) from unknown
    if not any(torch.device(each).type == device.type and device.index in (None, _number(each)) for each in there):
        raise DeviceMissing(asked=asked, there=there)
    return device


def chosen_dtype(asked: str | None, device: torch.device) -> torch.dtype:
    """The type to compute in: as asked, or the one that a device is fast and sound in."""
    if asked is not None:
        return DTYPES[asked]
    is_wide = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if is_wide else torch.float32


@contextmanager
def noticing_full(device: torch.device, doing: str, *, is_training: bool = False) -> Iterator[None]:
    """Say what a device had no room for.

    Raises:
        DeviceFull: an allocation inside was refused.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as refused:
        # A CPU's allocator has no error of its own.
        is_full = isinstance(refused, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(refused)
        if not is_full:
            raise
        raise DeviceFull(device=str(device), doing=doing, is_training=is_training) from refused


def _devices() -> tuple[str, ...]:
    gpus = tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    return ("cpu", *gpus, *(("mps",) if torch.backends.mps.is_available() else ()))


def _number(device: str) -> int:
    return torch.device(device).index or 0
