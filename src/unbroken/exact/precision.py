"""Computing a replicated model in a lower precision than it is kept in.

As FSDP2's mixed precision does for shards: inside a step's lanes every parameter, frozen ones too, *is* its rounded
copy, so that activations and gradients have that type; outside, it is the float32 one that the optimizer moves. The
parameter stays the same object, so optimizers, tied weights and hooks notice nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Lowered:
    """Parameters that can be exchanged for their copies in another type, and back."""

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
        self._parameters = [p for p in parameters if dtype is not None and p.is_floating_point() and p.dtype != dtype]
        self._dtype = dtype
        self._kept: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """The type of a parameter, and of its gradient, inside a lane."""
        return self._dtype if self._dtype is not None and parameter.is_floating_point() else parameter.dtype

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """Inside, the parameters are their copies; entered again, nothing changes."""
        if self._kept or not self._parameters:
            yield
            return
        self._lower()
        try:
            yield
        finally:
            for parameter, kept in zip(self._parameters, self._kept, strict=True):
                parameter.data = kept
            self._kept = []

    @torch.no_grad()
    def _lower(self) -> None:
        kept = [parameter.data for parameter in self._parameters]
        if not self._copies:
            self._copies = [each.to(self._dtype) for each in kept]
        else:
            torch._foreach_copy_(self._copies, kept)
        self._kept = kept
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            parameter.data = copy
