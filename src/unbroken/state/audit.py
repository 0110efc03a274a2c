"""Live state that was not passed to the run, and that a resume would silently lose.

Looks at every live object once, when a run starts, for the kinds whose state matters: optimizers, schedulers, scalers,
averaged models and loaders that have a position. What belongs to something that was passed to the run, to this one
or to another one in this process, is not named. Generators and non-persistent buffers are watched instead: one that
nobody draws from any more is no state, so it is named at the first save that finds it changed.
"""

import gc
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from unbroken.state.fingerprint import contribution
from unbroken.state.items import Item, ModuleItem, Stateful
from unbroken.state.loaders import rngs_of
from unbroken.state.naming import is_flat_sharded
from unbroken.state.pieces import local_tensors
from unbroken.state.rng import comparable, is_rng, rng_state
from unbroken.state.wrappers import is_wrapped_loader, layers_of, real
from unbroken.torch_private import INNER_SCHEDULES

# What was passed to any run of this process, by identity. Weak: a run's objects may go, and their numbers come again.
_HANDED: Final[dict[int, Callable[[], object]]] = {}
# Fingerprints of buffers cost a pass over them; what training changes at all, it changes in its first steps.
_BUFFER_LOOKS: Final = 2


@dataclass(frozen=True)
class Unsaved:
    """One live object whose state is not saved."""

    kind: str
    type_name: str
    called: str | None

    def __str__(self) -> str:
        where = f", called `{self.called}`" if self.called else ""
        return f"{self.kind} {self.type_name}{where}"


def kind_of(candidate_type: type[object]) -> str | None:
    """The kind of state an object of a type carries, or None if none that we look for."""
    if issubclass(candidate_type, torch.optim.Optimizer):
        return "optimizer"
    if issubclass(candidate_type, LRScheduler | ReduceLROnPlateau):
        return "scheduler"
    if issubclass(candidate_type, torch.amp.GradScaler):
        return "scaler"
    if issubclass(candidate_type, AveragedModel):
        return "averaged model"
    return "loader" if "Loader" in candidate_type.__name__ and issubclass(candidate_type, Stateful) else None


def audit(handed: Mapping[str, object], frame: FrameType | None) -> list[Unsaved]:
    """Live objects with state that were not passed to the run; ``frame`` is where their names are looked up."""
    known = remember(handed.values())
    if not any(True for _ in _forgotten(known)):
        # As in nearly every job, whose loop waits for this.
        return []
    # What only a cycle of dead objects keeps alive is not state.
    gc.collect()
    found = [
        Unsaved(kind, type(candidate).__name__, _name_of(candidate, frame)) for kind, candidate in _forgotten(known)
    ]
    return sorted(found, key=lambda each: (each.kind, each.type_name, each.called or ""))


def _forgotten(known: Collection[int]) -> Iterator[tuple[str, object]]:
    for kind, candidate in _live_objects():
        if id(candidate) in known or _is_idle(candidate):
            continue
        if kind == "loader" and is_wrapped_loader(candidate):
            # It is only as stateful as what it wraps, which is looked at by itself.
            continue
        if id(real(candidate)) not in known:
            yield kind, candidate


def _live_objects() -> list[tuple[str, object]]:
    """Every live object of a kind that we look for.

    A tuple that another thread is building is among the live objects, and CPython refuses to finish it (SystemError in
    that thread) while anybody else holds a reference. So a list of all objects is never kept: their types are taken
    inside one call of a C function, during which no other thread runs, and the objects are found by their types.
    """
    # type(), not isinstance(): a proxy may lie about its class, or raise when it is inspected.
    types = set(map(type, itertools.chain.from_iterable(map(operator.call, (gc.get_objects,)))))
    kinds = {each: kind for each in types if (kind := kind_of(each)) is not None}
    return [(kinds[type(each)], each) for each in gc.get_referrers(*kinds) if type(each) in kinds]


def remember(objects: Iterable[object]) -> set[int]:
    """Note what is passed to a run; returns the identities of all that was passed to any run of this process."""
    for candidate in _with_parts(objects):
        try:
            _HANDED[id(candidate)] = weakref.ref(candidate)
        except TypeError:
            # Some of numpy's and torch's own types; they are small.
            _HANDED[id(candidate)] = lambda kept=candidate: kept  # type: ignore[misc]
    for gone in [identity for identity, alive in _HANDED.items() if alive() is None]:
        del _HANDED[gone]
    return set(_HANDED)


