"""Reads ZeRO stage, micro-steps and world of a DeepSpeed engine without importing ``deepspeed``."""

from typing import Any, Final

# Of the weights in 32 bits: two moments, the weights, and what else a save has.
_COPIES: Final = 4


def coming_bytes(engine: Any) -> int:  # noqa: ANN401 - a DeepSpeedEngine
    """About the bytes of a save of all ranks."""
    return _COPIES * sum(int(getattr(each, "ds_numel", each.numel())) * 4 for each in engine.module.parameters())


def is_accumulating(engine: Any) -> bool:  # noqa: ANN401
    """Whether gradients are being accumulated, which DeepSpeed saves in no checkpoint."""
    return bool(engine.micro_steps % engine.gradient_accumulation_steps())
