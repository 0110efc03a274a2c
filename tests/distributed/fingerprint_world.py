"""What a rank runs that shards known tensors in many ways and says what their fingerprints are."""

from collections.abc import Mapping

import torch
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from unbroken.state.fingerprint import fingerprints
from unbroken.world import World

SHAPES: Mapping[str, tuple[int, ...]] = {
    "matrix": (7, 10),
    "tall": (2, 3),
    "cube": (5, 6, 7),
    "vector": (11,),
    "scalar": (),
    "empty": (0, 4),
}
DTYPES = (torch.float32, torch.float64)
PLACEMENTS: Mapping[str, tuple[Placement, ...]] = {
    "replicated": (Replicate(),),
    "rows": (Shard(0),),
    "columns": (Shard(1),),
}
GRIDS: Mapping[str, tuple[Placement, Placement]] = {
    "rows and columns": (Shard(0), Shard(1)),
    "columns and rows": (Shard(1), Shard(0)),
    "rows twice": (Shard(0), Shard(0)),
    "copies of rows": (Replicate(), Shard(0)),
    "copied columns": (Shard(1), Replicate()),
    "copies": (Replicate(), Replicate()),
}


def known() -> dict[str, torch.Tensor]:
    """The tensors, whole; the same in every process."""
    found: dict[str, torch.Tensor] = {}
    for shape_name, shape in SHAPES.items():
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(len(found))
            found[f"{shape_name}.{dtype}"] = torch.randn(shape, generator=generator).mul(50).to(dtype)
    return found


def sharded(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> dict[str, torch.Tensor]:
    deepest = max((placement.dim for placement in placements if isinstance(placement, Shard)), default=-1)
    # Each rank has the whole, so that nothing needs to be sent.
    return {
        name: distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        for name, tensor in known().items()
        if tensor.ndim > deepest
    }


def on_part_of_the_world(world: World) -> dict[str, torch.Tensor]:
    """The same tensors, sharded once over the first half of the ranks and once over the others."""
    half = world.size // 2
    meshes = [DeviceMesh("cpu", list(ranks)) for ranks in (range(half), range(half, world.size))]
    return sharded(meshes[world.rank >= half], (Shard(0),))


def flipped(world: World, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Sharded rows, and the last rank that holds some of the matrix has one bit of them wrong."""
    tensors = sharded(mesh, (Shard(0),))
    damaged = tensors["matrix.torch.float32"]
    assert isinstance(damaged, DTensor)
    local = damaged.to_local()
    held = [rank for rank, size in enumerate(world.all_gather(local.numel())) if size]
    if world.rank == held[-1]:
        local.view(torch.int32)[-1, -1] ^= 1 << 3
    return tensors


def old_style(world: World) -> dict[str, torch.Tensor]:
    """FSDP1's sharded tensors: uneven rows."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in known().items():
        if name.startswith("matrix"):
            each = -(-tensor.shape[0] // world.size)
            rows = tensor[world.rank * each : (world.rank + 1) * each].clone()
            offsets = [world.rank * each, 0]
            shards = [LocalShard.from_tensor_and_offsets(rows, offsets, world.rank)] if rows.numel() else []
            made[name] = init_from_local_shards(shards, *tensor.shape)
    return made


def answers() -> dict[str, dict[str, str]]:
    """The fingerprints of each way, the same on every rank."""
    world = World.current()
    mesh = init_device_mesh("cpu", (world.size,))
    found = {"plain": fingerprints(known(), world)}
    for label, placements in PLACEMENTS.items():
        found[label] = fingerprints(sharded(mesh, placements), world)
    if world.size == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        for label, pair in GRIDS.items():
            found[label] = fingerprints(sharded(grid, pair), world)
        found["on half of the ranks each"] = fingerprints(on_part_of_the_world(world), world)
    found["old style"] = fingerprints(old_style(world), world)
    mine = {name: tensor for index, (name, tensor) in enumerate(known().items()) if index % world.size != world.rank}
    found["missing on one rank each"] = fingerprints(mine, world)
    name = f"ranks.{world.rank}.generator"
    found["own"] = fingerprints({**known(), name: torch.arange(world.rank + 3)}, world, own={name})
    found["flipped"] = fingerprints(flipped(world, mesh), world)
    return found
