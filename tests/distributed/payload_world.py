"""One rank of four, which make up worlds of one to four among them and save, load and reshard in each.

Every check is a function that all four ranks call at the same time; what came of it goes to ``RANK.json``.
"""

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_stock
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.unit.state.payloads import load, random_bits, same_bits, save
from unbroken import errors
from unbroken.state.host_copy import as_bits
from unbroken.state.pieces import plan_save
from unbroken.store.directory import Store
from unbroken.world import Link, World

RANKS = 4


@dataclass(frozen=True)
class Scene:
    """Where a check happens: this rank, a world and a mesh of each size, a directory for all."""

    rank: int
    worlds: dict[int, World]
    meshes: dict[int, DeviceMesh]
    root: Path

    @property
    def everybody(self) -> World:
        return self.worlds[RANKS]

    def store(self, name: str) -> Store:
        return Store(self.root / name)


Check = Callable[[Scene], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Register a check under its name."""
    CHECKS[function.__name__] = function
    return function


SHARDED = {
    "rows": ((10, 6), Shard(0)),
    "columns": ((6, 7), Shard(1)),
    "few": ((2, 3), Shard(0)),
    "one": ((1,), Shard(0)),
}


def whole_tensors() -> dict[str, torch.Tensor]:
    """What the state is, by name, whatever the world."""
    names = [*(f"plain.{n}" for n in range(6)), *(f"sharded.{n}" for n in SHARDED), "replicated.a"]
    shapes = {**{f"sharded.{n}": shape for n, (shape, _) in SHARDED.items()}, "replicated.a": (5, 5)}
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.complex64]
    return {
        name: random_bits(shapes.get(name, (number + 1, 3)), dtypes[number % 4], seed=number)
        for number, name in enumerate(names)
    }


def state(mesh: DeviceMesh, rank: int, *, is_fresh: bool = False) -> dict[str, torch.Tensor]:
    """The state as this rank holds it: plain, sharded, replicated, tied, and its own."""
    held: dict[str, torch.Tensor] = {}
    for name, whole in whole_tensors().items():
        if is_fresh:
            as_bits(whole).fill_(0x5A)
        kind, _, short = name.partition(".")
        if kind == "plain":
            held[name] = whole
        else:
            placement = SHARDED[short][1] if kind == "sharded" else Replicate()
            held[name] = distribute_tensor(whole, mesh, [placement])
    held["tied.rows"] = held["sharded.rows"] if not is_fresh else held["sharded.rows"].clone()
    held["tied.few"] = held["sharded.few"] if not is_fresh else held["sharded.few"].clone()
    own = torch.full((3,), float(rank))
    held[f"ranks.{rank}.generator"] = own.zero_() if is_fresh else own
    return held


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def require_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    differing = [name for name in expected if not same_bits(local(found[name]), local(expected[name]))]
    assert not differing, f"{differing} differ"


def part_bytes(store: Store, name: str) -> dict[str, int]:
    return {p.name: p.size_bytes for p in store.read_manifest(name).parts if p.name.endswith(".distcp")}


@check
def any_world_reads_what_any_world_wrote(scene: Scene) -> None:
    for size, world in scene.worlds.items():
        if scene.rank < size:
            tensors = state(scene.meshes[size], scene.rank)
            assert save(scene.store("reshard"), tensors, world, step=size, files=2) == f"checkpoint-{size}"
        dist.barrier()
    for size, world in scene.worlds.items():
        for saved_by in scene.worlds:
            if scene.rank < size:
                expected = state(scene.meshes[size], scene.rank)
                fresh = state(scene.meshes[size], scene.rank, is_fresh=True)
                if scene.rank >= saved_by:
                    # A rank that did not exist then finds nothing of its own.
                    del expected[f"ranks.{scene.rank}.generator"], fresh[f"ranks.{scene.rank}.generator"]
                load(scene.store("reshard"), f"checkpoint-{saved_by}", fresh, world)
                require_same(fresh, expected)
            dist.barrier()


@check
def replicated_tensors_are_written_once_and_evenly(scene: Scene) -> None:
    tensors = {f"t{n}": torch.full((1000,), float(n)) for n in range(40)}
    store = scene.store("even")
    name = save(store, tensors, scene.everybody)
    sizes = part_bytes(store, name)
    assert sorted(sizes) == [f"state/__{rank}_0.distcp" for rank in range(RANKS)]
    assert max(sizes.values()) - min(sizes.values()) < 200
    assert sum(sizes.values()) < 40 * 4000 * 1.6


@check
def large_and_small_replicated_tensors_are_shared_out_evenly(scene: Scene) -> None:
    tensors = {f"t{n}": torch.zeros(1000 * (1 + n % 10)) for n in range(30)}
    plan = plan_save(tensors, scene.everybody)
    loads = scene.everybody.all_gather(plan.size_bytes)
    assert max(loads) - min(loads) <= 8000, loads


@check
def a_shard_that_several_ranks_hold_is_written_once(scene: Scene) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = random_bits((8, 1000), torch.float32)
    tensors = {"hybrid": distribute_tensor(whole, mesh, [Replicate(), Shard(0)])}
    store = scene.store("hybrid")
    name = save(store, tensors, scene.everybody)
    assert sum(part_bytes(store, name).values()) < whole.nbytes + 4 * 2000
    fresh = {"hybrid": distribute_tensor(torch.zeros(8, 1000), mesh, [Shard(1), Shard(0)])}
    load(store, name, fresh, scene.everybody)
    expected = distribute_tensor(whole, mesh, [Shard(1), Shard(0)])
    require_same(dict(fresh), {"hybrid": expected})


@check
def tied_shards_are_written_once(scene: Scene) -> None:
    whole = random_bits((6, 1000), torch.float32)
    shard = distribute_tensor(whole, scene.meshes[RANKS], [Shard(0)])
    store = scene.store("tied")
    name = save(store, {"a": shard, "b": shard.detach()}, scene.everybody)
    assert sum(part_bytes(store, name).values()) < whole.nbytes + 4 * 2000


class Net(nn.Module):
    """Two layers, uneven on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 10)
        self.two = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(torch.relu(self.one(x)))
        return out


