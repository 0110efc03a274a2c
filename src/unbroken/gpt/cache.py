"""Keys and values of the tokens a model has already seen, so that each new token costs one row and not all of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from unbroken.config.model import ModelConfig


@dataclass
class LayerCache:
    """The keys and values of one block, (batch, heads, room, width), of which the first ``length`` are filled."""

    keys: Tensor
    values: Tensor
    length: int = 0

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; returns those of all tokens so far."""
        end = self.length + key.shape[2]
        self.keys[:, :, self.length : end] = key
        self.values[:, :, self.length : end] = value
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass(frozen=True)
class KeyValueCache:
    """One ``LayerCache`` per block; all of them hold the same tokens."""

    layers: tuple[LayerCache, ...]

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return self.layers[0].length

    @property
    def room(self) -> int:
        """How many tokens it can hold."""
        return self.layers[0].keys.shape[2]

    @classmethod
    def empty(
        cls, config: ModelConfig, *, batch: int, room: int, dtype: torch.dtype, device: torch.device
    ) -> "KeyValueCache":
        """A cache of nothing, with room for ``room`` tokens."""
        shape = (batch, config.kv_heads, room, config.n_embd // config.n_head)

        def layer() -> LayerCache:
            keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            return LayerCache(keys, values)

        return cls(tuple(layer() for _ in range(config.n_layer)))
