"""From a config to a model on its device: replicated or sharded, compiled or not, with the same weights in any world.

Blocks are compiled one by one, whether they are sharded or not: the compiler rounds by what it fuses, and so a sharded
and a replicated model compute the same bits.
"""

import os
import shutil
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from unbroken.config import Config
from unbroken.errors import CompilerMissing
from unbroken.gpt.initialization import initialize
from unbroken.gpt.model import GPT


def build_model(config: Config, vocab_size: int, device: torch.device, sharded_dtype: torch.dtype | None) -> GPT:
    """The model with its first weights, in training mode.

    Args:
        config: its shape, its seed, and how it is held.
        vocab_size: rows of the embedding.
        device: where it lives.
        sharded_dtype: the type a sharded model computes in; a replicated one leaves that to the reducer.
    """
    # Without memory at first: each rank then takes only what it will hold.
    with torch.device("meta"):
        model = GPT(config.model, vocab_size, gradient_checkpointing=config.training.gradient_checkpointing)
    if config.training.compile:
        for block in model.blocks:
            block.compile()
    if is_sharded(config):
        _shard(model, device, sharded_dtype)
    model.to_empty(device=device)
    initialize(model, torch.Generator().manual_seed(config.training.seed))
    return model.train()


def require_compiler(config: Config, device: torch.device) -> None:
    """Pass if what the device computes with can be compiled here.

    Raises:
        CompilerMissing: torch.compile would need a C++ compiler for a CPU, or Triton a C compiler, and there is none.
    """
    # Looked for as torch and Triton do, which would tell it with a traceback, in the middle of the first step.
    if device.type == "cuda":
        # The model has kernels of its own, whether blocks are compiled or not.
        named = os.environ.get("CC")
        if all(shutil.which(each) is None for each in ([named] if named else ["gcc", "clang"])):
            raise CompilerMissing(compiler=named or "gcc", device="cuda")
    elif config.training.compile and device.type == "cpu":
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            raise CompilerMissing(compiler=compiler)


def is_sharded(config: Config) -> bool:
    """Whether each rank holds a shard; alone, a rank holds everything in either case."""
    return config.training.sharding == "fsdp2" and dist.is_initialized() and dist.get_world_size() > 1


def _shard(model: GPT, device: torch.device, dtype: torch.dtype | None) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Angles and masks must keep their own type.
    policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
