"""Rotary positions: the frequencies with their stretching, the tables of angles, and the rotation itself.

Frequencies and tables are made in fp32 on the CPU, so that they have the same bits wherever the model lives. Halves of
a head are rotated against each other (element ``i`` with ``i + width / 2``), as in Llama.
"""

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from unbroken.config.sections import ModelConfig

# Yarn keeps what turns more often than the first within the original length, and stretches what turns less than the
# second; in between it blends.
YARN_FAST_TURNS: Final = 32
YARN_SLOW_TURNS: Final = 1


class Angles(NamedTuple):
    """Cosines and sines, one row per position and one column per frequency, fp32."""

    cosine: Tensor
    sine: Tensor


def tables(config: ModelConfig) -> Angles:
    """The angles of every position the model takes, on the CPU."""
    frequencies, scale = frequencies_of(config)
    angles = torch.arange(config.n_positions, dtype=torch.float32, device="cpu")[:, None] * frequencies
    return Angles(angles.cos() * scale, angles.sin() * scale)


def frequencies_of(config: ModelConfig) -> tuple[Tensor, float]:
    """The angle per position of each pair in a head, and what the cosines and sines are multiplied by."""
    width = config.n_embd // config.n_head
    base, factor = config.rope_base, config.rope_scaling_factor
    if config.rope_scaling_type == "ntk":
        # The highest frequency stays, the lowest is stretched by the whole factor.
        base *= factor ** (width / max(width - 2, 1))
    periods = base ** (torch.arange(0, width, 2, device="cpu").float() / width)
    if config.rope_scaling_type == "linear":
        return 1.0 / periods / factor, 1.0
    if config.rope_scaling_type == "yarn":
        return _yarn(periods, config), yarn_scale(factor)
    return 1.0 / periods, 1.0


def yarn_scale(factor: float) -> float:
    """What yarn multiplies cosines and sines by, so that attention stays as sharp over the longer range."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def original_positions(config: ModelConfig) -> int:
    """The length before it was stretched to ``n_positions``."""
    return max(1, round(config.n_positions / config.rope_scaling_factor))


def _yarn(periods: Tensor, config: ModelConfig) -> Tensor:
    width = 2 * len(periods)

    def pair_that_turns(turns: int) -> float:
        ratio = original_positions(config) / (turns * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(config.rope_base))

    low = max(math.floor(pair_that_turns(YARN_FAST_TURNS)), 0)
    high = min(math.ceil(pair_that_turns(YARN_SLOW_TURNS)), width - 1)
    span = high - low if high != low else 0.001
    pairs = torch.arange(width // 2, dtype=torch.float32, device="cpu")
    stretched_share = torch.clamp((pairs - low) / span, 0, 1)
    kept_share = 1 - stretched_share
    return 1.0 / (config.rope_scaling_factor * periods) * (1 - kept_share) + 1.0 / periods * kept_share


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """Turn each pair of a head by its angle; ``heads`` is (batch, time, heads, width), in and out in one dtype."""
    cosine, sine = angles
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(heads.dtype)
