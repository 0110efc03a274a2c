"""The kinds of objects that can be passed to a run, and how the state of each is taken and loaded.

A module's state is its ``state_dict`` under clean names; an optimizer's is keyed by the names of its parameters, not
their numbers, so that it can be resharded and regrouped; everything else speaks for itself through ``state_dict`` and
``load_state_dict``. Taking never copies: the tensors are the live ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parameter import is_lazy

from unbroken.errors import NotAnItem, TensorUnsupported
from unbroken.state.naming import is_flat_sharded, parameter_names, state_names
from unbroken.state.pieces import local_tensors
from unbroken.state.rng import OwnRng, is_rng
from unbroken.state.wrappers import is_foreign_engine, real
from unbroken.torch_private import ShardedTensor, has_unreduced_gradients, is_set_up

State = dict[str, Any]
_STEP = "step"
# Among the gradients, where the names of optimizers stand; none is called so, for it is reserved.
_CARRIED = "carried"
# Under these a checkpoint keeps what every run has.
RESERVED = frozenset({"rng_state", "generators", "ranks", "counters", "gradients", "carried"})


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say and take its state."""

    def state_dict(self) -> Any:  # noqa: ANN401 - whatever the object calls its state
        """The state."""

    def load_state_dict(self, state: Any, /) -> Any:  # noqa: ANN401
        """Take a state."""


@dataclass(frozen=True)
class ModuleItem:
    """A model, an average of one, anything made of parameters and buffers."""

    name: str
    module: nn.Module
    kind: str = "module"

    def take(self) -> State:
        """Tensors under clean names; a tied one has several."""
        if is_flat_sharded(self.module):
            return dict(get_model_state_dict(self.module))
        raw = self.module.state_dict()
        names = state_names(self.module, raw)
        return {names[name]: value for name, value in raw.items()}

    def give(self, state: State) -> None:
        """Load under the names this module uses now."""
        if is_flat_sharded(self.module):
            set_model_state_dict(self.module, state, options=StateDictOptions(strict=True))
            return
        names = state_names(self.module)
        self.module.load_state_dict({raw: state[name] for raw, name in names.items()}, strict=True)


