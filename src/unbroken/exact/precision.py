"""Mixed precision for a replicated model: compute in a lower precision than that of its parameters.

As FSDP2 does for shards: inside the lanes of a step every parameter, frozen ones too, holds its rounded copy, so that
activations and gradients have that type; outside, it holds the float32 values that the optimizer updates. The parameter
stays the same object, so optimizers, tied weights and hooks are not affected.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from unbroken.torch_private import foreach_copy_


class Lowered:
    """Parameters that can be swapped for copies in another type, and back."""

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
        """Inside, the parameters are their copies; re-entrant."""
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
            foreach_copy_(self._copies, kept)
        self._kept = kept
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            parameter.data = copy
