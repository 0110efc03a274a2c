"""The first step of a job: how long it takes, and how much of that is compiling."""

import sys
from collections.abc import Callable

import torch

from unbroken import torch_private
from unbroken.launch import start_clock
from unbroken.launch.start_clock import StartClock


class FirstStep:
    """Measures the first step, from here to ``measured``."""

    def __init__(self, clock: StartClock, device: torch.device) -> None:
        self._clock, self._device = clock, device
        # Looking for the compiler would load it.
        self._stop_watching: Callable[[], None] | None = None
        if "torch._dynamo" in sys.modules:
            self._stop_watching = torch_private.watch_compiling(
                lambda: clock.done(start_clock.FIRST_STEP), lambda: clock.done(start_clock.COMPILE)
            )

    def measured(self) -> dict[str, object]:
        """The step is computed: the times of all parts of the start."""
        if self._stop_watching is not None:
            self._stop_watching()
        if self._device.type == "cuda":
            # A GPU is still computing; waited for once in a job.
            torch.cuda.synchronize(self._device)
        self._clock.done(start_clock.FIRST_STEP)
        return self._clock.as_json()
