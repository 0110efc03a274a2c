"""Randomness that belongs to a lane: seeded from (seed, step, lane), never from a rank or from what was drawn before.

Inside a lane the global generators of python, numpy and torch (the CPU's and all devices') are the lane's own; after
the step they go on as if no lane had been. So dropout draws the same numbers wherever and whenever a lane is run.
"""

import hashlib
import random
import sys
from types import TracebackType

import torch

from unbroken.state.rng import capture_rng, restore_rng

_BITS = 63  # what torch takes for a seed on every device
_NUMPY_BITS = 32


def lane_seed(seed: int, step: int, lane: int) -> int:
    """The seed of one lane of one step: a digest, so that neighbours have nothing in common."""
    digest = hashlib.blake2b(f"{seed}/{step}/{lane}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _BITS)


class LaneGenerators:
    """The global generators, lent to the lanes of one step."""

    def __init__(self, seed: int, step: int) -> None:
        self._seed, self._step = seed, step
        self._before: dict[str, object] = {}
        self._devices: list[torch.device | str | int] = []

    def enter(self, lane: int) -> None:
        """Begin a lane: whatever draws from now on draws its numbers."""
        seed = lane_seed(self._seed, self._step, lane)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % (1 << _NUMPY_BITS))
        torch.manual_seed(seed)

    def __enter__(self) -> "LaneGenerators":
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._devices = [torch.cuda.current_device()]
        self._before = capture_rng(self._devices)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        restore_rng(self._before, self._devices)
