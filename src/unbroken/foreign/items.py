"""Sorts the contents of another tool's files into items by name: weights, optimizers, objects, counters.

An optimizer of torch numbers its parameters. Where the file has their names, they are used; else the numbers stay, and
are matched to the parameters of the live optimizer, in its order, when the checkpoint is loaded.

Nothing is taken in the place of something else: two sources of one item are a problem, unless they hold the same bits
or the user has chosen one of them.
"""

from collections.abc import Collection, Iterable, Mapping
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
_WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_SUFFIXES: Final = ("_state_dict", "_states", "_state")
_RENAMED: Final = {"state_dict": "model", "optim": "optimizer", "lr_scheduler": "scheduler", "module": "model"}
# What the optimizers of torch keep for a parameter.
_MOMENTS: Final = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "sum"})
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

    ``only`` are the items that were asked for; files that hold others alone need not be read, nor be there. ``chosen``
    is, for an item, the key or file from which it is to be taken. ``has_order`` is whether the model's tensors are in
    the order in which its class registers them. ``problems`` is what makes the checkpoint unfit to be imported.
    """

    only: Collection[str] = ()
    chosen: Mapping[str, str] = field(default_factory=dict)
    items: dict[str, ForeignItem] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    world_size: int = 1
    has_order: bool = True
    # By item, the key or file that it was taken from.
    sources: dict[str, str] = field(default_factory=dict)

    def wants(self, name: str, source: str = "") -> bool:
        """Whether an item was asked for, or what is in this file."""
        return not self.only or name in self.only or source in self.chosen.values()

    @property
    def wants_others(self) -> bool:
        """Whether anything beside model and optimizer was asked for."""
        return not self.only or bool(self.chosen) or bool(set(self.only) - {"model", "optimizer"})

    def add_weights(self, name: str, state: object, source: str = "") -> bool:
        """Add a model's state, from a key or file; False if it is none."""
        state = _as_tensors(state)
        if not is_weights(state):
            return False
        names, collisions = clean_names(state)
        if collisions and self._takes(name, source):
            self.problems += [f"{source or name}: {collision}" for collision in collisions]
        self._put(name, ForeignItem(MODULE, {names[key]: value for key, value in state.items()}), source)
        return True

    def add_optimizer(self, name: str, state: object, source: str = "") -> bool:
        """Add an optimizer's state, from a key or file; False if it is none."""
        if not is_optimizer(state):
            return False
        item, problems = _optimizer(state)
        if self._takes(name, source):
            self.problems += [f"{source or name}: {problem}" for problem in problems]
        self._put(name, item, source)
        return True

    def add_object(self, name: str, state: object, source: str = "") -> None:
        """Add the state of anything else, under a name that a run can use."""
        self._put(name, ForeignItem(OBJECT, {"state": state}), source)

    def add_counter(self, name: str, value: object, source: str = "") -> None:
        """Add a plain value; of two that differ the first is kept, and the other one is said to be left out."""
        if name in self.counters and not is_same(self.counters[name], value):
            self.left_out[f"{source or name} = {value}"[:100]] = f"{name} is {self.counters[name]} elsewhere"[:100]
        else:
            self.counters[name] = value

    def _takes(self, name: str, source: str) -> bool:
        """Whether an item is to be taken from this source."""
        return source in self.chosen.values() or (self.wants(name) and name not in self.chosen)

    def _put(self, name: str, item: ForeignItem, source: str) -> None:
        """Take an item, unless the user has chosen another source of it; two that differ are a problem."""
        source = source or name
        if source not in self.chosen.values() and (name in RESERVED or not name.isidentifier()):
            self.left_out[source] = f"no item of a run can be called {name}; name it with --item NAME={source}"
        elif called := [each for each, chosen in self.chosen.items() if chosen == source]:
            for each in called:
                self.items[each], self.sources[each] = item, source
        elif name in self.chosen:
            self.left_out[source] = f"{name} is taken from {self.chosen[name]}"
        elif name not in self.items:
            self.items[name], self.sources[name] = item, source
        elif is_same(self.items[name].state, item.state):
            self.left_out[source] = f"has the same bits as {self.sources[name]}"
        elif self.wants(name):
            first = self.sources[name]
            how = f"choose with --item {name}={first} or --item {name}={source}"
            self.problems.append(f"{name}: both {first} and {source} have it, and they differ; {how}")

    def add_dictionary(self, found: Mapping[Any, Any], above: str = "") -> None:
        """Sort a dictionary that a script saved, by what each value looks like and what it is called.

        ``above`` are the keys that lead to it, with a dot behind each.
        """
        if self.add_weights("model", found, above.removesuffix(".")):
            return
        tensors = {key: value for key, value in found.items() if _is_named_tensor(key, value)}
        if tensors and all("." in name for name in tensors) and not _holds_states(found):
            # Weights with a step or an epoch among them; only parameters have names with dots.
            self.add_weights("model", tensors, above.removesuffix("."))
            found = {key: value for key, value in found.items() if key not in tensors}
        self.add_entries(found, above)

    def add_entries(self, found: Mapping[Any, Any], above: str = "") -> None:
        """Sort the entries of a dictionary, each by itself."""
        for key, value in found.items():
            self._add(str(key), value, f"{above}{key}")

    def _add(self, key: str, value: object, source: str) -> None:
        name = item_name(key)
        value = _as_number(value)
        if key in _STEPS and (step := _as_step(value)) is not None:
            self.steps.add(step)
        elif _is_moments(value):
            self.left_out[source] = "the state of an optimizer without its param_groups"
        elif self.add_optimizer(name, value, source) or self.add_weights(name, value, source):
            return
        elif "rng" in key or "random" in key:
            self.left_out[source] = "random numbers of another tool's loop"
        elif isinstance(value, dict) and ("last_epoch" in value or any(part in key for part in _STATEFUL)):
            self.add_object(name, value, source)
        elif _holds_states(value):
            # One more level, as torch's own tutorial has it: {"app": {"model": ..., "optim": ...}}.
            self.add_dictionary(value, f"{source}.")
        elif _is_plain(value):
            self.add_counter(key, value, source)
        else:
            self.left_out[source] = _why_not(value)


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value is what ``pickles.plain`` makes of an object."""
    return isinstance(value, dict) and {"class"} < value.keys() <= {"class", "args", "state"}


def _why_not(value: object) -> str:
    if _is_object(value):
        return f"an object of {value['class']}; what its state_dict() returns can be imported"
    others = [str(key) for key, held in value.items() if not _is_array(held)] if isinstance(value, dict) else []
    if isinstance(value, dict) and len(others) < len(value):
        return f"tensors with other values among them: {', '.join(others[:4])}"
    return f"a {type(value).__name__} that is neither weights, an optimizer nor plain values"


def _is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _is_named_tensor(key: object, value: object) -> bool:
    return isinstance(key, str) and isinstance(value, torch.Tensor) and key not in _STEPS


def _as_tensors(value: object) -> object:
    """A dictionary of names and arrays of numpy as tensors with the same bits; everything else as it is."""
    if not isinstance(value, Mapping) or not value or not all(_is_array(held) for held in value.values()):
        return value
    try:
        return {key: torch.as_tensor(held) for key, held in value.items()}
    except TypeError:
        # An array of a type that torch has not, such as text.
        return value


def _is_moments(value: object) -> bool:
    """Whether a value is what an optimizer keeps for its parameters, alone or under ``state``, without its groups."""
    if isinstance(value, dict) and not is_optimizer(value) and isinstance(value.get("state"), dict):
        value = value["state"]
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(held, dict) and bool(held.keys() & _MOMENTS) for held in value.values())
    )


def is_same(one: object, other: object) -> bool:
    """Whether two values have the same bits."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and _is_same_tensor(one, other)
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(is_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other or (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return one is other
    if one.layout is not torch.strided or one.is_quantized:
        return False
    # As bytes: a NaN equals itself, and -0.0 is not 0.0.
    raw = (
        each.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)
    )
    return torch.equal(*raw)


def _as_number(value: object) -> object:
    """A number in a tensor or an array without dimensions, as the number itself."""
    return value.item() if isinstance(value, torch.Tensor | np.generic | np.ndarray) and value.ndim == 0 else value


def _as_step(value: object) -> int | None:
    if isinstance(value, torch.Tensor | np.ndarray) and value.shape == (1,):
        value = value.item()
    return as_whole(int(value) if isinstance(value, float) and value.is_integer() else value)


def _holds_states(value: object) -> TypeGuard[dict[Any, Any]]:
    if not isinstance(value, dict) or is_weights(value) or is_optimizer(value) or _is_object(value):
        return False
    return any(is_weights(each) or is_optimizer(each) or _holds_states(each) for each in value.values())


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
    state, groups = value["state"], value["param_groups"]
    kept = state.values() if isinstance(state, Mapping) else state if isinstance(state, list) else [None]
    return (
        all(isinstance(each, Mapping) for each in kept)
        and isinstance(groups, list)
        and bool(groups)
        and all(isinstance(group, Mapping) and _numbers_or_names(group.get("params")) for group in groups)
    )


def _numbers_or_names(value: object) -> bool:
    return isinstance(value, list | tuple) and all(type(each) in (int, str) for each in value)


def clean_names(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Each name as in the bare module, without those of DDP, torch.compile and FSDP; and names that would collide."""
    bare = {name: ".".join(part for part in name.split(".") if part not in _WRAPPERS) or name for name in names}
    if all(each.startswith("module.") for each in bare.values()):
        bare = {name: each.removeprefix("module.") for name, each in bare.items()}
    holders: dict[str, list[str]] = {}
    for name, each in bare.items():
        holders.setdefault(each, []).append(name)
    collisions = [
        f"{' and '.join(held)} would both be {each}; save the state_dict of the model without its wrappers"
        for each, held in holders.items()
        if len(held) > 1
    ]
    return bare, collisions


def _optimizer(state: Mapping[str, Any]) -> tuple[ForeignItem, list[str]]:
    """An optimizer's state by names or by numbers, and what does not fit in it."""
    held = state["state"]
    kept = dict(enumerate(held)) if isinstance(held, list) else held
    groups: list[dict[str, Any]] = []
    names: dict[Any, str] = {}
    for group in state["param_groups"]:
        called = group.get("param_names") or ()
        called = called if len(called) == len(group["params"]) else group["params"]
        names |= {number: str(name) for number, name in zip(group["params"], called, strict=True)}
        others = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**others, "params": [str(name) for name in called]})
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    problems = ["param_groups: a parameter is in them twice"] if len(set(numbers)) < len(numbers) else []
    is_named = all(not name.isdecimal() for group in groups for name in group["params"])
    moments = {names.get(key, str(key)): _with_tensor_step(values) for key, values in kept.items()}
    if is_named:
        bare, collisions = clean_names(names.values())
        problems += collisions
        moments = {bare.get(name, name): values for name, values in moments.items()}
        groups = [{**group, "params": [bare[name] for name in group["params"]]} for group in groups]
    return ForeignItem(OPTIMIZER if is_named else NUMBERED, {"state": moments, "param_groups": groups}), problems


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
