"""State that objects of a replayed loader keep from epoch to epoch: an epoch they count, a list they shuffle in place.

A sampler that counts its epochs by itself, or that shuffles the order of the epoch before, draws another order in a new
process than it did here. So the plain values of what the script wrote, its samplers, its dataset and a loader of its
own, are compared with those that it was made with. What differs when an epoch begins is kept beside the RNG states of
that time; what does not, the script's arguments above all, is always the script's. Objects of libraries are left alone:
the state of theirs that matters is known by name elsewhere. Of a dataset, numbers and orders are compared, and no texts
or flags: a directory that it made, or that it has opened a file, is not true of the next process.
"""

import hashlib
import operator
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader

from unbroken.state.rng import is_rng
from unbroken.state.wrappers import real_loader

_DEEPEST: Final = 5
_LONGEST: Final = 64
_MOST_OBJECTS: Final = 10_000
# An order of more numbers is not read to see whether it changes.
_MOST_NUMBERS: Final = 1 << 24
_SAMPLERS: Final = ("sampler", "batch_sampler")
# The dataset first: samplers hold it too, and what it opened is its own wherever it is found.
_FROM_LOADER: Final = ("dataset", *_SAMPLERS, "collate_fn", "sources")
# Of these libraries nothing is kept, but what a script gave them is looked for inside.
_OPENED: Final = ("torch.utils.data.", "torchdata.", "tqdm.")
_CLOSED: Final = ("torch.", "datasets.", "grain.", "numpy.", "accelerate.", "lightning.", "pytorch_lightning.")
# Whole numbers below it fit into a tensor.
_WORD: Final = 1 << 63
Path = tuple[str | int, ...]
_Place = tuple[Any, str | int, object]


class Remembered:
    """The plain values that a loader's objects had when it was given to a run."""

    def __init__(self, loader: object) -> None:
        self._loader = loader
        self._made = {path: _kept(value) for path, (_, _, value) in _places(loader).items()}

    def changed(self) -> list[list[Any]]:
        """Each value that differs now, with the path to it."""
        found = []
        for path, (_, _, value) in _places(self._loader).items():
            before = self._made.get(path)
            if not _is_same(before, value) and (said := _said(before, value)) is not None:
                found.append([list(path), said])
        return found

    def take(self, changed: list[list[Any]]) -> list[str]:
        """Set values that had changed; the paths of those that have no place here."""
        places, missing = _places(self._loader), []
        for at, said in changed:
            path = tuple(at)
            before = self._made.get(path)
            held = places.get(path)
            if held is None and len(path) > 1 and (above := _owner(self._loader, path)) is not None:
                # An attribute that is made when the first epoch begins.
                held = above, path[-1], None
            if held is None or not _set(held, before, said):
                missing.append(".".join(map(str, path)))
        return missing


# ---- where the values are ----


def _places(loader: object) -> dict[Path, _Place]:
    """Every plain value: its path, what holds it, its name there, and the value."""
    found: dict[Path, _Place] = {}
    seen: set[int] = set()
    for path, root in _roots(loader):
        for place, holder, name, value in _walk(path, root, seen):
            found[place] = holder, name, value
    return found


def _roots(loader: object) -> Iterator[tuple[Path, object]]:
    inner = real_loader(loader)
    is_own = not isinstance(inner, DataLoader) and not hasattr(inner, "sources")
    for name in _FROM_LOADER:
        if (held := getattr(inner, name, None)) is not None:
            yield (name,), held
    if is_own:
        yield ("loader",), inner


def _owner(loader: object, path: Path) -> object | None:
    """What a value with this path would be an attribute of."""
    held = dict(_roots(loader)).get(path[:1])
    for name in path[1:-1]:
        held = dict(_members(held)).get(name)
    return None if held is None or not _is_scripts(held) else held


def _walk(path: Path, held: object, seen: set[int]) -> Iterator[tuple[Path, object, str | int, object]]:
    if id(held) in seen or len(seen) > _MOST_OBJECTS or len(path) > _DEEPEST or not _is_opened(held):
        return
    seen.add(id(held))
    for name, value in _members(held):
        if _is_flag(value) and path[0] not in _SAMPLERS:
            continue
        if not _is_plain(value):
            yield from _walk((*path, name), value, seen)
        elif _is_scripts(held):
            yield (*path, name), held, name, value
            if isinstance(value, list):
                yield from _walk((*path, name), value, seen)