@dataclass(frozen=True)
class OptimizerItem:
    """An optimizer and the module its parameters belong to."""

    name: str
    optimizer: torch.optim.Optimizer
    module: nn.Module
    kind: str = "optimizer"

    def take(self) -> State:
        """State by parameter name, and the groups with names in place of parameters.

        Raises:
            TensorUnsupported: it was given a parameter of no module of the run.
        """
        if is_flat_sharded(self.module):
            return _flat_sharded_take(self.module, self.optimizer)
        names = self._names()
        self._require_known(names)
        state = {names[id(p)]: dict(kept) for p, kept in self.optimizer.state.items()}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [names[id(p)] for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def _names(self) -> dict[int, str]:
        return parameter_names(self.module)

    def _require_known(self, names: Mapping[int, str]) -> None:
        held = [(number, p) for number, group in enumerate(self.optimizer.param_groups) for p in group["params"]]
        for number, parameter in (*held, *(("state", p) for p in self.optimizer.state)):
            if id(parameter) not in names:
                where = f"group {number}" if number != "state" else "its state"
                shape = tuple(parameter.shape) if isinstance(parameter, torch.Tensor) else parameter
                reason = f"{where} has a parameter {shape} of no module that was passed to Run; pass that module, too"
                raise TensorUnsupported(name=self.name, reason=reason)

    def give(self, state: State) -> None:
        """Put every value where it was, bit for bit: torch's own loading would cast moments to the parameter's type."""
        if is_flat_sharded(self.module):
            if state["state"] or self.optimizer.state:
                set_optimizer_state_dict(self.module, self.optimizer, state)
            return
        names = self._names()
        by_name = {names[id(p)]: p for group in self.optimizer.param_groups for p in group["params"]}
        self.optimizer.state.clear()
        for name, kept in state["state"].items():
            self.optimizer.state[by_name[name]] = dict(kept)
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def counting_on_device(self) -> set[str]:
        """The parameters whose steps are counted where they are, as fused and capturable optimizers do."""
        names = self._names()
        groups = [group for group in self.optimizer.param_groups if group.get("fused") or group.get("capturable")]
        return {names[id(p)] for group in groups for p in group["params"]}

    def groups(self) -> list[list[str]]:
        """The names of the parameters, group by group."""
        names = self._names()
        return [[names.get(id(p), "?") for p in group["params"]] for group in self.optimizer.param_groups]

    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters it updates, by name; of the older FSDP, whose own are flat, those of the whole model."""
        if is_flat_sharded(self.module):
            return cast("dict[str, torch.Tensor]", get_model_state_dict(self.module))
        names = self._names()
        return {names[id(p)]: p for group in self.optimizer.param_groups for p in group["params"]}


@dataclass(frozen=True)
class ObjectItem:
    """Anything else with ``state_dict`` and ``load_state_dict``."""

    name: str
    stateful: Stateful
    kind: str = "object"

    def take(self) -> State:
        """Its state_dict."""
        return {"state": self.stateful.state_dict()}

    def give(self, state: State) -> None:
        """Hand it back."""
        self.stateful.load_state_dict(state["state"])


@dataclass
class GradientsItem:
    """Gradients that a later step uses: pending ones, if a save cannot wait, and those that a loop keeps over an edge.

    ``wanted`` names the optimizers whose gradients the next save stores, ``carried`` those whose loop keeps them,
    ``unsaved`` by optimizer the parameters whose gradients the checkpoint does not contain.
    """

    optimizers: tuple[OptimizerItem, ...]
    wanted: frozenset[str] = frozenset()
    carried: frozenset[str] = frozenset()
    unsaved: Mapping[str, str] = field(default_factory=dict)
    name: str = "gradients"
    kind: str = "gradients"
    _restored: State | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the next save stores any."""
        return bool(self.wanted)

    @property
    def every(self) -> frozenset[str]:
        """The names of all optimizers."""
        return frozenset(item.name for item in self.optimizers)

    def are_pending(self, item: OptimizerItem) -> bool:
        """Whether any parameter of an optimizer has a gradient, or FSDP2 holds one back for it."""
        shown = (p.grad is not None for group in item.optimizer.param_groups for p in group["params"])
        return any(shown) or has_unreduced_gradients(item.module)

    def take(self) -> State:
        """The gradients of each wanted optimizer, by parameter name.

        Raises:
            TensorUnsupported: a model is sharded by FSDP1, whose gradients are flat and local, or FSDP2 has not reduced
                them yet.
        """
        if self._restored is not None:
            return self._restored
        found: State = {}
        for item in self.optimizers:
            has_any = item.name in self.wanted and self.are_pending(item)
            if is_flat_sharded(item.module) and has_any:
                raise TensorUnsupported(name=self.name, reason="gradients of FSDP1's flat parameters cannot be stored")
            if has_any and has_unreduced_gradients(item.module):
                reason = "gradients that FSDP2 has not reduced yet (set_requires_gradient_sync) cannot be stored"
                raise TensorUnsupported(name=self.name, reason=reason)
            live = item.parameters() if has_any else {}
            found[item.name] = {name: p.grad for name, p in live.items() if p.grad is not None}
        if self.carried:
            found[_CARRIED] = sorted(self.carried)
        return found

    def give(self, state: State) -> None:
        """Keep every gradient until the loop starts: what the script computes before it must not add to them."""
        self._restored = state
        self.carried = frozenset(state.get(_CARRIED, ()))

    def put_back(self) -> bool:
        """Put every restored gradient in its place, and drop all others; whether there was a checkpoint with any."""
        state, self._restored = self._restored, None
        if state is None:
            return False
        # By parameter: several optimizers may share one, and not all of them have stored its gradient.
        wanted: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for item in self.optimizers:
            given = state.get(item.name, {})
            for name, parameter in item.parameters().items() if not is_flat_sharded(item.module) else ():
                if name in given or id(parameter) not in wanted:
                    wanted[id(parameter)] = parameter, given.get(name)
        for parameter, restored in wanted.values():
            if restored is not None and _are_alike(parameter.grad, restored):
                # In place: a CUDA graph or a bucket of DDP writes to this very tensor.
                with torch.no_grad():
                    parameter.grad.copy_(restored)
            else:
                parameter.grad = restored
        return True

    def owner_of(self, name: str) -> torch.Tensor | None:
        """The parameter that a stored gradient belongs to; None if there is none of that name."""
        for item in self.optimizers:
            prefix = f"{self.name}.{item.name}."
            if name.startswith(prefix) and not is_flat_sharded(item.module):
                return item.parameters().get(name.removeprefix(prefix))
        return None


def _are_alike(one: torch.Tensor | None, other: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return one is not None and (one.dtype, one.layout, one.device) == (other.dtype, other.layout, other.device)


Item = ModuleItem | OptimizerItem | ObjectItem | GradientsItem


def present(items: Sequence[Item]) -> list[Item]:
    """The items that have a state now: gradients are stored only on request, carried values once there are any."""
    return [item for item in items if not is_optional(item) or _is_filled(item)]


def is_optional(item: Item) -> bool:
    """Whether a checkpoint without this item is complete."""
    return isinstance(item, GradientsItem) or (isinstance(item, ObjectItem) and hasattr(item.stateful, "is_filled"))


def _is_filled(item: Item) -> bool:
    return item.is_wanted if isinstance(item, GradientsItem) else bool(item.stateful.is_filled)  # type: ignore[union-attr]


def _flat_sharded_take(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    if not optimizer.state:
        return {"state": {}, "param_groups": []}
    return dict(get_optimizer_state_dict(module, optimizer))


def make_items(objects: Mapping[str, object]) -> list[Item]:
    """Sort what was passed to the run by kind, models first and optimizers next, since those need their models.

    What a framework wrapped is unwrapped. Generators come last: putting a loader back may draw from them.

    Raises:
        NotAnItem: something has no state to save, or an optimizer has parameters of no module of the run.
    """
    for name, value in objects.items():
        if name in RESERVED or not name.isidentifier():
            raise NotAnItem(name=name, type_name=type(value).__name__, lacks="a name of its own, of letters and digits")
    objects = {name: real(value) for name, value in objects.items()}
    for name, value in objects.items():
        _require_whole(name, value)
    modules = {name: value for name, value in objects.items() if isinstance(value, nn.Module)}
    items: list[Item] = [ModuleItem(name, module) for name, module in modules.items()]
    for name, value in objects.items():
        if isinstance(value, torch.optim.Optimizer):
            items.append(OptimizerItem(name, value, _owner(name, value, modules)))
    for name, value in objects.items():
        if isinstance(value, nn.Module | torch.optim.Optimizer) or is_rng(value):
            continue
        if not isinstance(value, Stateful):
            raise NotAnItem(name=name, type_name=type(value).__name__, lacks="state_dict and load_state_dict")
        items.append(ObjectItem(name, value))
    items += [ObjectItem(name, OwnRng(value)) for name, value in objects.items() if is_rng(value)]
    return items


def _require_whole(name: str, value: object) -> None:
    """Refuse what looks like an item and would fail at the first save.

    Raises:
        NotAnItem: it is such a thing.
    """
    lacks = None
    if is_foreign_engine(value):
        lacks = "a state of its own: DeepSpeed keeps it, in shards that only engine.save_checkpoint() writes"
    elif isinstance(value, torch.optim.Optimizer) and not is_set_up(value):
        lacks = "what torch.optim.Optimizer sets up: it wraps another optimizer; hand over the inner one"
    elif isinstance(value, nn.Module):
        lazy = [key for key, held in (*value.named_parameters(), *value.named_buffers()) if is_lazy(held)]
        if lazy:
            lacks = f"a shape for {lazy[0]}: run one batch through the model before the run is entered"
    if lacks is not None:
        raise NotAnItem(name=name, type_name=type(value).__name__, lacks=lacks)


def _owner(name: str, optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> nn.Module:
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in modules.values():
        if wanted <= {id(p) for p in module.parameters()}:
            return module
    everything = nn.ModuleDict(dict(modules))
    if wanted <= {id(p) for p in everything.parameters()}:
        return everything
    raise NotAnItem(
        name=name,
        type_name=type(optimizer).__name__,
        lacks="a model, passed to the run, that holds all its parameters",
    )


def is_extra(name: str) -> bool:
    """Whether a tensor is part of what a module returns from ``get_extra_state``."""
    return "_extra_state" in name.split(".")


def like_parameter(
    parameter: torch.Tensor, key: str, dtype: torch.dtype, shape: tuple[int, ...], *, counts_on_device: bool
) -> torch.Tensor:
    """An empty place for a value that an optimizer keeps for a parameter under a key, sharded as the parameter is.

    A value of another shape is kept whole. A step count is on the CPU, as torch's optimizers keep it, unless they count
    on the device.
    """
    if tuple(parameter.size()) == shape and key != _STEP:
        if isinstance(parameter, ShardedTensor):
            # There is no empty one without the other ranks; the elements do not matter.
            return _sharded_like(parameter, dtype)
        return torch.empty_like(parameter.detach(), dtype=dtype)
    held = local_tensors(parameter)
    device = held[0].device if held else torch.device("cpu")
    is_there = counts_on_device if key == _STEP else bool(shape)
    return torch.empty(shape, dtype=dtype, device=device if is_there else "cpu")


def _sharded_like(parameter: ShardedTensor, dtype: torch.dtype) -> torch.Tensor:
    place = parameter.clone()
    # Rare: moments of another type are read whole and cut by FSDP itself.
    return place if parameter.dtype == dtype else torch.empty(tuple(parameter.size()), dtype=dtype, device="cpu")
