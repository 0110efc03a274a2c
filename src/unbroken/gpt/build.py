"""Build a model from a config: replicated or sharded, compiled or not, with the same weights on any world size.

Blocks are compiled one by one, sharded or not: rounding depends on what the compiler fuses, so this way a sharded and a
replicated model compute the same bits.
"""

import hashlib
import math
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from unbroken import torch_private
from unbroken.config import Config
from unbroken.errors import CompilerMissing, TorchTooOld
from unbroken.gpt.model import GPT
from unbroken.state.mixing import FIRST, SECOND, THIRD, signed
from unbroken.state.naming import clean, unwrapped
from unbroken.tested_versions import minor_version

# ---- initial weights ----

STANDARD_DEVIATION: Final = 0.02
# What feeds the residual stream: two additions per block, so the variance of the stream does not grow with depth.
RESIDUAL: Final = ("attention.out.weight", "mlp.down.weight")

WORDS_PER_ELEMENT: Final = 3
FIELDS_PER_WORD: Final = 4
FIELD_BITS: Final = 16
MEAN: Final = WORDS_PER_ELEMENT * FIELDS_PER_WORD * ((1 << FIELD_BITS) - 1) // 2
# What the passes over one chunk keep in a core's cache; a GPU takes more at a time.
CPU_CHUNK_ELEMENTS: Final = 1 << 15
CHUNK_ELEMENTS: Final = 1 << 22


@torch.no_grad()
def initialize(model: nn.Module, generator: torch.Generator) -> None:
    """Initialise every parameter of a model in place, sharded or not.

    The generator, of a CPU, gives one number: the same on every rank if it was seeded alike.
    """
    seed = int(torch.randint((1 << 63) - 1, (), generator=generator, dtype=torch.int64))
    inner = unwrapped(model)
    assert isinstance(inner, GPT)
    for raw, parameter in model.named_parameters():
        name = clean(model, raw)
        deviation = _deviation(name, inner.config.n_layer)
        for offsets, local in _local(parameter):
            if parameter.ndim == 1:
                local.fill_(0.0 if name.endswith(".bias") else 1.0)
            else:
                fill_normal(local, parameter.shape, offsets, key=_key(seed, name), deviation=deviation)


def fill_normal(box: Tensor, whole: torch.Size, offsets: tuple[int, ...], *, key: int, deviation: float) -> None:
    """Fill a box of a matrix of the shape ``whole`` that begins at ``offsets``."""
    columns = whole[1]
    most = CPU_CHUNK_ELEMENTS if box.device.type == "cpu" else CHUNK_ELEMENTS
    rows = max(1, most // max(1, box.shape[1]))
    across = torch.arange(offsets[1], offsets[1] + box.shape[1], device=box.device)
    for first in range(0, box.shape[0], rows):
        slab = box[first : first + rows]
        down = torch.arange(offsets[0] + first, offsets[0] + first + len(slab), device=box.device)
        total = _sum_of_fields(down[:, None] * columns + across, key)
        # Below 2**24 the conversion is exact, and a single product rounds alike everywhere.
        slab.copy_((total - MEAN).float() * (deviation / (1 << FIELD_BITS)))


def _sum_of_fields(places: Tensor, key: int) -> Tensor:
    total = torch.zeros_like(places)
    for word in range(WORDS_PER_ELEMENT):
        mixed = _mixed(places * WORDS_PER_ELEMENT + signed(key + word))
        for field in range(FIELDS_PER_WORD):
            total += (mixed >> (field * FIELD_BITS)) & ((1 << FIELD_BITS) - 1)
    return total


def _mixed(counters: Tensor) -> Tensor:
    """A bijection of 64-bit numbers in which every bit of the result depends on every bit of the counter."""
    mixed = counters
    for factor in (FIRST, SECOND, THIRD):
        mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * signed(factor)
    return mixed ^ ((mixed >> 32) & 0xFFFFFFFF)


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


def _deviation(name: str, blocks: int) -> float:
    return STANDARD_DEVIATION / math.sqrt(2 * blocks) if name.endswith(RESIDUAL) else STANDARD_DEVIATION


def _local(parameter: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Where the part that this rank holds begins, and its elements."""
    if not isinstance(parameter, DTensor):
        yield (0,) * parameter.ndim, parameter
    elif parameter.device_mesh.get_coordinate() is not None and parameter.to_local().numel():
        (chunk,) = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
        yield tuple(chunk.offsets), parameter.to_local()


# ---- on a device ----


def build_model(config: Config, vocab_size: int, device: torch.device, sharded_dtype: torch.dtype | None) -> GPT:
    """The model with its first weights, in training mode.

    Args:
        config: its shape, its seed, and how it is held.
        vocab_size: rows of the embedding.
        device: where it lives.
        sharded_dtype: the type a sharded model computes in; a replicated one leaves that to the reducer.
    """
    # On the meta device first: each rank then allocates only its part.
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


# Before it, compiled flex attention gives wrong gradients on a CPU; torch 2.7 was not tried.
_OLDEST_TORCH: Final = (2, 8)


def require_torch(config: Config) -> None:
    """Raise unless this version of torch trains this config correctly.

    Raises:
        TorchTooOld: it does not.
    """
    if tuple(map(int, minor_version(torch.__version__).split("."))) < _OLDEST_TORCH:
        why = "in older versions compiled attention can have wrong gradients"
        needs = ".".join(map(str, _OLDEST_TORCH))
        raise TorchTooOld(feature="the GPT trainer", required=needs, installed=str(torch.__version__), reason=why)
    if config.training.sharding == "fsdp2" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch_private.require_custom_reduce_scatter()


def require_compiler(config: Config, device: torch.device) -> None:
    """Raise unless the code for the device can be compiled here.

    Raises:
        CompilerMissing: torch.compile would need a C++ compiler for a CPU, or Triton a C compiler, and there is none.
    """
    # Searched for as torch and Triton do; they would fail with a traceback during the first step.
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
