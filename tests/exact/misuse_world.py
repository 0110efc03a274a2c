"""What goes wrong inside a step, and uses of a sharded model that would give wrong sums; called in a spawned world."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.exact.small_gpt import Shape, SmallGpt, batch, make
from unbroken import exact
from unbroken.errors import LaneBroken

LANES, SEED = 8, 5  # on one and two ranks every round is full: all of them lose the same step
WIRE_BYTES = 2_000
WAYS = ("before forward", "in forward", "after forward", "in backward", "after backward")


class Lost(Exception):
    """What a loop catches before it continues with its next step."""


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        raise Lost


def _mesh() -> Any:  # noqa: ANN401
    return init_device_mesh("cpu", (dist.get_world_size(),))


def build(*, is_sharded: bool, is_stock: bool) -> tuple[SmallGpt, exact.Reducer]:
    """A model and its reducer."""
    model = make(Shape())
    if is_sharded:
        mesh = _mesh()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    return model, exact.Reducer(model, lanes=LANES, seed=SEED, stock=is_stock, bucket_bytes=WIRE_BYTES)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """All gradients, whole, zeros included. Collective."""
    found = [parameter.grad for parameter in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in found if each is not None]


@contextmanager
def _breaking(model: SmallGpt, way: str) -> Iterator[None]:
    def lose(*_: object) -> None:
        raise Lost

    if way == "in forward":
        handle = model.blocks[1].register_forward_pre_hook(lose)
    else:
        handle = model.blocks[0].register_forward_hook(lambda _module, _given, found: _Broken.apply(found))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        handle.remove()


def _lose(way: str, model: SmallGpt, lane: exact.Lane) -> None:
    if way == "before forward":
        raise Lost
    if way.startswith("in "):
        with _breaking(model, way):
            lane.backward(model(*batch(0, lane.number)))
    loss = model(*batch(0, lane.number))
    if way == "after backward":
        lane.backward(loss)
    raise Lost


def _is_afresh(way: str, at: int, **held: bool) -> bool:
    """Whether a step has its bits after one that was lost at a lane, with weights that were moved in between."""
    found = []
    for is_lost in (True, False):
        model, reducer = build(**held)
        try:
            for lane in reducer.lanes(0) if is_lost else ():
                if lane.number >= at:
                    _lose(way, model, lane)
                lane.backward(model(*batch(0, lane.number)))
        except Lost:
            pass
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        for lane in reducer.lanes(1):
            lane.backward(model(*batch(1, lane.number)))
        found.append([*gradients(model), reducer.losses])
    lost, never = found
    return len(never) > 1 and all(torch.equal(one, other) for one, other in zip(lost, never, strict=True))


def afresh_each(is_sharded: bool, is_stock: bool) -> dict[tuple[str, int], bool]:
    """For every way in which a step can be lost, in its first, a middle and its last round: is the next one as ever."""
    size = dist.get_world_size()
    places = (0, 2 * size, LANES - size)
    return {(way, at): _is_afresh(way, at, is_sharded=is_sharded, is_stock=is_stock) for way in WAYS for at in places}


class Branches(nn.Module):
    """Three branches alike, of which a call takes one, and a trunk of its own shard."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.never = (nn.Linear(4, 3, bias=False) for _ in range(3))
        self.trunk = nn.Linear(4, 4, bias=False)

    def forward(self, branch: str, has_trunk: bool = True) -> torch.Tensor:
        rows = torch.ones(1, 4)
        found: torch.Tensor = getattr(self, branch)(self.trunk(rows) if has_trunk else rows).sum()
        return found


def _branches(*, is_sharded: bool) -> Branches:
    model = Branches()
    if is_sharded:
        mesh = _mesh()
        fully_shard(model.trunk, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def complaints() -> dict[str, str]:
    """What is said where lanes of a sharded model use different parameters, or two reducers the same model."""
    results = {}
    second = dist.get_world_size()  # the first lane of the second round
    uses: dict[str, Callable[[int], tuple[str, bool]]] = {
        "another branch": lambda lane: ("left" if lane < second else "right", True),
        "no trunk": lambda lane: ("left", lane < second),
        "a trunk at last": lambda lane: ("left", lane >= second),
        "a branch a rank": lambda lane: ("left" if lane % second else "right", True),
    }
    for name, used in uses.items():
        model = _branches(is_sharded=True)
        reducer = exact.Reducer(model, lanes=2 * second, seed=0)
        try:
            for lane in reducer.lanes(0):
                lane.backward(model(*used(lane.number)))
        except LaneBroken as error:
            results[name] = str(error)
    for is_stock in (False, True):
        model = _branches(is_sharded=True)
        old = exact.Reducer(model, lanes=second, seed=0, stock=is_stock)
        exact.Reducer(model, lanes=second, seed=0)
        try:
            for lane in old.lanes(0):
                lane.backward(model("left"))
        except LaneBroken as error:
            results[f"two reducers, stock={is_stock}"] = str(error)
    return results


def branch_gradients() -> list[list[list[float]]]:
    """The gradients where one branch is used by no lane, plain and sharded, and after an older reducer was closed."""
    found = []
    for is_sharded, has_older in ((False, False), (True, False), (False, True), (True, True)):
        model = _branches(is_sharded=is_sharded)
        older = [exact.Reducer(model, lanes=4, seed=0)] if has_older else []
        reducer = exact.Reducer(model, lanes=4, seed=0)
        for each in older:
            each.close()
        for lane in reducer.lanes(0):
            lane.backward(model("left") * (lane.number + 1))
        reducer.clip(0.5)
        found.append([each.flatten().tolist() for each in gradients(model)])
    return found