def _members(held: Any) -> list[tuple[str | int, object]]:  # noqa: ANN401 - whatever a script holds
    if isinstance(held, dict):
        return [each for each in list(held.items()) if isinstance(each[0], str)] if len(held) <= _LONGEST else []
    if isinstance(held, list | tuple):
        return [*enumerate(held)] if len(held) <= _LONGEST else []
    members = getattr(held, "__dict__", None)
    # A loader's iterator is made anew.
    return [each for each in list(members.items()) if each[0] != "_iterator"] if isinstance(members, dict) else []


def _is_opened(held: object) -> bool:
    if isinstance(held, type | ModuleType | FunctionType | torch.Tensor | torch.nn.Module) or is_rng(held):
        return False
    module = f"{type(held).__module__}."
    return module.startswith(_OPENED) or not module.startswith(_CLOSED)


def _is_scripts(held: object) -> bool:
    # The elements of a list are compared with the list.
    return not isinstance(held, tuple | list) and not f"{type(held).__module__}.".startswith(_OPENED)


# ---- values ----


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, bool | str)


def _is_plain(value: object) -> bool:
    """Whether a value is compared as one: a number, a text, an order of numbers, a list."""
    is_list = type(value) is list and len(value) <= _MOST_NUMBERS
    return is_list or _is_flag(value) or isinstance(value, int | float) or _is_order(value)


def _is_order(value: object) -> bool:
    """Whether it is a row of whole numbers, of numpy or torch."""
    if type(value) is torch.Tensor:
        is_whole = value.dtype in (torch.int16, torch.int32, torch.int64)
        return is_whole and value.device.type == "cpu" and value.dim() == 1 and value.numel() <= _MOST_NUMBERS
    return type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind == "i" and value.size <= _MOST_NUMBERS


def _kept(value: Any) -> object:  # noqa: ANN401
    """What shows later whether a value has changed; the elements of a list are those themselves."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return _digest(value)
    return value.copy() if isinstance(value, list) else value


def _digest(order: Any) -> tuple[object, ...]:  # noqa: ANN401 - of numpy or torch
    numbers = np.ascontiguousarray(order.detach().numpy() if isinstance(order, torch.Tensor) else order)
    return type(order), order.dtype, hashlib.blake2b(numbers.data).digest()


def _is_same(before: Any, value: Any) -> bool:  # noqa: ANN401
    if isinstance(value, torch.Tensor | np.ndarray):
        return bool(before == _digest(value))
    if type(before) is not type(value):
        return False
    if isinstance(value, list):
        return len(before) == len(value) and all(map(operator.is_, before, value))
    return bool(before == value)


# ---- a value as a checkpoint takes it ----


def _said(before: object, value: Any) -> dict[str, Any] | None:  # noqa: ANN401
    """What brings a value back; None for a list with elements that a new process cannot know."""
    if isinstance(value, torch.Tensor):
        return {"tensor": value.clone()}
    if isinstance(value, np.ndarray):
        return {"array": torch.from_numpy(value.copy())}
    if not isinstance(value, list):
        return {"value": value}
    if isinstance(before, list) and (places := _places_in(before, value)) is not None:
        return {"places": places}
    if len(value) <= _LONGEST and all(isinstance(each, bool | int | float | str) for each in value):
        return {"value": [*value]}
    if all(type(each) is int and abs(each) < _WORD for each in value):
        return {"numbers": torch.tensor(value, dtype=torch.int64)}
    return None


def _places_in(before: list[Any], value: list[Any]) -> torch.Tensor | None:
    """Where the elements of a shuffled list stood before; None if there are others among them."""
    # Of an object that stands there twice, either place will do.
    known = {id(each): at for at, each in enumerate(before)}
    found = [known.get(id(each), -1) for each in value]
    return None if -1 in found else torch.tensor(found, dtype=torch.int64)


def _set(place: _Place, before: object, said: Mapping[str, Any]) -> bool:
    """Put a value back; whether it has a place here."""
    holder, name, value = place
    if "places" in said:
        places = said["places"].tolist()
        if not isinstance(before, list) or not isinstance(value, list) or max(places, default=-1) >= len(before):
            return False
        # In place: other objects may hold the same list.
        value[:] = [before[at] for at in places]
        return True
    [(kind, made)] = said.items()
    if kind != "value":
        made = {"tensor": torch.clone, "array": lambda held: held.clone().numpy(), "numbers": torch.Tensor.tolist}[
            kind
        ](made)
    if isinstance(holder, dict):
        holder[name] = made
    else:
        holder.__dict__[name] = made
    return True
