"""RNG per lane: seeded from (seed, step, lane), independent of the rank and of earlier draws.

Inside a lane the global RNGs of python, numpy and torch (CPU and all devices) have the lane's seed; after the step they
are restored. So dropout draws the same numbers wherever and whenever a lane runs.
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
    """The seed of one lane of one step: a digest, so that neighbouring seeds are unrelated."""
    digest = hashlib.blake2b(f"{seed}/{step}/{lane}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _BITS)


class LaneRng:
    """The global RNGs during the lanes of one step."""

    def __init__(self, seed: int, step: int) -> None:
        self._seed, self._step = seed, step
        self._before: dict[str, object] = {}
        self._devices: list[torch.device | str | int] = []

    def enter(self, lane: int) -> None:
        """Start a lane: seed all global RNGs for it."""
        seed = lane_seed(self._seed, self._step, lane)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % (1 << _NUMPY_BITS))
        torch.manual_seed(seed)

    def __enter__(self) -> "LaneRng":
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._devices = [torch.cuda.current_device()]
        self._before = capture_rng(self._devices)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        restore_rng(self._before, self._devices)
