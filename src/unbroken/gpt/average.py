"""An exponential moving average of a model's weights, in float32, with the same bits on any number of ranks.

Every element is updated by operations that each round once, so its bits do not depend on its position in a shard. The
average is stored like the weights, whole or sharded, under the same names, so that it is saved, verified and resharded
like them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from unbroken.exact.norm import local
from unbroken.torch_private import foreach_add_, foreach_mul_, foreach_sub

# Bytes updated at a time: few kernels, and little extra memory.
_AT_ONCE: Final = 1 << 24


class WeightAverage(nn.Module):
    """The average of the weights of a model, which may be sharded; it starts equal to them.

    Attributes:
        is_restored: it came from a checkpoint.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self._decay = decay
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self.is_restored = False
        for name, parameter in model.named_parameters():
            average = parameter.detach().clone()
            _register(self, name, average)
            self._pairs.append((average, parameter.detach()))
        self.register_load_state_dict_post_hook(_note_restored)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def begin(self) -> None:
        """Start from the current weights."""
        for average, live in self._pairs:
            average.copy_(live)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights, once a step."""
        for averages, live in self._slabs():
            # Not `lerp` or `add(alpha=)`: vectorised code rounds once (FMA), code for single elements twice.
            moves = foreach_sub(live, averages)
            foreach_mul_(moves, 1.0 - self._decay)
            foreach_add_(averages, moves)

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Inside, the model has the average as its weights; afterwards both are restored."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        if any(live.is_cuda for _, live in self._pairs):
            # A save may still be copying the weights on another stream.
            torch.cuda.synchronize()
        for average, live in self._pairs:
            mine, theirs = local(average), local(live)
            kept = theirs.clone()
            theirs.copy_(mine)
            mine.copy_(kept)

    def _slabs(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        averages: list[Tensor] = []
        live: list[Tensor] = []
        size = 0
        for average, followed in self._pairs:
            mine = local(average)
            if averages and size + mine.numel() > _AT_ONCE:
                yield averages, live
                averages, live, size = [], [], 0
            if mine.numel():
                averages.append(mine)
                live.append(local(followed))
                size += mine.numel()
        if averages:
            yield averages, live


def _register(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a tensor under a parameter's name."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_buffer(last, tensor)


def _note_restored(module: nn.Module, _: Any) -> None:  # noqa: ANN401 -- torch's own tuple of names
    assert isinstance(module, WeightAverage)
    module.is_restored = True
