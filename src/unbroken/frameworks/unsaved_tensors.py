"""Tensors of a script that change while it trains and that the framework does not save: an average of the weights.

Looked at three times: after the first step of a job and at its first two saves. What does not change is no state of the
training, such as a teacher model; so only what has changed is named.
"""

from collections.abc import Collection, Iterator, Mapping
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from unbroken.state.audit import kind_of
from unbroken.state.items import Stateful
from unbroken.state.wrappers import real

_LOOKS: Final = 3
# So many values of a tensor are compared, beside its identity and torch's count of its changes.
_VALUES: Final = 16
_DEPTH: Final = 3


class UnsavedTensors:
    """Watches objects of the script, by name."""

    def __init__(self) -> None:
        self._before: dict[str, list[object]] = {}
        self._reported: set[str] = set()
        self._looks = 0

    @property
    def has_looked(self) -> bool:
        """Whether a first look was taken."""
        return self._looks > 0

    @property
    def is_over(self) -> bool:
        """Whether all looks are taken."""
        return self._looks >= _LOOKS

    def changed(self, candidates: Mapping[str, object], *, saved: Collection[object]) -> list[str]:
        """The names whose tensors have changed since the last look, each once; none in the first one.

        Args:
            candidates: the objects as they are now.
            saved: objects that the framework saves; their tensors do not count.
        """
        self._looks += 1
        known = {id(each) for each in _known(saved)}
        now = {name: _prints(value, known) for name, value in candidates.items()}
        now = {name: prints for name, prints in now.items() if prints}
        found = [name for name, prints in now.items() if self._before.get(name, prints) != prints]
        self._before = now
        found = [name for name in found if name not in self._reported]
        self._reported |= set(found)
        return found


def named_holders(frame: FrameType | None, *, ignore: Collection[str]) -> dict[str, object]:
    """What the caller's names stand for that may keep tensors as state: a table of them, an object with a state dict.

    Optimizers, loaders and the like are not among them: the audit names those.
    """
    if frame is None:
        return {}
    named = {**frame.f_globals, **frame.f_locals}
    if "self" in frame.f_locals:
        named |= {f"self.{name}": value for name, value in getattr(frame.f_locals["self"], "__dict__", {}).items()}
    return {
        name: value
        for name, value in named.items()
        if not name.startswith("_") and name not in ignore and _may_hold(value)
    }


def _may_hold(value: object) -> bool:
    if isinstance(value, dict):
        return any(isinstance(each, torch.Tensor) for each in value.values())
    return not isinstance(value, type) and isinstance(value, Stateful) and kind_of(type(value)) is None


def _known(saved: Collection[object]) -> Iterator[object]:
    for each in saved:
        yield each
        inner = real(each)
        yield inner
        if isinstance(inner, nn.Module):
            yield from inner.modules()
            yield from inner.parameters()
            yield from inner.buffers()


def _prints(value: object, known: Collection[int]) -> list[object]:
    return [_print_of(each) for each in _tensors(value, known, _DEPTH)]


def _print_of(tensor: torch.Tensor) -> object:
    row = tensor.detach()
    while row.dim() > 1 and len(row):
        row = row[0]
    # As text: a NaN is not equal to itself.
    return id(tensor), tensor._version, repr(row[:_VALUES].tolist() if row.dim() else row.item())


def _tensors(value: object, known: Collection[int], depth: int) -> Iterator[torch.Tensor]:
    """The tensors in a value; a number in a tensor is a measurement more often than state, and does not count."""
    if id(value) in known or id(real(value)) in known or depth < 0 or isinstance(value, type):
        return
    inner: Any = ()
    if isinstance(value, torch.Tensor):
        if value.dim() and not value.is_meta and value.layout is torch.strided and type(value) in _PLAIN:
            yield value
    elif isinstance(value, nn.Module):
        inner = [*value.parameters(), *value.buffers()]
    elif isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = value
    elif isinstance(value, Stateful):
        inner = list(getattr(value, "__dict__", {}).values())
    for each in inner:
        yield from _tensors(each, known, depth - 1)


_PLAIN: Final = (torch.Tensor, nn.Parameter)
