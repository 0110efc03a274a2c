"""What the ranks of a world run to show that its size does not matter; each is called in a spawned world."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.exact.small_gpt import Shape, SmallGpt, batch, make
from unbroken import exact
from unbroken.errors import CannotFold
from unbroken.exact.exchange import StagedAllGather
from unbroken.state.fingerprint import combine, fingerprints
from unbroken.state.flatten import flatten
from unbroken.state.items import make_items
from unbroken.world import World

SEED = 99
MAX_NORM = 0.5  # below the norms that come up, so that clipping always acts
WIRE_BYTES = 2_000  # many small buckets


@dataclass(frozen=True)
class Case:
    """One training; ``broken`` names the control that must change the bits."""

    is_sharded: bool = False
    is_low: bool = False
    lanes: int = 7
    shape: Shape = field(default_factory=Shape)
    steps: int = 3
    broken: str = ""
    device: str = "cpu"
    is_fused: bool = False

    @property
    def family(self) -> tuple[object, ...]:
        """What may change the bits; how the model is held may not."""
        return (self.is_low, self.lanes, self.shape, self.steps, self.is_fused)


def build(case: Case) -> tuple[SmallGpt, torch.optim.AdamW, exact.Reducer]:
    """Model, optimizer and reducer, held as the case says."""
    model = make(case.shape).to(case.device)
    low = torch.bfloat16 if case.is_low else None
    if case.is_sharded:
        mesh = init_device_mesh(case.device, (dist.get_world_size(),))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=low))
            if case.device == "cuda":
                staged: Any = StagedAllGather()
                module.set_custom_all_gather(staged)
    heavy = [p for p in model.parameters() if p.ndim > 1]
    light = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": heavy, "weight_decay": 0.1}, {"params": light, "weight_decay": 0.0}]
    kind = {"fused": True} if case.is_fused else {"foreach": True}
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), **kind)
    reducer = exact.Reducer(
        model,
        optimizer,
        lanes=case.lanes,
        seed=SEED,
        compute_dtype=None if case.is_sharded else low,
        stock=case.broken == "stock reduction",
        bucket_bytes=WIRE_BYTES,
    )
    return model, optimizer, reducer


def one_step(case: Case, step: int, model: SmallGpt, optimizer: torch.optim.AdamW, reducer: exact.Reducer) -> Any:  # noqa: ANN401
    """One step; returns the bits of every lane's loss, of the step's loss and of the norm."""
    for lane in reducer.lanes(step):
        if case.broken == "rank-seeded dropout":
            torch.manual_seed(1_000 * step + dist.get_rank())
        tokens, targets = (each.to(case.device) for each in batch(step, lane.number))
        lane.backward(model(tokens, targets))
    if case.broken == "stock norm":
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        norm = found.full_tensor() if case.is_sharded else found  # type: ignore[attr-defined]
    else:
        norm = reducer.clip(MAX_NORM)
    optimizer.step()
    return [each.hex() for each in (*reducer.losses.tolist(), float(reducer.loss), float(norm))]


def fingerprint(model: SmallGpt, optimizer: torch.optim.AdamW) -> str:
    """One digest of parameters and moments, whatever holds them. Collective."""
    tensors: dict[str, torch.Tensor] = {}
    for item in make_items({"model": model, "optimizer": optimizer}):
        tensors |= flatten(item.name, item.take(), allow_pickle=False).tensors
    return combine(fingerprints(tensors, World.current()))


def train_each(cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    """Train every case in this world; returns losses and fingerprints, the same on every rank."""
    numerics = exact.pin(cases[0].device)
    assert numerics.record()["deterministic"] is True
    results = []
    for case in cases:
        model, optimizer, reducer = build(case)
        steps = [one_step(case, step, model, optimizer, reducer) for step in range(case.steps)]
        results.append({"steps": steps, "fingerprint": fingerprint(model, optimizer)})
    return results


def refused_each() -> dict[str, str]:
    """What is said of models that cannot be summed exactly; on two ranks."""

    def model() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    flat, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    hybrid, half, whole = model(), model(), model()
    fully_shard(hybrid, mesh=square)
    fully_shard(half[0], mesh=flat)
    fully_shard(whole, mesh=flat)
    results = {}
    for name, refused, dtype in (
        ("two dimensions", hybrid, None),
        ("half sharded", half, None),
        ("ddp", torch.nn.parallel.DistributedDataParallel(model()), None),
        ("type said twice", whole, torch.bfloat16),
        ("tensor parallel", parallelize_module(model(), flat, {"0": ColwiseParallel()}), None),
    ):
        try:
            exact.Reducer(refused, lanes=2, seed=0, compute_dtype=dtype)
        except CannotFold as error:
            results[name] = str(error)
    return results


def gradients_after_closing(is_stock: bool) -> bool:
    """Whether FSDP2 gives, after a reducer let a model go, the gradients it gives where there never was one."""
    found = []
    for is_held in (True, False):
        model = make(Shape())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        if is_held:
            reducer = exact.Reducer(model, lanes=4, seed=SEED, stock=is_stock)
            for lane in reducer.lanes(0):
                lane.backward(model(*batch(0, lane.number)))
            reducer.close()
            model.zero_grad()
        model(*batch(1, dist.get_rank())).backward()
        found.append([p.grad.to_local().clone() for p in model.parameters() if isinstance(p.grad, DTensor)])
    held, plain = found
    return len(plain) > 0 and all(torch.equal(one, other) for one, other in zip(held, plain, strict=True))
