"""Where each tensor of a checkpoint goes: the live one of a module, a fresh one for all else.

Nothing is touched here. Names, types, shapes and options are compared, and whatever does not fit is named in one error.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from unbroken.errors import StateDiffers
from unbroken.state.capture import is_sharded
from unbroken.state.cursor import Cursor
from unbroken.state.flatten import flatten
from unbroken.state.fresh import FreshTensors, owner_of
from unbroken.state.index import Index
from unbroken.state.items import (
    GradientsItem,
    Item,
    ModuleItem,
    ObjectItem,
    OptimizerItem,
    State,
    is_extra,
    like_parameter,
)
from unbroken.state.naming import is_flat_sharded

# The names of the tensors in an item's values, and the values with nothing in the tensors' places.
Looked = tuple[tuple[str, ...], State]


def find_destinations(
    checkpoint: str, items: Sequence[Item], looked: Mapping[str, Looked], index: Index, fresh: FreshTensors
) -> dict[str, torch.Tensor]:
    """A place for every tensor of a checkpoint that is wanted.

    Raises:
        StateDiffers: names, types or shapes do not fit.
    """
    seeker = _Seeker(index, fresh)
    for item in items:
        named, state = looked[item.name]
        if isinstance(item, ModuleItem):
            seeker.in_module(item, set(named), state)
        elif isinstance(item, OptimizerItem):
            seeker.in_optimizer(item, set(named), state, items)
        elif isinstance(item, GradientsItem):
            seeker.in_gradients(item, set(named))
        else:
            seeker.in_object(item, set(named))
    seeker.require_fitting(checkpoint)
    return seeker.places


@dataclass
class _Seeker:
    """Places found so far, and what does not fit."""

    index: Index
    fresh: FreshTensors
    places: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def require_fitting(self, checkpoint: str) -> None:
        if self.missing or self.unexpected or self.changed:
            raise StateDiffers(
                checkpoint=checkpoint,
                missing=tuple(self.missing),
                unexpected=tuple(self.unexpected),
                changed=tuple(self.changed),
            )

    def in_module(self, item: ModuleItem, saved: set[str], state: State) -> None:
        taken = item.take()
        live = flatten(item.name, taken, allow_pickle=True).tensors
        other = {n for n in saved & live.keys() if not is_extra(n) and _mismatch(n, live[n], self.index)}
        differing = (taken.keys() ^ state.keys()) | {name.removeprefix(f"{item.name}.") for name in other}
        fresh_names = self.fresh.take(item.name, differing)
        self.missing += sorted(f"{item.name}.{name}" for name in taken.keys() - state.keys() - fresh_names)
        self.unexpected += sorted(f"{item.name}.{name}" for name in state.keys() - taken.keys() - fresh_names)
        for name in saved - self.fresh.names:
            if name not in live or is_extra(name):
                # What a module returns beyond its parameters and buffers may have another shape than in a fresh one.
                self.places[name] = _empty(self.index, name)
                continue
            self.changed += _mismatch(name, live[name], self.index)
            self.places[name] = live[name]

    def in_optimizer(self, item: OptimizerItem, saved: set[str], state: State, items: Sequence[Item]) -> None:
        parameters = item.parameters()
        known = {name for group in state["param_groups"] for name in group["params"]}
        # Before its first step an optimizer of the older FSDP does not say which parameters it has.
        fresh_names = self.fresh.forget(item, items, saved)
        wanted = set() if is_flat_sharded(item.module) else parameters.keys() - known
        self.missing += [f"{item.name}: {name}" for name in sorted(wanted - fresh_names)]
        self.unexpected += [f"{item.name}: {name}" for name in sorted(known - parameters.keys() - fresh_names)]
        # Its groups hold flattened parameters, which torch takes apart and puts together itself.
        is_comparable = known == parameters.keys() and not is_flat_sharded(item.module)
        if is_comparable and [group["params"] for group in state["param_groups"]] != item.groups():
            self.changed.append(f"{item.name}: its parameters are in other groups, or in another order")
        self.changed += _other_options(item, state["param_groups"])
        counting = item.counting_on_device()
        for name in saved - self.fresh.names:
            self.places[name] = _optimizer_place(item, name, parameters, counting, self.index)

    def in_gradients(self, item: GradientsItem, saved: set[str]) -> None:
        for name in saved:
            parameter = item.owner_of(name)
            if parameter is None:
                self.unexpected.append(name)
                continue
            dtype = self.index.tensors[name].dtype
            self.places[name] = torch.empty_like(parameter.detach(), dtype=dtype)
            self.changed += _mismatch(name, self.places[name], self.index)

    def in_object(self, item: ObjectItem, saved: set[str]) -> None:
        if not saved:
            return
        # Where the object holds a shard now, it is given a shard, cut as its own is. A loader holds none, and asking it
        # state_dict() may start it.
        is_loader = isinstance(item.stateful, Cursor)
        live = {} if is_loader else flatten(item.name, item.take(), allow_pickle=True).tensors
        self.places |= {name: _object_place(live.get(name), self.index, name) for name in saved}


def _other_options(item: OptimizerItem, saved_groups: Sequence[Mapping[str, object]]) -> list[str]:
    """That the state is another optimizer's: torch would load it without a word and start from nothing.

    Options that only one side has prove nothing: a newer torch adds some, and so does a scheduler.
    """
    saved = {option for group in saved_groups for option in group} - {"params"}
    live = {option for group in item.optimizer.param_groups for option in group} - {"params"}
    here, there = sorted(item.optimizer.defaults.keys() - saved), sorted(saved - live - {"initial_lr"})
    if not here or not there:
        return []
    kind = type(item.optimizer).__name__
    return [f"{item.name}: {kind} has {', '.join(here)}; the checkpoint's optimizer has {', '.join(there)}"]


def _mismatch(name: str, live: torch.Tensor, index: Index) -> list[str]:
    if live.is_meta:
        return [f"{name}: has no memory here (device meta); materialise the model before the run is entered"]
    if tuple(live.shape) != tuple(index.tensors[name].shape):
        return [f"{name}: shape {tuple(index.tensors[name].shape)} in the checkpoint, {tuple(live.shape)} here"]
    if live.dtype != index.tensors[name].dtype:
        return [f"{name}: {index.tensors[name].dtype} in the checkpoint, {live.dtype} here"]
    return []


def _object_place(live: torch.Tensor | None, index: Index, name: str) -> torch.Tensor:
    shape, dtype = index.tensors[name].shape, index.tensors[name].dtype
    if live is not None and is_sharded(live) and tuple(live.shape) == tuple(shape):
        return torch.empty_like(live, dtype=dtype)
    return _empty(index, name)


def _optimizer_place(
    item: OptimizerItem, name: str, parameters: Mapping[str, torch.Tensor], counting: Collection[str], index: Index
) -> torch.Tensor:
    saved = index.tensors[name]
    owner, key = owner_of(item, name), name.rpartition(".")[2]
    if owner not in parameters:
        return _empty(index, name)
    return like_parameter(parameters[owner], key, saved.dtype, tuple(saved.shape), counts_on_device=owner in counting)


def _empty(index: Index, name: str) -> torch.Tensor:
    return torch.empty(index.tensors[name].shape, dtype=index.tensors[name].dtype, device="cpu")
