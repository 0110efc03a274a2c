"""Tensors that start fresh: they do not fit the checkpoint, and the user accepted that by name.

``accept`` may name an item, or a tensor, or everything below a name (``model.router``). Only what differs can start
fresh: a tensor that fits is loaded all the same. The optimizer state of such a parameter starts fresh with it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from unbroken.state.items import Item, ModuleItem, OptimizerItem, State


def is_accepted(name: str, accept: Collection[str]) -> bool:
    """Whether a tensor, or a name above it, was accepted."""
    return any(name == each or name.startswith(f"{each}.") for each in accept)


@dataclass
class FreshTensors:
    """The keys of each module's state that start fresh, and the parameters that each optimizer forgets."""

    accept: Collection[str]
    keys: dict[str, set[str]] = field(default_factory=dict)
    parameters: dict[str, set[str]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def take(self, item: str, differing: Collection[str]) -> set[str]:
        """Of a module's keys that differ, those that were accepted; they are remembered."""
        found = {key for key in differing if is_accepted(f"{item}.{key}", self.accept)}
        self.keys[item] = found
        self.names |= {f"{item}.{key}" for key in found}
        return found

    def forget(self, item: OptimizerItem, items: Sequence[Item], saved: Collection[str]) -> set[str]:
        """The parameters of an optimizer whose state starts fresh, because the parameter does."""
        found: set[str] = set()
        for module in items:
            if isinstance(module, ModuleItem):
                keys = self.keys.get(module.name, set())
                # Over several modules an optimizer's parameters are named by module first.
                found |= keys if module.module is item.module else {f"{module.name}.{key}" for key in keys}
        self.parameters[item.name] = found
        self.names |= {name for name in saved if owner_of(item, name) in found}
        return found

    def tensors(self) -> list[str]:
        """The tensors that start fresh, by name."""
        return [f"{item}.{key}" for item in sorted(self.keys) for key in sorted(self.keys[item])]

    def notes(self) -> list[str]:
        """The notes for the log and the journal."""
        return [f"accepted: {name}: starts fresh" for name in self.tensors()]

    def settle(self, item: Item, state: State) -> State:
        """The state to load: what starts fresh keeps the value it has now, or is left out."""
        if isinstance(item, ModuleItem) and (keys := self.keys.get(item.name)):
            live = item.take()
            kept = {key: value for key, value in state.items() if key not in keys}
            return {**kept, **{key: live[key] for key in keys if key in live}}
        if isinstance(item, OptimizerItem) and (forgotten := self.parameters.get(item.name)):
            moments: Mapping[str, object] = state["state"]
            return {**state, "state": {name: kept for name, kept in moments.items() if name not in forgotten}}
        return state


def owner_of(item: OptimizerItem, name: str) -> str:
    """The parameter that a tensor of an optimizer's state is kept for."""
    return name.removeprefix(f"{item.name}.state.").rpartition(".")[0]


@runtime_checkable
class Accepting(Protocol):
    """An object that handles accepted names itself."""

    def is_accepting(self, name: str) -> bool:
        """Whether it handles this one."""


def unused_names(accept: Iterable[str], differed: Collection[str], objects: Iterable[object]) -> list[str]:
    """The accepted names that had no effect: nothing of that name differed, and no object handles it itself."""
    looking = [candidate for candidate in objects if isinstance(candidate, Accepting)]
    return [
        name
        for name in accept
        if not any(is_accepted(each, [name]) for each in differed)
        and not any(candidate.is_accepting(name) for candidate in looking)
    ]
