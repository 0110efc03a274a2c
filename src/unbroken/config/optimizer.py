"""The section ``optimizer``: AdamW and the learning rate over the run."""

from dataclasses import dataclass
from typing import Literal

from unbroken.config.fields import ResumeClass, field

DECLARED = ResumeClass.DECLARED


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warmup and decay."""

    learning_rate: float = field(3e-4, "Peak learning rate, reached at the end of the warmup.", DECLARED, above=0)
    weight_decay: float = field(0.1, "Decoupled weight decay, on matrices only.", DECLARED, minimum=0)
    beta1: float = field(0.9, "Decay of the first moment.", DECLARED, minimum=0, below=1)
    beta2: float = field(0.95, "Decay of the second moment.", DECLARED, minimum=0, below=1)
    eps: float = field(1e-8, "Added to the root of the second moment.", DECLARED, above=0)
    max_grad_norm: float | None = field(
        1.0, "Gradients are scaled down to this norm.", DECLARED, above=0, null_means="no clipping"
    )
    schedule: Literal["cosine", "linear", "wsd"] = field(
        "cosine", "Decay after the warmup: cosine, linear, or constant and then linear (wsd).", DECLARED
    )
    warmup_steps: int = field(
        100, "Steps of linear rise from zero; fewer than training.max_steps.", DECLARED, minimum=0
    )
    decay_steps: int | None = field(
        None,
        "Steps of the decay from the peak to the minimum.",
        DECLARED,
        minimum=1,
        null_means="all steps after the warmup; with wsd the last tenth of the run",
        example=10000,
    )
    min_lr_ratio: float = field(
        0.1, "The rate at the end of the decay, as a share of the peak.", DECLARED, minimum=0, maximum=1
    )

    def resolved_decay_steps(self, max_steps: int) -> int:
        """Steps of the decay, with null resolved."""
        if self.decay_steps is not None:
            return self.decay_steps
        after_warmup = max(1, max_steps - self.warmup_steps)
        return min(after_warmup, max(1, max_steps // 10)) if self.schedule == "wsd" else after_warmup
