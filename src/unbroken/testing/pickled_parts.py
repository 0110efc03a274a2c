"""Parts that torch has pickled, compared value by value: after a resume the same values can have other bytes.

Pickle writes an object that is met twice as a reference to the first, and whether two equal strings or numbers are one
object depends on how they came to be. Read as ``torch.load(weights_only=True)`` does; objects of other classes are read
as plain data, and none of them is imported. What cannot be read so is compared by its bytes.
"""

import io
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from unbroken.foreign.pickles import UNREADABLE, ForeignFiles, PlainObject
from unbroken.store.digest import digest_bytes


def differing(part: str, a: bytes, b: bytes) -> list[str] | None:
    """The paths at which two pickled parts hold different values; None if one of them is not read as data."""
    one, other = read_pickled(part, a), read_pickled(part, b)
    return None if one is None or other is None else list(_places(part, one, other))


def read_pickled(part: str, data: bytes) -> object | None:
    """What a part holds, as data; None if it needs code to be read."""
    # The classes that it names, first: they are then read as plain data.
    asked = ForeignFiles(Path(part))
    try:
        found: object = asked.torch_bytes(io.BytesIO(data), part)
        if found is None and asked.classes and not asked.problems:
            again = ForeignFiles(Path(part), allowed={name for _, name in asked.classes})
            found = again.torch_bytes(io.BytesIO(data), part)
    except UNREADABLE:
        return None
    return found


def as_json(value: object) -> object:
    """A value as JSON holds it, each tensor by its type, shape and digest."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), digest_bytes(_bytes_of(value)).hex()]
    if isinstance(value, Mapping):
        return {str(key): as_json(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(held) for held in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _places(path: str, a: object, b: object) -> Iterator[str]:
    if isinstance(a, PlainObject) and isinstance(b, PlainObject) and a.name == b.name:
        yield from _places(path, [a.args, a.state], [b.args, b.state])
    elif type(a) is not type(b):
        yield path
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        # By the texts of their keys: two equal tensors are two keys.
        mine, theirs = ({repr(key): held for key, held in each.items()} for each in (a, b))
        yield from (f"{path}.{key}" for key in sorted(mine.keys() ^ theirs.keys()))
        for key in sorted(mine.keys() & theirs.keys()):
            yield from _places(f"{path}.{key.strip(chr(39))}", mine[key], theirs[key])
    elif isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str | bytes):
        if len(a) != len(b):
            yield path
        for index, (one, other) in enumerate(zip(a, b, strict=False)):
            yield from _places(f"{path}.{index}", one, other)
    elif not _is_equal(a, b):
        yield path


def _is_equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and _bytes_of(a) == _bytes_of(b)
    if isinstance(a, np.ndarray | np.generic) and isinstance(b, np.ndarray | np.generic):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    return (a == b) is True


def _bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = plain.to_dense() if plain.layout is not torch.strided else plain
    return bytes(plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
