"""Values that a loop carries from one step to the next: a prefetched batch, a hidden state, a running value.

Such a value is made in one step and used in a later one, so a resume that starts at the edge between them needs it.
``Carried`` keeps the newest value under each name, a checkpoint stores them, and after a resume the first call for a
name returns the stored value instead of a new one.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unbroken.state.flatten import flatten

CARRIED = "carried"


class Carried:
    """The values a loop carries over its edges, by name; an item of every run."""

    def __init__(self) -> None:
        self._values: dict[str, object] = {}
        # Restored by a resume and not fetched yet.
        self._waiting: dict[str, object] = {}

    @property
    def is_filled(self) -> bool:
        """Whether there is anything to store."""
        return bool(self._values or self._waiting)

    @property
    def names(self) -> set[str]:
        """The names under which something is carried."""
        return {*self._values, *self._waiting}

    @property
    def waiting(self) -> list[str]:
        """The names that a resume restored and the loop has not fetched yet."""
        return sorted(self._waiting)

    def carry(self, name: str, make: object, *, is_pickle_allowed: bool) -> Any:  # noqa: ANN401 - the caller's own value
        """The value stored for a name, the first time after a resume; else a new one, kept for the next checkpoint.

        Raises:
            NeedsPickle: the value is of a type that a checkpoint cannot store.
        """
        if name in self._waiting:
            value = self._waiting.pop(name)
        else:
            value = make() if callable(make) else make
            if name not in self._values:
                # Checked where the loop calls, not at the first save many steps later.
                flatten(f"{CARRIED}.{name}", value, allow_pickle=is_pickle_allowed)
        self._values[name] = value
        return value

    def at_edge(self) -> dict[str, object]:
        """The values as they stand now, for ``put_back``."""
        return dict(self._values)

    def put_back(self, values: dict[str, object]) -> None:
        """Hold the values of an earlier edge again: those made since belong to an abandoned step."""
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        """Every value, and the kind of device each of its tensors is on."""
        values = {**self._waiting, **self._values}
        return {
            name: {"value": _tensors(value, torch.Tensor.detach), "devices": _devices(value)}
            for name, value in values.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold stored values until they are fetched, their tensors on the device they were on."""
        self._values = {}
        self._waiting = {name: _placed(kept["value"], iter(kept["devices"])) for name, kept in state.items()}


def _tensors(value: object, change: Callable[[torch.Tensor], object]) -> object:
    """A value with each of its tensors changed, in a fixed order."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _tensors(each, change)) for key, each in value.items())  # type: ignore[attr-defined, call-arg]
    if type(value) in (list, tuple, deque):
        return type(value)(_tensors(each, change) for each in value)  # type: ignore[attr-defined, call-arg]
    return value


def _devices(value: object) -> list[str]:
    found: list[str] = []
    _tensors(value, lambda tensor: found.append(tensor.device.type))
    return found


def _placed(value: object, devices: Iterator[str]) -> object:
    def place(tensor: torch.Tensor) -> torch.Tensor:
        kind = next(devices, "cpu")
        # By kind, not by number: the same rank may be given another GPU in its next job.
        is_there = kind != "cuda" or torch.cuda.is_available()
        return tensor.to(kind) if is_there else tensor

    return _tensors(value, place)
