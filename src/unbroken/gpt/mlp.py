"""The MLP of a block: gated (SwiGLU, GeGLU, ReGLU by activation) or plain.

Gate and up projection are one matrix, gate first: the input is read once and the backward pass needs one product where
two would have to be added. An export splits it by rows. On CUDA the backward pass of gate and down projection is one
function, which keeps ``gate_up`` and makes the rest again in the same pass that needs it.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody knows
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from unbroken.config.model import ModelConfig

ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"swish": F.silu, "gelu": F.gelu, "relu": F.relu}


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden, bias = config.n_embd, config.mlp_width, config.has_mlp_bias
        self.activation = config.activation
        self.has_bias = bias
        self.gate_up = nn.Linear(width, 2 * hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """From and to the width of the residual stream."""
        gate_up = self.gate_up(hidden)
        if gate_up.is_cuda and torch.is_grad_enabled():
            rows = gate_up.flatten(0, -2)
            projected: Tensor = _GatedDown.apply(rows, self.down.weight, self.activation)  # type: ignore[no-untyped-call]
            if self.has_bias:
                projected = projected + self.down.bias.to(projected.dtype)
            return projected.view(hidden.shape)
        down: Tensor = self.down(gated(gate_up, self.activation))
        return down


class PlainMLP(nn.Module):
    """``down(activation(up(x)))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden, bias = config.n_embd, config.mlp_width, config.has_mlp_bias
        self.activation = ACTIVATIONS[config.activation]
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """From and to the width of the residual stream."""
        down: Tensor = self.down(self.activation(self.up(hidden)))
        return down


def make_mlp(config: ModelConfig) -> GatedMLP | PlainMLP:
    """The MLP that the config names."""
    return GatedMLP(config) if config.mlp_type == "gated" else PlainMLP(config)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``, where the last dimension holds both."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


class _GatedDown(torch.autograd.Function):
    """``gated(gate_up) @ weight.T`` on CUDA, over rows."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate_up: Tensor, weight: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.activation = activation  # type: ignore[attr-defined]
        return gated(gate_up, activation) @ weight.to(gate_up.dtype).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- what forward left on it
        # Imported here: it needs Triton, which a build of torch for CPUs does not have.
        from unbroken.gpt.kernels import gated_backward

        gate_up, weight = ctx.saved_tensors
        slope = gradients[0].contiguous()
        gate_up_slope, product = gated_backward(gate_up, slope @ weight.to(slope.dtype), ctx.activation)
        return gate_up_slope, (slope.t() @ product).to(weight.dtype), None
