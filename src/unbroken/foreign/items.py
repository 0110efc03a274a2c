"""What another tool's files hold, sorted into items by name: weights, optimizers, objects, counters.

An optimizer of torch numbers its parameters. Where the file has their names, they are used; else the numbers stay, and
are matched to the parameters of the live optimizer, in its order, when the checkpoint is loaded.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

import numpy as np
import torch

from unbroken.state.items import RESERVED, State
from unbroken.state.numbered import NUMBERED
from unbroken.store.fields import as_whole

MODULE: Final = "module"
OPTIMIZER: Final = "optimizer"
OBJECT: Final = "object"
_STEPS: Final = ("step", "global_step", "iter_num", "iteration", "iter", "steps")
# Wrappers around a module put their own names in front of every parameter's.
_WRAPPERS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_SUFFIXES: Final = ("_state_dict", "_states", "_state")
_RENAMED: Final = {"state_dict": "model", "optim": "optimizer", "lr_scheduler": "scheduler", "module": "model"}
_STATEFUL: Final = ("sched", "scaler", "loader", "sampler", "ema")


@dataclass(frozen=True)
class ForeignItem:
    """One item: its kind as a checkpoint records it, and its state in the form that this kind has."""

    kind: str
    state: State

    @property
    def tensors(self) -> int:
        """How many tensors a model has, or how many parameters an optimizer."""
        if self.kind == MODULE:
            return len(self.state)
        if self.kind == OBJECT:
            return 0
        return sum(len(group["params"]) for group in self.state["param_groups"])


@dataclass
class Contents:
    """What was read of one checkpoint; ``left_out`` are names that are not imported, each with the reason.

    ``only`` are the items that were asked for; files that hold others alone need not be read, nor be there.
    ``has_order`` is whether the model's tensors are in the order in which its class registers them.
    """

    only: Collection[str] = ()
    items: dict[str, ForeignItem] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    world_size: int = 1
    has_order: bool = True

    def wants(self, name: str) -> bool:
        """Whether an item was asked for."""
        return not self.only or name in self.only

    @property
    def wants_others(self) -> bool:
        """Whether anything beside model and optimizer was asked for."""
        return not self.only or bool(set(self.only) - {"model", "optimizer"})

    def add_weights(self, name: str, state: object) -> bool:
        """Add a model's state; False if it is none."""
        if not is_weights(state):
            return False
        self.items[name] = ForeignItem(MODULE, clean_names(state))
        return True

    def add_optimizer(self, name: str, state: object) -> bool:
        """Add an optimizer's state; False if it is none."""
        if not is_optimizer(state):
            return False
        self.items[name] = _optimizer(state)
        return True

    def add_object(self, name: str, state: object) -> None:
        """Add the state of anything else, under a name that a run can use."""
        if name in RESERVED or not name.isidentifier():
            self.left_out[name] = "no item of a run can have this name"
        else:
            self.items[name] = ForeignItem(OBJECT, {"state": state})

    def add_dictionary(self, found: Mapping[Any, Any]) -> None:
        """Sort a dictionary that a script saved, by what each value looks like and what it is called."""
        if is_weights(found):
            self.add_weights("model", found)
            return
        if len(found) == 1 and _holds_states(inner := next(iter(found.values()))):
            # One more level, as torch's own tutorial has it: {"app": {"model": ..., "optim": ...}}.
            self.add_dictionary(inner)
            return
        for key, value in found.items():
            self._add(str(key), value)

    def _add(self, key: str, value: object) -> None:
        name = item_name(key)
        value = _as_number(value)
        if key in _STEPS and (step := _as_step(value)) is not None:
            self.steps.add(step)
        elif self.add_optimizer(name, value) or self.add_weights(name, value):
            return
        elif "rng" in key or "random" in key:
            self.left_out[key] = "random numbers of another tool's loop"
        elif isinstance(value, dict) and ("last_epoch" in value or any(part in key for part in _STATEFUL)):
            self.add_object(name, value)
        elif _is_plain(value):
            self.counters[key] = value
        else:
            self.left_out[key] = f"a {type(value).__name__} that is neither weights, an optimizer nor plain values"


def _as_number(value: object) -> object:
    """A number in a tensor or an array without dimensions, as the number itself."""
    return value.item() if isinstance(value, torch.Tensor | np.generic | np.ndarray) and value.ndim == 0 else value


def _as_step(value: object) -> int | None:
    return as_whole(int(value) if isinstance(value, float) and value.is_integer() else value)


def _holds_states(value: object) -> bool:
    if not isinstance(value, dict) or is_weights(value) or is_optimizer(value):
        return False
    return any(is_weights(each) or is_optimizer(each) for each in value.values())


def item_name(key: str) -> str:
    """The name of an item for a key in a file: ``optimizer_state_dict`` is ``optimizer``."""
    if key in _RENAMED:
        return _RENAMED[key]
    bare = next((key.removesuffix(suffix) for suffix in _SUFFIXES if key.endswith(suffix)), key) or key
    return _RENAMED.get(bare, bare)


def is_weights(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value is the state of a model: text to tensors, at least one; extra states may be among them."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        return False
    others = [key for key, held in value.items() if not isinstance(held, torch.Tensor)]
    return len(others) < len(value) and all("_extra_state" in key for key in others)


def is_optimizer(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value is what ``optimizer.state_dict()`` or DCP's ``get_optimizer_state_dict`` returns."""
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= value.keys():
        return False
    groups = value["param_groups"]
    return isinstance(groups, list) and all(isinstance(group, Mapping) and "params" in group for group in groups)


def clean_names(state: Mapping[str, Any]) -> State:
    """A model's state under the names of the bare module: without those of DDP, torch.compile and FSDP."""
    found: State = {}
    is_wrapped = all(key.startswith("module.") for key in state)
    for key, value in state.items():
        name = key.removeprefix("module.") if is_wrapped else key
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        found[name] = value
    return found


def _optimizer(state: Mapping[str, Any]) -> ForeignItem:
    held = state["state"]
    kept = dict(enumerate(held)) if isinstance(held, list) else held
    groups: list[dict[str, Any]] = []
    names: dict[Any, str] = {}
    for group in state["param_groups"]:
        called = group.get("param_names") or group["params"]
        names |= {number: str(name) for number, name in zip(group["params"], called, strict=True)}
        others = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**others, "params": [str(name) for name in called]})
    is_named = all(not name.isdecimal() for group in groups for name in group["params"])
    moments = {names.get(key, str(key)): _with_tensor_step(values) for key, values in kept.items()}
    if is_named:
        bare = {name: next(iter(clean_names({name: None}))) for name in names.values()}
        moments = {bare.get(name, name): values for name, values in moments.items()}
        groups = [{**group, "params": [bare[name] for name in group["params"]]} for group in groups]
    return ForeignItem(OPTIMIZER if is_named else NUMBERED, {"state": moments, "param_groups": groups})


def _with_tensor_step(values: Mapping[str, Any]) -> State:
    """Old versions of torch counted the steps of a parameter in a plain number; newer ones need a tensor."""
    step = values.get("step")
    if isinstance(step, int | float):
        return {**values, "step": torch.tensor(float(step), dtype=torch.float32)}
    return dict(values)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and _is_plain(held) for key, held in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def missing_ranks(found: Collection[int], world_size: int | None) -> list[int]:
    """The ranks of which there is no file, up to the known number of ranks or else the highest that is there."""
    most = max(found, default=-1) + 1 if world_size is None else world_size
    return sorted(set(range(most)) - set(found))
