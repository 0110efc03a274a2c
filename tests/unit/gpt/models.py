"""Small models for the tests, one per option."""

from typing import Any

import torch
from torch import Tensor

from unbroken.config.sections import ModelConfig
from unbroken.gpt.build import initialize
from unbroken.gpt.model import GPT

VOCAB = 96
LENGTH = 24

# Every option by name, each off its default, alone and together.
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "grouped heads": {"n_kv_head": 2},
    "one key head": {"n_kv_head": 1},
    "layernorm": {"norm": "layernorm", "norm_eps": 1e-6},
    "gelu": {"activation": "gelu"},
    "relu": {"activation": "relu"},
    "plain mlp": {"mlp_type": "mlp"},
    "plain gelu mlp": {"mlp_type": "mlp", "activation": "gelu", "intermediate_size": 40},
    "narrow mlp": {"intermediate_size": 24},
    "biases": {"use_bias": True},
    "qkv bias": {"qkv_bias": True},
    "out bias": {"attn_out_bias": True},
    "mlp bias": {"mlp_bias": True},
    "biases but qkv": {"use_bias": True, "qkv_bias": False},
    "untied": {"tie_word_embeddings": False},
    "linear": {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0},
    "ntk": {"rope_scaling_type": "ntk", "rope_scaling_factor": 4.0},
    "yarn": {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0},
    "other base": {"rope_base": 500.0},
    "dropout": {"dropout": 0.2},
    "sdpa_mask": {"attention_mode": "sdpa_mask"},
    "flex": {"attention_mode": "flex"},
    "fp32 stream": {"residual_dtype": "fp32"},
    "all at once": {
        "n_kv_head": 2,
        "norm": "layernorm",
        "mlp_type": "mlp",
        "activation": "gelu",
        "use_bias": True,
        "tie_word_embeddings": False,
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": 2.0,
        "attention_mode": "flex",
        "dropout": 0.1,
    },
}


def config_of(**options: Any) -> ModelConfig:  # noqa: ANN401 -- any field of the config
    shape = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return ModelConfig(**(shape | options))


def model_of(config: ModelConfig, **settings: Any) -> GPT:  # noqa: ANN401 -- any setting of the model
    model = GPT(config, **settings)
    initialize(model, torch.Generator().manual_seed(7))
    # Biases and norms start at 0 and 1, where many a mistake would not show; larger weights make attention matter.
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5).add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def tokens_of(batch: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """What the loss must be: all logits at once."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def gradients_of(model: GPT) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: Tensor, expected: Tensor) -> float:
    """How far a tensor is from another, relative to the size of the other."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())
