"""What the ranks run that shard a model of several units with the older FSDP, and count what their collectives move."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import unbroken
from tests.distributed.training_world import digest, moments, weights
from unbroken.world import Link

STEPS = 2
BLOCKS = 4
# Odd, so that no count of ranks divides it.
WIDTH = 161
# Whatever moves tensors between ranks, under the names of all versions of torch.
COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


@dataclass(frozen=True)
class Moved:
    """One collective: what it is called, and how much the larger of its two sides holds."""

    name: str
    is_float: bool
    elements: int
    nbytes: int


class Stack(nn.Module):
    """A model of several blocks, each of which is a unit of its own to FSDP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(BLOCKS))
        self.last = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return cast("torch.Tensor", self.last(x))


def sizes(width: int = WIDTH) -> tuple[int, int]:
    """The elements of the whole model and of one block."""
    with torch.device("meta"):
        model = Stack(width)
    whole, block = (sum(p.numel() for p in each.parameters()) for each in (model, model.blocks[0]))
    return whole, block


def built(wrap: str, *, device: str = "cpu", width: int = WIDTH) -> nn.Module:
    """The same weights on every rank, sharded as a test asks for."""
    torch.manual_seed(7)
    model = Stack(width).to(device)
    if wrap == "bare":
        return model
    if wrap == "fsdp2":
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    return _flat_sharded(model, wrap, device)


def _flat_sharded(model: Stack, wrap: str, device: str) -> FullyShardedDataParallel:
    # With a mesh its sharded state dicts are of DTensor, without of ShardedTensor.
    mesh = init_device_mesh(device, (dist.get_world_size(),)) if wrap == "mesh" else None
    is_cuda = device == "cuda"
    # Gloo serves both kinds of devices; unless it is told, a ShardedTensor takes its shards to be on the CPU.
    group = dist.new_group(backend="cuda:gloo") if is_cuda and mesh is None else None
    on = torch.device(device, 0) if is_cuda else torch.device(device)

    def unit(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module, process_group=group, device_mesh=mesh, use_orig_params=mesh is not None, device_id=on
        )

    if wrap != "one unit":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = unit(block)
    whole = unit(model)
    if mesh is None:
        FullyShardedDataParallel.set_state_dict_type(whole, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())
    return whole


class _Functional(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what DTensor moves, which torch starts below Python."""

    def __init__(self, note: Callable[[str, object], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - any operator
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        results = func(*args, **(kwargs or {}))
        # The wait for a collective hands on what was counted with it.
        if func.namespace in ("_c10d_functional", "_dtensor") and "wait" not in func.name():
            self._note(func.name(), [results])
        return results


@contextlib.contextmanager
def counted() -> Iterator[list[Moved]]:
    """Every collective that any thread of this rank takes part in meanwhile, on whatever group."""
    moved: list[Moved] = []

    def note(name: str, sides: object) -> None:
        largest = (0, 0, False)
        for side in cast("list[object]", sides):
            tensors = [each for each in tree_leaves(side) if isinstance(each, torch.Tensor)]
            elements = sum(each.numel() for each in tensors)
            nbytes = sum(each.numel() * each.element_size() for each in tensors)
            largest = max(largest, (nbytes, elements, any(each.is_floating_point() for each in tensors)))
        if largest[0]:
            moved.append(Moved(name, largest[2], largest[1], largest[0]))

    # As they stand in the class: what getattr gives would not be a method when it is put back.
    classes = {dist.ProcessGroup: COLLECTIVES, Link: ("gather", "broadcast", "reduce")}
    kept = [(kind, name, vars(kind)[name]) for kind, names in classes.items() for name in names if name in vars(kind)]

    def watched(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def collective(group: object, *args: object, **named: object) -> object:
            note(name, [*args, *named.values()])
            return real(group, *args, **named)

        return collective

    for kind, name, _ in kept:
        setattr(kind, name, watched(name, getattr(kind, name)))
    try:
        with _Functional(note):
            yield moved
    finally:
        for kind, name, real in kept:
            setattr(kind, name, real)


def save_counted(root: str, wraps: tuple[str, ...], device: str = "cpu", width: int = WIDTH) -> dict[str, Any]:
    """Train under each wrap and count while the last state is saved."""
    results: dict[str, Any] = {}
    for wrap in wraps:
        model = built(wrap, device=device, width=width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        directory = f"{root}/{wrap}-{dist.get_world_size()}"
        with contextlib.ExitStack() as counting:
            moved: list[Moved] = []
            settings = unbroken.Settings(save_steps=None, audit="off")
            with unbroken.Run(directory, settings=settings, model=model, optimizer=optimizer) as run:
                for step in run.steps(STEPS):
                    optimizer.zero_grad()
                    rows = torch.sin(torch.arange(32.0, device=device)).reshape(4, 8) * (step + 1)
                    model(rows).square().mean().backward()
                    optimizer.step()
                    if step == STEPS - 1:
                        # From here to the end of the run nothing but its last checkpoint needs the other ranks.
                        moved = counting.enter_context(counted())
        results[wrap] = {"moved": moved, "weights": weights(model), "moments": moments(model, optimizer)}
        state = Path(directory) / "checkpoints/final/state"
        results[wrap]["parts"] = [path.stat().st_size for path in sorted(state.glob("*.distcp"))]
    return results


def load_counted(root: str, pairs: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Load each source into fresh objects of the wrap it is paired with, and count meanwhile."""
    results: dict[str, Any] = {}
    for source, wrap in pairs:
        model = zeroed(built(wrap))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        settings = unbroken.Settings(audit="off")
        with (
            counted() as moved,
            unbroken.Run(f"{root}/{source}", settings=settings, model=model, optimizer=optimizer) as run,
        ):
            step = run.step
        found = {"step": step, "moved": moved, "weights": weights(model), "moments": moments(model, optimizer)}
        results[f"{source} as {wrap}"] = found
    return results


def gather_counted() -> list[Moved]:
    """What is counted when a model that FSDP2 shards is gathered on purpose."""
    with counted() as moved:
        for value in get_model_state_dict(built("fsdp2")).values():
            cast("DTensor", value).full_tensor()
    return moved


def zeroed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def export(directory: str, wraps: tuple[str, ...], device: str = "cpu", width: int = WIDTH) -> dict[str, Any]:
    """Load a checkpoint into FSDP and hand out its full state dict, offloaded where there is a device to offload."""
    is_cuda = device == "cuda"
    if is_cuda:
        # All ranks share the one device.
        torch.cuda.set_device(0)
    results: dict[str, Any] = {}
    for wrap in wraps:
        model = cast("FullyShardedDataParallel", zeroed(built(wrap, device=device, width=width)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        with unbroken.Run(directory, settings=unbroken.Settings(audit="off"), model=model, optimizer=optimizer) as run:
            assert run.step == STEPS
        results[wrap] = _exported(model, is_cuda=is_cuda)
    return results


def _exported(model: FullyShardedDataParallel, *, is_cuda: bool) -> dict[str, Any]:
    # Not offloaded on the CPU: torch reads freed memory where the model is there already.
    config = FullStateDictConfig(offload_to_cpu=is_cuda, rank0_only=True)
    held = 0
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    peak = torch.cuda.max_memory_allocated() if is_cuda else 0
    return {
        "state": {name: digest(value) for name, value in state.items()},
        "devices": {value.device.type for value in state.values()},
        "shard_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "held_bytes": held,
        "peak_bytes": peak,
    }
