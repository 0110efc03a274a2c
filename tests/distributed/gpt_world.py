"""What one rank says about a sharded model: its initial weights, its loss and its gradients."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from unbroken.config.sections import ModelConfig
from unbroken.gpt.build import initialize
from unbroken.gpt.model import GPT

OPTIONS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, grouped, biases": {"tie_word_embeddings": False, "n_kv_head": 2, "use_bias": True},
}


def config_of(label: str) -> ModelConfig:
    # A vocabulary and a width of the MLP that no count of ranks divides.
    shape = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "intermediate_size": 26}
    return ModelConfig(**(shape | OPTIONS[label]))


def tokens() -> torch.Tensor:
    return torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(2))


def whole(tensor: torch.Tensor) -> list[float]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    values: list[float] = full.detach().float().flatten().tolist()
    return values


def sharded(label: str, dtype_name: str, size: int) -> dict[str, Any]:
    """The same lane on every rank, so that a mean over ranks changes nothing."""
    with torch.device("meta"):
        model = GPT(config_of(label), gradient_checkpointing=2)
    mesh = init_device_mesh("cpu", (size,))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype_name), reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    initialize(model, torch.Generator().manual_seed(11))
    initial = {name: whole(parameter) for name, parameter in model.named_parameters()}
    loss = model(tokens(), labels=tokens())
    loss.total.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"initial": initial, "loss": loss.total.item().hex(), "gradients": gradients}
