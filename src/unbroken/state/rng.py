"""The global random generators of a process: python's, numpy's, torch's on the CPU and on the rank's devices.

Owns what is global. A generator object of one's own (``numpy.random.default_rng``, ``torch.Generator``) is an item like
any other and is handed over by name. Restoring is exact: the next draw is the one that would have come.
"""

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch

from unbroken.store.fields import Malformed

_NAMES = frozenset({"python", "torch", "cuda"})


def capture_generators(devices: Iterable[torch.device | str | int] = ()) -> dict[str, object]:
    """The states of the global generators; ``encode`` can store them, and drawing on changes none of them.

    Args:
        devices: the CUDA devices of this rank.
    """
    state: dict[str, object] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    # Loading numpy here would only capture a generator that nobody has drawn from.
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    # By position: the same rank may be given another device in its next job.
    state["cuda"] = [torch.cuda.get_rng_state(device) for device in devices]
    return state


def restore_generators(state: object, devices: Iterable[torch.device | str | int] | None = None) -> None:
    """Set the global generators to what ``capture_generators`` found.

    Args:
        state: what was found.
        devices: the CUDA devices of this rank; the k-th gets the state of the k-th. Where none are named, one state
            goes to the current device, several to the devices from 0 on.

    Raises:
        Malformed: it is no state of generators, or not of as many devices; no generator was changed then.
    """
    if not isinstance(state, dict) or state.keys() - {"numpy"} != _NAMES or not isinstance(state["cuda"], list):
        raise Malformed("it is no state of generators")
    saved = len(state["cuda"])
    targets = _usual_devices(saved) if devices is None else list(devices)
    if len(targets) != saved:
        raise Malformed(f"the generators of {saved} CUDA devices were saved; {len(targets)} are here")
    before = capture_generators(targets)
    try:
        _set(state, targets)
    except (TypeError, ValueError, RuntimeError, LookupError) as refused:
        _set(before, targets)
        raise Malformed(f"a generator does not take its state: {refused}") from refused


def _usual_devices(count: int) -> list[torch.device | str | int]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.current_device()] if count == 1 else list(range(min(count, torch.cuda.device_count())))


def _set(state: dict[str, Any], devices: list[torch.device | str | int]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    for device, held in zip(devices, state["cuda"], strict=True):
        torch.cuda.set_rng_state(held, device)


def generator_devices() -> list[int]:
    """The CUDA devices whose generators a rank draws from: its own, once it has used it."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
