"""Host memory for what travels, kept from lane to lane.

The system hands out fresh pages only after clearing them, which for a sum that is one pass over memory is a good part
of its cost. Devices need none of this: torch keeps their memory by itself.
"""

import torch


class Buffers:
    """Flat tensors that were used and wait to be used again."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor with anything in it."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        fitting = [each for each in self._free if each.dtype == dtype and each.numel() == numel]
        if not fitting:
            return torch.empty(numel, dtype=dtype)
        self._free = [each for each in self._free if each is not fitting[0]]
        return fitting[0]

    def give(self, *used: torch.Tensor) -> None:
        """Nobody looks at these any more."""
        self._free += [each for each in used if each.is_cpu]
