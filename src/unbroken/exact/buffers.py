"""Host memory for what travels and for sums, kept from lane to lane and from step to step.

The system hands out fresh pages only after clearing them, which for a sum that is one pass over memory is a good part
of its cost. Pieces of all sizes share the memory, so that there is as much of it as ever travels at one time, and no
more. Devices need none of this: torch keeps their memory by itself.
"""

from typing import Any

import torch

# torch tells it to nobody else; its own CUDA graphs ask in the same way whether a result is still looked at.
_use_count: Any = torch._C._storage_Use_Count


class Buffers:
    """Flat tensors that were used and wait to be used again."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}

    @property
    def held(self) -> int:
        """How many bytes are kept, lent ones included."""
        return sum(each.nbytes for each in (*self._free, *self._lent.values()))

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor with anything in it."""
        # An empty one has no address by which it could be known when it is given back.
        if device.type != "cpu" or not numel:
            return torch.empty(numel, dtype=dtype, device=device)
        alike = sorted((each for each in self._free if each.dtype == dtype), key=torch.Tensor.numel)
        chosen = next((each for each in alike if each.numel() >= numel), None)
        # One that is too small goes for the one that is made in its place: else every size would have its own for ever.
        spent = chosen if chosen is not None else alike[-1] if alike else None
        self._free = [each for each in self._free if each is not spent]
        if chosen is None:
            del alike, spent
            chosen = torch.empty(numel, dtype=dtype)
        self._lent[chosen.data_ptr()] = chosen
        return chosen[:numel]

    def give(self, *used: torch.Tensor) -> None:
        """Nobody looks at these any more."""
        for each in used:
            if each.is_cpu and (whole := self._lent.pop(each.data_ptr(), None)) is not None:
                self._free.append(whole)

    def leave(self, *used: torch.Tensor) -> None:
        """Somebody may still look at these, or write into them: the memory is theirs."""
        for each in used:
            self._lent.pop(each.data_ptr(), None)

    def is_seen(self, lent: torch.Tensor) -> bool:
        """Whether anybody holds a view of this tensor beside the one it was lent to."""
        # The memory that is kept here, the tensor that was lent, and the object that is asked.
        own = 3
        return lent.data_ptr() in self._lent and _use_count(lent.untyped_storage()._cdata) > own

    def clear(self) -> None:
        """Forget all, those too that were never given back."""
        self._free.clear()
        self._lent.clear()
