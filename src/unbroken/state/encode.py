"""Values of a state dict as tagged JSON, and back, exactly: every bit of a float, every kind of key, every order.

None, booleans, integers that 64 bits hold, finite floats, text and lists are themselves. Everything else is an object
with one member, whose name is the tag: ``{"tuple": [1, 2]}``. Tensors go to the caller, and what the caller returns for
one is stored in its place. What none of this can hold needs pickle, which is code, and is an error unless allowed.
Reading treats its input as hostile: it builds the types named here and calls nothing that the input names.
"""

import json
import math
import pickle
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import torch

from unbroken import torch_private
from unbroken.errors import NeedsPickle
from unbroken.state.arrays import (
    is_plain,
    read_array,
    read_bytes,
    read_scalar,
    write_array,
    write_bytes,
    write_scalar,
)
from unbroken.store.fields import Malformed

if TYPE_CHECKING:
    import numpy as np

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
TakeTensor: TypeAlias = Callable[[str, torch.Tensor], Json]
GiveTensor: TypeAlias = Callable[[Json], torch.Tensor]

# Deeper than any state dict, and shallow enough for the parser of JSON, which needs three levels for one of a dict.
MAX_DEPTH: Final = 128
_FACTORIES: Final[Mapping[str, type]] = {
    kind.__name__: kind for kind in (bool, bytes, dict, float, frozenset, int, list, set, str, tuple)
}


def encode(value: object, *, item: str, path: str, take_tensor: TakeTensor, allow_pickle: bool) -> Json:
    """A value as JSON.

    Args:
        value: what to encode.
        item: the item it belongs to, for messages.
        path: its name; what it holds is named by this, a dot, and the key or index.
        take_tensor: gets the path of each tensor and the tensor; what it returns is stored for it.
        allow_pickle: whether a value of another type may be pickled.

    Raises:
        NeedsPickle: a value is of a type that only pickle could store, and that is not allowed.
    """
    return _Encoder(item, take_tensor, allow_pickle).encode(value, path, 0)


def decode(found: Json, *, item: str, give_tensor: GiveTensor, allow_pickle: bool) -> object:
    """The value that ``encode`` made this of.

    Args:
        found: the JSON.
        item: the item it belongs to, for messages.
        give_tensor: gets what was stored for a tensor, returns the tensor.
        allow_pickle: whether what was pickled may be unpickled, which runs code that the file holds.

    Raises:
        Malformed: ``encode`` makes no such thing.
        NeedsPickle: a value was pickled, and that is not allowed here.
    """
    return _Decoder(item, give_tensor, allow_pickle).decode(found, 0)


class _Encoder:
    def __init__(self, item: str, take_tensor: TakeTensor, allow_pickle: bool) -> None:
        self._item = item
        self._take_tensor = take_tensor
        self._allow_pickle = allow_pickle
        self._open: set[int] = set()

    def encode(self, value: object, path: str, depth: int) -> Json:
        kind = type(value)
        if value is None or kind is bool:
            return cast("Json", value)
        if simple := _SIMPLE.get(kind):
            return simple(value)
        if isinstance(value, torch.Tensor):
            return {"tensor": self._take_tensor(path, value)}
        if is_plain(value):
            if kind.__name__ == "ndarray":
                return {"ndarray": cast("Json", write_array(cast("np.ndarray[Any, Any]", value)))}
            return {"numpy": cast("Json", write_scalar(cast("np.generic", value)))}
        if kind not in _CONTAINERS:
            named = next((name for name, known in torch_private.ANNEALING.items() if known is value), None)
            return self._pickled(value, path) if named is None else {"torch.anneal": named}
        if id(value) in self._open or depth == MAX_DEPTH:
            reason = "holds itself" if id(value) in self._open else f"is nested more than {MAX_DEPTH} deep"
            raise NeedsPickle(item=self._item, path=path, type_name=f"{kind.__name__} that {reason}")
        self._open.add(id(value))
        try:
            return self._container(value, path, depth + 1)
        finally:
            self._open.remove(id(value))

    def _container(self, value: object, path: str, depth: int) -> Json:
        if isinstance(value, list):
            return self._list(value, path, depth)
        if isinstance(value, set | frozenset):
            # Sorted, because the order of a set differs from process to process.
            members = [self._hashable(member, path, depth) for member in value]
            return {type(value).__name__: sorted(members, key=json.dumps)}
        if isinstance(value, deque):
            return {"deque": [value.maxlen, self._list(value, path, depth)]}
        if isinstance(value, defaultdict):
            factory = value.default_factory
            if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
                return self._pickled(value, path)
            name = None if factory is None else factory.__name__
            return {"defaultdict": [name, self._pairs(value, path, depth)]}
        if isinstance(value, OrderedDict) and torch_private.STATE_DICT_METADATA in vars(value):
            # A module's state dict carries the versions of its modules beside its entries.
            versions = vars(value)[torch_private.STATE_DICT_METADATA]
            metadata = self.encode(versions, f"{path}.{torch_private.STATE_DICT_METADATA}", depth)
            return {"state_dict": [self._pairs(value, path, depth), metadata]}
        if isinstance(value, slice):
            return {"slice": self._list((value.start, value.stop, value.step), path, depth)}
        if isinstance(value, dict):
            return {type(value).__name__: self._pairs(value, path, depth)}
        return {"tuple": self._list(cast("tuple[object, ...]", value), path, depth)}

    def _list(self, values: Iterable[object], path: str, depth: int) -> list[Json]:
        return [self.encode(value, f"{path}.{index}", depth) for index, value in enumerate(values)]

    def _pairs(self, values: Mapping[Any, object], path: str, depth: int) -> list[Json]:
        return [
            [self._hashable(key, path, depth), self.encode(value, f"{path}.{key}", depth)]
            for key, value in values.items()
        ]

    def _hashable(self, value: object, path: str, depth: int) -> Json:
        if isinstance(value, torch.Tensor):  # it is found again by its identity alone, which nothing can store
            raise NeedsPickle(item=self._item, path=path, type_name=f"{type(value).__name__} as a key")
        return self.encode(value, path, depth)

    def _pickled(self, value: object, path: str) -> Json:
        name = type(value).__qualname__
        if not self._allow_pickle:
            raise NeedsPickle(item=self._item, path=path, type_name=name)
        try:
            raw = pickle.dumps(value, protocol=4)
        except (pickle.PicklingError, AttributeError, TypeError) as refused:
            raise NeedsPickle(item=self._item, path=path, type_name=f"{name} that pickle refuses") from refused
        return {"pickle": [_text(path), name, write_bytes(raw)]}


