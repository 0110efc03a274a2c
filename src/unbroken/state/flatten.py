"""A state dict flattened into named tensors and a JSON structure, and put together again.

A tensor's name is its item's name, a dot, and the keys and indices that lead to it, joined by dots: a module's
``{"a.weight": …}`` passed as ``model`` gives ``model.a.weight``, the name torch's own checkpoints give it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from unbroken.state.encode import Json, decode, encode
from unbroken.store.fields import Malformed


@dataclass(frozen=True)
class Flat:
    """A flattened state dict: the tensors by name, and everything else as JSON."""

    tensors: dict[str, torch.Tensor]
    structure: Json


def flatten(
    item: str, state: object, *, allow_pickle: bool, called: Callable[[str, torch.Tensor], str] | None = None
) -> Flat:
    """Flatten a state dict.

    The names depend on the order of the state dict alone, so equal state dicts give equal names on every rank.
    ``called`` may give a tensor another name than its path.

    Raises:
        NeedsPickle: it holds a value that only pickle could store, and that is not allowed.
    """
    tensors: dict[str, torch.Tensor] = {}

    def take(path: str, tensor: torch.Tensor) -> Json:
        # "a.b" as one key and "b" under "a" are two tensors on one path.
        wanted = called(path, tensor) if called is not None else path
        name, copy = wanted, 1
        while name in tensors:
            copy += 1
            name = f"{wanted}~{copy}"
        tensors[name] = tensor
        return name

    structure = encode(state, item=item, path=item, take_tensor=take, allow_pickle=allow_pickle)
    return Flat(tensors, structure)


def unflatten(structure: Json, tensors: Mapping[str, torch.Tensor], *, item: str, allow_pickle: bool) -> object:
    """Put a state dict together.

    Raises:
        Malformed: the structure is malformed, or names a missing tensor.
        NeedsPickle: it holds a pickle, and that is not allowed.
    """

    def give(name: Json) -> torch.Tensor:
        if not isinstance(name, str) or name not in tensors:
            raise Malformed(f"the state of {item!r} names a missing tensor: {name!r}")
        return tensors[name]

    return decode(structure, item=item, give_tensor=give, allow_pickle=allow_pickle)
