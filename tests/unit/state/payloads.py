"""Payloads for tests, saved the way a job saves them, and tensors of every kind."""

import math
from collections.abc import Mapping, Sequence

import torch

from unbroken.state.description import finish
from unbroken.state.host_copy import as_bits
from unbroken.state.index import DTYPES
from unbroken.state.payload import Written, plan_save, planned_parts, read, read_index, write
from unbroken.state.stage import Buffers, stage
from unbroken.store.commit import Record, begin, commit
from unbroken.store.directory import Store
from unbroken.store.names import PERIODIC
from unbroken.world import World

ALONE = World(0, 1)
JOB = "j0001_a"


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of any dtype whose bits are random: subnormals, infinities and every kind of NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(*shape) if shape else raw.view(dtype)[0]


def tensors_of_every_kind() -> dict[str, torch.Tensor]:
    """Every dtype, and every shape and layout that has ever tripped somebody."""
    whole = torch.randn(300, 400)
    tensors = {f"model.{name}": random_bits((5, 7), dtype) for name, dtype in DTYPES.items()}
    tensors |= {
        "model.scalar": torch.tensor(3.5),
        "model.one": torch.ones(1, 1, 1),
        "model.empty": torch.empty(0, 4),
        "model.empty_inside": torch.empty(3, 0, 2),
        "model.transposed": torch.arange(12.0).view(3, 4).t(),
        "model.every_other": whole[::2, 1::3],
        "model.view": whole[3:5, 7:9],
        "model.expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "model.channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "model.parameter": torch.nn.Parameter(torch.randn(9, 9)),
        "optimizer.state.0.step": torch.tensor(7.0),
        "flat": torch.arange(10),
    }
    return tensors


def save(
    store: Store,
    tensors: Mapping[str, torch.Tensor],
    world: World = ALONE,
    *,
    step: int = 1,
    files: int = 1,
    arena_bytes: int = 1 << 16,
) -> str:
    """Plan, stage, write, finish and commit; every rank of the world calls it."""
    plan = plan_save(tensors, world)
    staged = stage(plan, tensors, Buffers(arena_bytes=arena_bytes))
    draft = world.broadcast(begin(store, step=step, job=JOB) if world.is_first else None)
    assert draft is not None
    written: list[Written] = world.all_gather(write(staged, draft, world.rank, files=files))
    staged.release()
    name = None
    if world.is_first:
        parts = [part for one in written for part in one.parts]
        parts += finish(plan, written, draft)
        record = Record(kind=PERIODIC, saved_at_ns=step)
        name = commit(draft, plan=planned_parts(plan, files=files), parts=parts, record=record)
    results = world.broadcast(name)
    assert results is not None
    return results


def load(store: Store, name: str, tensors: Mapping[str, torch.Tensor], world: World = ALONE) -> None:
    """Read a checkpoint into live tensors."""
    manifest = store.read_manifest(name)
    read(store, name, manifest, read_index(store, name, manifest), tensors, world)


def poisoned(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same dtypes, shapes and strides, with other bits."""
    return {name: _poisoned(tensor) for name, tensor in tensors.items()}


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    # An expanded tensor cannot be written into, so its stand-in is a plain one.
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype) if 0 in tensor.stride() else torch.empty_like(tensor)
    as_bits(fresh).fill_(0 if tensor.dtype is torch.bool else 0x5A)
    return fresh


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ."""
    assert one.keys() == other.keys()
    return [name for name in one if not same_bits(one[name], other[name])]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    with torch.no_grad():
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and torch.equal(as_bits(one.detach().contiguous()), as_bits(other.detach().contiguous()))
