"""Optimizer of the trainer: AdamW with weight decay on matrices only, learning rate schedule, loss scale."""

import math
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from unbroken import torch_private
from unbroken.config.sections import OptimizerConfig
from unbroken.exact.norm import local, scale

# ---- the learning rate ----


def rate_at(step: int, optimizer: OptimizerConfig, max_steps: int) -> float:
    """The learning rate of one step."""
    peak = optimizer.learning_rate
    if step < optimizer.warmup_steps:
        return peak * ((step + 1) / optimizer.warmup_steps)
    return peak * _share(step, optimizer, max_steps)


def _share(step: int, optimizer: OptimizerConfig, max_steps: int) -> float:
    """The share of the peak after the warmup."""
    decay_steps = optimizer.resolved_decay_steps(max_steps)
    begins = max_steps - decay_steps if optimizer.schedule == "wsd" else optimizer.warmup_steps
    # Both ends of the decay are reached: its first step has the whole peak, its last the minimum.
    done = min(max((step - begins) / max(1, decay_steps - 1), 0.0), 1.0)
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if optimizer.schedule == "cosine" else 1.0 - done
    return optimizer.min_lr_ratio + (1.0 - optimizer.min_lr_ratio) * left


# ---- one pass over memory ----


class AdamW(torch.optim.AdamW):
    """torch's AdamW, with gradients that may still have to be scaled: see ``scale_next``."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=False, foreach=True)
        self._factor: Tensor | None = None

    def scale_next(self, factor: Tensor) -> None:
        """Multiply the gradients of the next step by a factor, as part of that step; no synchronisation."""
        self._factor = factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401 -- torch's own signature
        """Update the weights.

        Raises:
            ValueError: a closure is given, though the gradients are there already; or the weights are in two kinds of
                memory.
        """
        if closure is not None:
            raise ValueError("closures are not supported: compute the gradients before the step")
        factor, self._factor = self._factor, None
        moved = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        if all(each.is_cuda for each in moved):
            for group in self.param_groups:
                self._step_on_cuda(group, factor)
            return
        if any(each.is_cuda for each in moved):
            raise ValueError("some weights are on a GPU and others are not: their updates would round differently")
        if factor is not None:
            scale([each.grad for each in moved if each.grad is not None], factor)
        super().step()

    def _step_on_cuda(self, group: dict[str, Any], factor: Tensor | None) -> None:
        # Imported here: it needs Triton, which a build of torch for CPUs does not have.
        from unbroken.gpt.kernels import adamw_step_

        beta1, beta2 = group["betas"]
        for parameter, gradient, mean, square, step in torch_private.adam_state(self, group):
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


# ---- as the trainer uses it ----


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """The optimizer of a model, which may be sharded; its rate is set before each step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps)


def follow(optimizer: AdamW, config: OptimizerConfig) -> None:
    """Set the options that may change between two jobs: a checkpoint restores its own.

    The config's values apply, and our kernel, which counts its steps on the host, whichever optimizer wrote the
    checkpoint.
    """
    matrices, others = optimizer.param_groups
    for group in (matrices, others):
        group.update(betas=(config.beta1, config.beta2), eps=config.eps, fused=False, foreach=True)
    matrices["weight_decay"] = config.weight_decay
    for state in optimizer.state.values():
        state["step"] = state["step"].cpu()


def set_rate(optimizer: AdamW, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


# ---- the loss scale of fp16 ----

USUAL_SCALE: Final = 2.0**16


class LossScaler(torch.amp.GradScaler):
    """A scaler for the summed losses of steps of so many tokens."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        divisor = float(1 << (tokens - 1).bit_length())
        super().__init__(device.type, init_scale=USUAL_SCALE / divisor)
        self.lowest = 1.0 / divisor

    def lower(self) -> bool:
        """Halve the scale after an overflow; False if it is already the lowest."""
        before = self.get_scale()
        self.update()
        if self.get_scale() < self.lowest:
            self.update(self.lowest)
        return before > self.lowest

    def stay(self) -> None:
        """Keep the scale after a step that was skipped for another reason."""
        self.update(self.get_scale())
