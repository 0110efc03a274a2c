"""The loss scale of fp16: where it begins, how low it may go, and what is left to do where it is lowest.

Lanes sum their losses, so a scale that is usual for means would overflow at once: it is divided by the tokens of a
step, rounded up to a power of two. At the lowest scale gradients are those of a mean, unscaled: what overflows even
there is no matter of the scale.
"""

from typing import Final

import torch

USUAL_SCALE: Final = 2.0**16


class LossScaler(torch.amp.GradScaler):
    """A scaler for the summed losses of steps of so many tokens."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        divisor = float(1 << (tokens - 1).bit_length())
        super().__init__(device.type, init_scale=USUAL_SCALE / divisor)
        self.lowest = 1.0 / divisor

    def lower(self) -> bool:
        """After a gradient that overflowed, halve the scale; False where it is the lowest already, and stays."""
        before = self.get_scale()
        self.update()
        if self.get_scale() < self.lowest:
            self.update(self.lowest)
        return before > self.lowest

    def stay(self) -> None:
        """A step was left out for a reason that is not the scale's: it stays as it is."""
        self.update(self.get_scale())