def _int(value: int) -> Json:
    # JSON has integers of any length, but many readers have not.
    return value if -(1 << 63) <= value < 1 << 63 else {"int": hex(value)}


def _float(value: float) -> Json:
    return value if math.isfinite(value) else {"float": _float_bits(value)}


def _float_bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _text(value: str) -> Json:
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, which file names can hold
        return {"str": write_bytes(value.encode("utf-8", "surrogatepass"))}
    return value


_SIMPLE: Final[dict[type, Callable[[Any], Json]]] = {
    int: _int,
    float: _float,
    str: _text,
    complex: lambda value: {"complex": [_float_bits(value.real), _float_bits(value.imag)]},
    bytes: lambda value: {"bytes": write_bytes(value)},
    bytearray: lambda value: {"bytearray": write_bytes(bytes(value))},
    range: lambda value: {"range": [_int(value.start), _int(value.stop), _int(value.step)]},
    torch.dtype: lambda value: {"torch.dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"torch.device": str(value)},
    torch.Size: lambda value: {"torch.Size": list(value)},
}
_CONTAINERS: Final = frozenset({list, tuple, dict, set, frozenset, OrderedDict, Counter, defaultdict, deque, slice})


class _Decoder:
    def __init__(self, item: str, give_tensor: GiveTensor, allow_pickle: bool) -> None:
        self._item = item
        self._give_tensor = give_tensor
        self._allow_pickle = allow_pickle

    def decode(self, found: Json, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise Malformed(f"a value is nested more than {MAX_DEPTH} deep")
        if found is None or isinstance(found, bool | int | str):
            return found
        if isinstance(found, float):
            if not math.isfinite(found):
                raise Malformed(f"{found} is stored as a number")
            return found
        if isinstance(found, list):
            return [self.decode(value, depth + 1) for value in found]
        if len(found) != 1:
            raise Malformed("a value has not one tag")
        ((tag, content),) = found.items()
        try:
            return self._tagged(tag, content, depth)
        except NeedsPickle:
            raise
        except (ValueError, TypeError, OverflowError, RuntimeError, struct.error) as refused:
            raise Malformed(f"what is tagged {tag!r} is none: {refused}") from refused

    def _tagged(self, tag: str, content: Json, depth: int) -> object:
        if tag == "tensor":
            return self._give_tensor(content)
        if simple := _SIMPLE_TAGS.get(tag):
            return simple(content)
        if tag in _SEQUENCE_TAGS:
            return self._sequence(tag, self._members(content, depth))
        if tag in ("dict", "OrderedDict", "Counter"):
            return self._filled({"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[tag](), content, depth)
        if tag == "defaultdict":
            factory, pairs = _exactly(content, 2)
            if factory is None:
                return self._filled(defaultdict(), pairs, depth)
            if not isinstance(factory, str) or factory not in _FACTORIES:
                raise Malformed(f"{factory!r} is no factory of a defaultdict")
            return self._filled(defaultdict(_FACTORIES[factory]), pairs, depth)
        if tag == "state_dict":
            pairs, metadata = _exactly(content, 2)
            state = self._filled(OrderedDict(), pairs, depth)
            vars(state)[torch_private.STATE_DICT_METADATA] = self.decode(metadata, depth + 1)
            return state
        if tag == "deque":
            maxlen, members = _exactly(content, 2)
            values = self._members(members, depth)
            if maxlen is not None and (type(maxlen) is not int or len(values) > maxlen):
                raise Malformed(f"a deque of at most {maxlen!r} has {len(values)} members")
            return deque(values, maxlen)
        if tag == "pickle":
            return self._unpickled(content)
        raise Malformed(f"{tag!r} is no known tag")

    def _members(self, content: Json, depth: int) -> list[object]:
        if not isinstance(content, list):
            raise Malformed("members are no list")
        return [self.decode(value, depth + 1) for value in content]

    def _sequence(self, tag: str, members: list[object]) -> object:
        if tag == "slice":
            start, stop, step = members
            return slice(start, stop, step)
        if tag == "tuple":
            return tuple(members)
        found = set(members) if tag == "set" else frozenset(members)
        if len(found) != len(members):
            raise Malformed("a set has a member twice")
        return found

    def _filled(self, into: dict[Any, Any], pairs: Json, depth: int) -> dict[Any, Any]:
        if not isinstance(pairs, list):
            raise Malformed("entries are no list")
        for pair in pairs:
            key, value = (self.decode(half, depth + 1) for half in _exactly(pair, 2))
            into[key] = value
        if len(into) != len(pairs):
            raise Malformed("a key is there twice")
        return into

    def _unpickled(self, content: Json) -> object:
        path, name, raw = _exactly(content, 3)
        if not self._allow_pickle:
            raise NeedsPickle(item=self._item, path=str(self.decode(path, 0)), type_name=str(name))
        try:
            return pickle.loads(read_bytes(raw))  # noqa: S301 - the user allowed it by name
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError) as refused:
            raise Malformed(f"a pickle of {name!r} cannot be opened: {refused}") from refused


def _exactly(content: Json, count: int) -> list[Json]:
    if not isinstance(content, list) or len(content) != count:
        raise Malformed(f"a tagged value is no list of {count}")
    return content


def _texts(content: Json, count: int) -> list[str]:
    fields = _exactly(content, count)
    if not all(isinstance(field, str) for field in fields):
        raise Malformed("a tagged value is no text")
    return cast("list[str]", fields)


def _read_float(content: Json) -> float:
    (bits,) = _texts([content], 1)
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    return cast("float", number)


def _read_int(content: Json) -> int:
    if type(content) is int:
        return content
    (digits,) = _texts([content.get("int") if isinstance(content, dict) else None], 1)
    return int(digits, 16)


def _read_dtype(content: Json) -> torch.dtype:
    (name,) = _texts([content], 1)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Malformed(f"{name!r} is no dtype of torch")
    return found


def _read_annealing(content: Json) -> object:
    (name,) = _texts([content], 1)
    if name not in torch_private.ANNEALING:
        raise Malformed(f"{name!r} is no annealing function of torch")
    return torch_private.ANNEALING[name]


def _read_size(content: Json) -> torch.Size:
    if not isinstance(content, list) or not all(type(length) is int for length in content):
        raise Malformed("a size is no list of integers")
    return torch.Size(cast("list[int]", content))


_SIMPLE_TAGS: Final[Mapping[str, Callable[[Json], object]]] = {
    "int": lambda content: int(_texts([content], 1)[0], 16),
    "float": _read_float,
    "str": lambda content: read_bytes(content).decode("utf-8", "surrogatepass"),
    "complex": lambda content: complex(*map(_read_float, _texts(content, 2))),
    "bytes": read_bytes,
    "bytearray": lambda content: bytearray(read_bytes(content)),
    "range": lambda content: range(*map(_read_int, _exactly(content, 3))),
    "torch.dtype": _read_dtype,
    "torch.device": lambda content: torch.device(_texts([content], 1)[0]),
    "torch.Size": _read_size,
    "torch.anneal": _read_annealing,
    "numpy": read_scalar,
    "ndarray": read_array,
}
_SEQUENCE_TAGS: Final = frozenset({"tuple", "set", "frozenset", "slice"})
