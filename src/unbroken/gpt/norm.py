"""Normalisation before each layer: RMSNorm or LayerNorm, in fp32 inside, in the input's dtype outside.

The result is rounded before it meets the weight, and the weight is rounded to the same dtype: so fp32 weights under
autocast and weights that were cast beforehand give the same bits.
"""

import torch
from torch import Tensor, nn

from unbroken.config.model import ModelConfig


class RMSNorm(nn.Module):
    """Divide by the root of the mean square, then scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(hidden.dtype) * scaled.to(hidden.dtype)


class LayerNorm(nn.Module):
    """Subtract the mean and divide by the standard deviation, then scale and shift."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        wide = hidden.float()
        centred = wide - wide.mean(-1, keepdim=True)
        scaled = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(hidden.dtype) * scaled.to(hidden.dtype) + self.bias.to(hidden.dtype)


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """The norm that the config names, over the width of the residual stream."""
    kind = RMSNorm if config.norm == "rmsnorm" else LayerNorm
    return kind(config.n_embd, config.norm_eps)