def named_rngs(frame: FrameType | None, *, ignore: Collection[str] = ()) -> dict[str, object]:
    """Generators under the caller's names that were passed to no run, beside the global ones that every checkpoint has.

    Those that libraries keep do not count, and a Python generator object is not an RNG.
    """
    if frame is None:
        return {}
    known = {id(torch.default_generator), *map(id, torch.cuda.default_generators), *_HANDED}
    named = {**frame.f_globals, **frame.f_locals}
    if "self" in frame.f_locals:
        # A trainer keeps its own beside its model.
        named |= {f"self.{name}": value for name, value in getattr(frame.f_locals["self"], "__dict__", {}).items()}
    return {
        name: value for name, value in named.items() if is_rng(value) and id(value) not in known and name not in ignore
    }


@dataclass
class UnsavedWatch:
    """Generators and non-persistent buffers that no checkpoint holds, and how they were when the run was entered."""

    rngs: Mapping[str, object]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _before: dict[str, object] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)
    _looks: int = 0

    def __post_init__(self) -> None:
        self._before = {name: comparable(rng_state(rng)) for name, rng in self.rngs.items()}
        self._before |= {name: _print_of(buffer) for name, buffer in self.buffers.items()}

    def drawn_from(self) -> list[Unsaved]:
        """The generators that were drawn from since the run was entered, each once."""
        found = [name for name, rng in self.rngs.items() if comparable(rng_state(rng)) != self._before[name]]
        return [Unsaved("generator", type(self.rngs[name]).__name__, name) for name in self._new(found)]

    def written(self, modules: Mapping[str, nn.Module]) -> list[str]:
        """The non-persistent buffers that were written since then, each once; looked for at the first saves only."""
        self._looks += 1
        if self._looks > _BUFFER_LOOKS or not self.buffers:
            return []
        now = non_persistent(modules)
        return self._new([name for name in self.buffers if name in now and _print_of(now[name]) != self._before[name]])

    def _new(self, names: Sequence[str]) -> list[str]:
        found = [name for name in names if name not in self._reported]
        self._reported |= set(found)
        return found


def modules_of(items: Iterable[Item]) -> dict[str, nn.Module]:
    """The models among the items whose buffers can be looked at: not those of the older FSDP, which moves them."""
    return {
        each.name: each.module for each in items if isinstance(each, ModuleItem) and not is_flat_sharded(each.module)
    }


def non_persistent(modules: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """The buffers that no state dict holds, by name."""
    found: dict[str, torch.Tensor] = {}
    for item, module in modules.items():
        for path, part in module.named_modules():
            for key in part._non_persistent_buffers_set:
                if isinstance(held := part._buffers.get(key), torch.Tensor) and not held.is_meta:
                    found[".".join(filter(None, (item, path, key)))] = held
    return found


def _print_of(buffer: torch.Tensor) -> object:
    return [(tuple(local.shape), contribution("", local)) for local in local_tensors(buffer)]


def _is_idle(candidate: object) -> bool:
    """A scaler that is switched off has no state."""
    return isinstance(candidate, torch.amp.GradScaler) and not candidate.is_enabled()


def _with_parts(objects: Iterable[object]) -> Iterator[object]:
    """The objects, what frameworks wrapped around them, and what they save as part of their own state."""
    for candidate in objects:
        yield candidate
        inner = real(candidate)
        if inner is not candidate:
            yield from _with_parts([inner])
        if isinstance(candidate, nn.Module):
            yield from candidate.modules()
        for inside in (INNER_SCHEDULES, "optimizer_"):
            value = getattr(candidate, inside, None)
            yield from _with_parts(value if isinstance(value, list | tuple) else [] if value is None else [value])
        for inside in ("loader", "_loader"):
            if (loader := getattr(candidate, inside, None)) is not None:
                yield from layers_of(loader)
                yield from rngs_of(loader)


def _name_of(candidate: object, frame: FrameType | None) -> str | None:
    while frame is not None:
        for names in (frame.f_locals, frame.f_globals):
            for name, value in names.items():
                if value is candidate and not name.startswith("_"):
                    return name
        frame = frame.f_back
    return None


def calling_frame(depth: int) -> FrameType | None:
    """The caller's frame, ``depth`` calls up."""
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None
