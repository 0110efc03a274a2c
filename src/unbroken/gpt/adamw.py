"""AdamW whose step on CUDA is one pass over memory: clipping, both moments and the weights.

The state is torch's own, name by name, so a checkpoint does not know which of the two has written it. An element's bits
follow from that element alone, wherever it stands in a shard. On a CPU the step is torch's foreach: its fused kernel
rounds by an element's place.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from unbroken.exact.norm import local, scale


class AdamW(torch.optim.AdamW):
    """torch's AdamW, with gradients that may still have to be scaled: see ``scale_next``."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=False, foreach=True)
        self._factor: Tensor | None = None

    def scale_next(self, factor: Tensor) -> None:
        """Multiply the gradients of the next step by a number, as part of that step; it waits for no device."""
        self._factor = factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401 -- torch's own signature
        """Move the weights by their gradients.

        Raises:
            ValueError: a closure is given, though the gradients are there already; or the weights are in two kinds of
                memory.
        """
        if closure is not None:
            raise ValueError("the gradients are computed before the step; there is nothing to call")
        factor, self._factor = self._factor, None
        moved = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        if all(each.is_cuda for each in moved):
            for group in self.param_groups:
                self._step_on_cuda(group, factor)
            return
        if any(each.is_cuda for each in moved):
            raise ValueError("some weights are on a GPU and others are not; their steps are not the same arithmetic")
        if factor is not None:
            scale([each.grad for each in moved if each.grad is not None], factor)
        super().step()

    def _step_on_cuda(self, group: dict[str, Any], factor: Tensor | None) -> None:
        # Imported here: it needs Triton, which a build of torch for CPUs does not have.
        from unbroken.gpt.kernels import adamw_step_

        parameters: list[Tensor] = []
        gradients: list[Tensor] = []
        means: list[Tensor] = []
        squares: list[Tensor] = []
        steps: list[Tensor] = []
        self._init_group(group, parameters, gradients, means, squares, [], steps)  # type: ignore[no-untyped-call]
        beta1, beta2 = group["betas"]
        for parameter, gradient, mean, square, step in zip(parameters, gradients, means, squares, steps, strict=True):
            step += 1
            adamw_step_(
                local(parameter),
                local(gradient),
                local(mean),
                local(square),
                factor,
                rate=group["lr"],
                betas=(beta1, beta2),
                corrections=(1 - beta1 ** float(step), 1 - beta2 ** float(step)),
                epsilon=group["eps"],
                decay=group["weight_decay"],
            )
