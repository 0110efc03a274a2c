"""Values that follow from others where a field is null, for everything that shows a config."""

from typing import Any

from unbroken.config.document import Config


def derived(config: Config) -> dict[str, Any]:
    """What each null field amounts to, as far as the config alone can tell."""
    model = config.model
    candidates: dict[str, Any] = {
        "model.n_kv_head": model.kv_heads,
        "model.qkv_bias": model.has_qkv_bias,
        "model.attn_out_bias": model.has_attn_out_bias,
        "model.mlp_bias": model.has_mlp_bias,
        "model.intermediate_size": model.mlp_width,
        "optimizer.decay_steps": config.optimizer.resolved_decay_steps(config.training.max_steps),
    }
    return {name: value for name, value in candidates.items() if config.value(name) is None}