def whole_net(seed: int) -> dict[str, torch.Tensor]:
    """What a model that is made with this seed holds before it is sharded."""
    torch.manual_seed(seed)
    return {f"model.{name}": value.detach() for name, value in Net().state_dict().items()}


def model_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    if optimizer is not None:
        states: Any = get_optimizer_state_dict(model, optimizer)["state"]
        for name, values in states.items():
            found |= {f"optimizer.state.{name}.{key}": value for key, value in values.items()}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def trained(model: nn.Module, *, steps: int) -> dict[str, torch.Tensor]:
    """A model with its AdamW after some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.full((2, 6), float(step + 1))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model_state(model, optimizer)


def round_trip(scene: Scene, name: str, saved: dict[str, torch.Tensor], fresh: dict[str, torch.Tensor]) -> None:
    store = scene.store(name)
    assert any(not same_bits(local(saved[key]), local(fresh[key])) for key in saved if local(saved[key]).numel())
    load(store, save(store, saved, scene.everybody), fresh, scene.everybody)
    require_same(fresh, saved)


def sharded_net(mesh: DeviceMesh, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = Net()
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@check
def a_model_and_optimizer_under_fully_shard_come_back(scene: Scene) -> None:
    mesh = scene.meshes[RANKS]
    saved, fresh = trained(sharded_net(mesh, 1), steps=2), trained(sharded_net(mesh, 2), steps=1)
    assert isinstance(saved["model.one.weight"], DTensor)
    assert "optimizer.state.one.weight.exp_avg" in saved
    round_trip(scene, "fsdp2", saved, fresh)


def parallel_net(mesh: DeviceMesh, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return parallelize_module(Net(), mesh, {"one": ColwiseParallel(), "two": RowwiseParallel()})


@check
def a_tensor_parallel_model_comes_back(scene: Scene) -> None:
    mesh = scene.meshes[RANKS]
    round_trip(scene, "tp", model_state(parallel_net(mesh, 1), None), model_state(parallel_net(mesh, 2), None))


@check
def a_model_sharded_in_two_dimensions_comes_back_here_and_on_a_mesh_of_two(scene: Scene) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def both(seed: int) -> dict[str, torch.Tensor]:
        model = parallel_net(mesh["tensor"], seed)
        fully_shard(model, mesh=mesh["data"])
        return model_state(model, None)

    round_trip(scene, "two-d", both(1), both(2))
    # Not by full_tensor(): torch 2.9 puts the rows of uneven shards of shards in the wrong order.
    whole = whole_net(1)
    if scene.rank < 2:
        fresh = {n: distribute_tensor(torch.zeros_like(t), scene.meshes[2], [Shard(0)]) for n, t in whole.items()}
        load(scene.store("two-d"), "checkpoint-1", dict(fresh), scene.worlds[2])
        require_same(dict(fresh), {n: distribute_tensor(t, scene.meshes[2], [Shard(0)]) for n, t in whole.items()})


@check
def a_sharded_state_dict_of_the_older_fsdp_comes_back(scene: Scene) -> None:
    def older(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        model = FullyShardedDataParallel(
            Net(), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.FULL_SHARD
        )
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return {f"model.{name}": value for name, value in model.state_dict().items()}

    saved, fresh = older(1), older(2)
    kinds = {type(value).__name__ for value in saved.values()}
    assert kinds <= {"ShardedTensor", "DTensor"}, kinds
    store = scene.store("fsdp1")
    name = save(store, saved, scene.everybody)
    load(store, name, fresh, scene.everybody)
    whole = whole_net(1)
    gathered = {key: torch.zeros_like(value) for key, value in whole.items()}
    load(store, name, gathered, scene.everybody)
    require_same(gathered, whole)
    again = save(store, fresh, scene.everybody, step=2)
    load(store, again, gathered, scene.everybody)
    require_same(gathered, whole)


@check
def stock_readers_in_a_world_read_it(scene: Scene) -> None:
    tensors = state(scene.meshes[RANKS], scene.rank)
    store = scene.store("stock")
    name = save(store, tensors, scene.everybody, files=2)
    fresh = state(scene.meshes[RANKS], scene.rank, is_fresh=True)
    nested: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in fresh.items():
        item, _, rest = key.partition(".")
        nested.setdefault(item, {})[rest] = tensor
    load_stock(nested, checkpoint_id=str(store.path(name) / "state"))
    require_same(fresh, tensors)


@check
def an_unchanged_structure_costs_one_vote_and_a_change_on_one_rank_is_seen_by_all(scene: Scene) -> None:
    gathers: list[str] = []
    real = World.gather

    def counting(world: World, value: object) -> list[object]:
        gathers.append("gather")
        return real(world, value)

    tensors = state(scene.meshes[RANKS], scene.rank)
    plan = plan_save(tensors, scene.everybody)
    World.gather = counting  # type: ignore[assignment, method-assign]
    try:
        again = plan_save(state(scene.meshes[RANKS], scene.rank), scene.everybody, plan)
        assert again is plan
        assert gathers == []
        if scene.rank == 1:
            tensors["ranks.1.more"] = torch.zeros(7)
        anew = plan_save(tensors, scene.everybody, plan)
    finally:
        World.gather = real  # type: ignore[method-assign]
    assert gathers == ["gather"]
    assert anew is not plan
    assert anew.tensors["ranks.1.more"].shape == (7,)
    # Each rank knows its own pieces; the first knows all of them, alike.
    everybody = scene.everybody.all_gather(anew.pieces)
    if scene.rank == 0:
        assert list(anew.pieces_by_rank) == everybody
    assert anew.total_bytes == sum(piece.size_bytes for pieces in everybody for piece in pieces)


@check
def a_tensor_that_differs_between_ranks_is_refused_by_all(scene: Scene) -> None:
    with pytest.raises(errors.TensorUnsupported, match=r"rank 0 has float32 \[3\], rank 2 has float32 \[4\]"):
        plan_save({"a": torch.zeros(3 if scene.rank != 2 else 4)}, scene.everybody)


@check
def a_tensor_that_one_rank_cannot_keep_is_refused_by_all(scene: Scene) -> None:
    odd = torch.eye(2).to_sparse() if scene.rank == 3 else torch.eye(2)
    with pytest.raises(errors.TensorUnsupported) as refused:
        plan_save({"a": odd}, scene.everybody)
    assert refused.value.rank == (None if scene.rank == 3 else 3)


@check
def damage_that_one_rank_meets_stops_all(scene: Scene) -> None:
    whole = random_bits((8, 1000), torch.float32)
    store, mesh = scene.store("damaged"), scene.meshes[RANKS]
    name = save(store, {"a": distribute_tensor(whole, mesh, [Shard(0)])}, scene.everybody)
    if scene.rank == 0:
        path = store.path(name) / "state/__2_0.distcp"
        data = bytearray(path.read_bytes())
        data[2000] ^= 1
        path.write_bytes(data)
    dist.barrier()
    with pytest.raises(errors.UnbrokenError) as refused:
        load(store, name, {"a": distribute_tensor(torch.zeros(8, 1000), mesh, [Shard(0)])}, scene.everybody)
    met = refused.value
    if isinstance(met, errors.RankFailed):
        assert (scene.rank == 2, met.rank, met.cause.kind) == (False, 2, "damaged-checkpoint")
    else:
        assert isinstance(met, errors.DamagedCheckpoint)
        assert scene.rank == 2
        assert met.findings[0].startswith("state/__2_0.distcp: bytes 0 to ")


def run_checks(folder: str) -> None:
    """Go through all checks; to be called by four ranks."""
    root, rank = Path(folder), dist.get_rank()
    sizes = range(1, RANKS + 1)
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    worlds = {size: World(rank, size, Link(groups[size]) if size > 1 else None) for size in sizes}
    meshes = {size: DeviceMesh("cpu", torch.arange(size)) for size in sizes}
    scene = Scene(rank, worlds, meshes, root)
    found: dict[str, str | None] = {}
    for name, function in CHECKS.items():
        try:
            function(scene)
            found[name] = None
        except Exception:  # noqa: BLE001 - whatever went wrong is the result
            found[name] = traceback.format_exc()
            # Into the log too: a world that does not end is known by nothing else.
            traceback.print_exc()
        dist.barrier()
    (root / f"{rank}.json").write_text(json.dumps(found))
