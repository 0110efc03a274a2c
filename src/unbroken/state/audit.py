"""What is alive and was not handed over: the state that a resume would lose without a word.

Looks at every live object once, when a run starts, for the kinds whose state matters: optimizers, schedulers, scalers,
averaged models and loaders that can say where they stand; and at the names of whoever starts it for generators of his
own, since those that libraries keep are nobody's business. What belongs to something that was handed over is not named.
"""

import gc
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from unbroken.state.cursor import generators_of


@dataclass(frozen=True)
class Unsaved:
    """One live object whose state nobody saves."""

    kind: str
    type_name: str
    called: str | None

    def __str__(self) -> str:
        where = f", called `{self.called}`" if self.called else ""
        return f"{self.kind} {self.type_name}{where}"


def kind_of(thing_type: type[object]) -> str | None:
    """The kind of state an object of a type carries, or None if none that we look for."""
    if issubclass(thing_type, torch.optim.Optimizer):
        return "optimizer"
    if issubclass(thing_type, LRScheduler | ReduceLROnPlateau):
        return "scheduler"
    if issubclass(thing_type, torch.amp.GradScaler):
        return "scaler"
    if issubclass(thing_type, AveragedModel):
        return "averaged model"
    return "loader" if "Loader" in thing_type.__name__ and hasattr(thing_type, "load_state_dict") else None


def audit(handed: Mapping[str, object], frame: FrameType | None) -> list[Unsaved]:
    """Live objects with state that were not handed over; ``frame`` is where their names are looked up."""
    known = {id(thing) for thing in _with_parts(handed.values())}
    found = []
    kinds: dict[type[object], str | None] = {}
    for thing in gc.get_objects():
        # type(), not isinstance(): a proxy may lie about its class, or raise when it is asked.
        thing_type = type(thing)
        if thing_type not in kinds:
            kinds[thing_type] = kind_of(thing_type)
        kind = kinds[thing_type]
        if kind is None or id(thing) in known or _is_idle(thing):
            continue
        found.append(Unsaved(kind, type(thing).__name__, _name_of(thing, frame)))
    found += _generators(handed.values(), frame)
    return sorted(found, key=lambda each: (each.kind, each.type_name, each.called or ""))


def _generators(handed: Iterable[object], frame: FrameType | None) -> list[Unsaved]:
    """Generators that the caller draws from beside the global ones, which every checkpoint has."""
    if frame is None:
        return []
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    served = {id(each) for thing in handed for each in generators_of(getattr(thing, "loader", thing))}
    globals_of_torch = {id(torch.default_generator), *map(id, torch.cuda.default_generators)}
    named = {**frame.f_globals, **frame.f_locals}
    return [
        Unsaved("generator", type(value).__name__, name)
        for name, value in named.items()
        # type(), not isinstance(), as above. The system's own source of randomness has no state.
        if issubclass(type(value), kinds)
        and not issubclass(type(value), random.SystemRandom)
        and id(value) not in served | globals_of_torch
    ]


def _is_idle(thing: object) -> bool:
    """A scaler that is switched off has no state."""
    return isinstance(thing, torch.amp.GradScaler) and not thing.is_enabled()


def _with_parts(things: Iterable[object]) -> Iterator[object]:
    """The things, and what they save as part of their own state."""
    for thing in things:
        yield thing
        if isinstance(thing, nn.Module):
            yield from thing.modules()
        for inside in ("_schedulers", "loader", "optimizer_", "_loader"):
            value = getattr(thing, inside, None)
            if isinstance(value, list | tuple):
                yield from _with_parts(value)
            elif value is not None:
                yield value


def _name_of(thing: object, frame: FrameType | None) -> str | None:
    while frame is not None:
        for names in (frame.f_locals, frame.f_globals):
            for name, value in names.items():
                if value is thing and not name.startswith("_"):
                    return name
        frame = frame.f_back
    return None


def calling_frame(depth: int) -> FrameType | None:
    """The frame of whoever called, ``depth`` calls up."""
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None
