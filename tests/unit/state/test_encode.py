import base64
import json
import math
import pickle
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken import torch_private
from unbroken.errors import NeedsPickle
from unbroken.state.encode import MAX_DEPTH, Json, decode, encode
from unbroken.store.fields import Malformed


def refuse_tensor(_path: str, _tensor: torch.Tensor) -> Json:
    raise AssertionError("no tensor was expected")


def give_none(_name: Json) -> torch.Tensor:
    raise Malformed("there is no tensor")


def through_json(value: object, *, allow_pickle: bool = False) -> object:
    made = encode(value, item="thing", path="thing", take_tensor=refuse_tensor, allow_pickle=allow_pickle)
    # Sorted and without NaN, as the strictest writer would: neither order nor bits may depend on the writer.
    text = json.dumps(made, sort_keys=True, allow_nan=False, ensure_ascii=False)
    text.encode("utf-8")
    return decode(json.loads(text), item="thing", give_tensor=give_none, allow_pickle=allow_pickle)


def read(found: Json) -> object:
    return decode(found, item="thing", give_tensor=give_none, allow_pickle=False)


def same(left: Any, right: Any) -> bool:  # noqa: ANN401 - whatever was stored
    """Equal in type, bits and order, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and not isinstance(left, np.generic):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, complex) and not isinstance(left, np.generic):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, np.ndarray):
        is_fortran = left.flags.f_contiguous
        return bool(
            left.dtype.str == right.dtype.str
            and left.shape == right.shape
            and is_fortran == right.flags.f_contiguous
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, np.generic):
        return bool(left.dtype == right.dtype and left.tobytes() == right.tobytes())
    if isinstance(left, dict):
        factories = getattr(left, "default_factory", None) is getattr(right, "default_factory", None)
        return factories and same(list(left.items()), list(right.items()))
    if isinstance(left, deque) and left.maxlen != right.maxlen:
        return False
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
raw_float = st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack(">d", raw)[0])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    raw_float,
    st.floats(),
    st.tuples(raw_float, raw_float).map(lambda pair: complex(*pair)),
    st.binary(max_size=8),
    any_text,
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 0, 3])]
    ),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 9)),
)
keys = st.one_of(
    st.integers(), any_text, st.booleans(), st.tuples(st.integers(), any_text), st.frozensets(st.integers())
)


def nest(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    pairs = st.lists(st.tuples(keys, inner), max_size=4)
    lists = st.lists(inner, max_size=4)
    return st.one_of(
        lists,
        lists.map(tuple),
        pairs.map(dict),
        pairs.map(OrderedDict),
        pairs.map(lambda entries: defaultdict(list, entries)),
        st.tuples(lists, st.sampled_from([None, 4, 9])).map(lambda made: deque(*made)),
        st.sets(st.one_of(any_text, st.integers())),
        st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers()),
    )


@settings(max_examples=300, deadline=None)
@given(st.recursive(scalars, nest, max_leaves=12))
def test_every_nested_value_comes_back_with_its_types_its_bits_and_its_order(value: object) -> None:
    assert same(through_json(value), value)


TAGS = [
    "Counter", "OrderedDict", "bytearray", "bytes", "complex", "defaultdict", "deque", "dict", "float",
    "frozenset", "int", "ndarray", "numpy", "pickle", "range", "set", "slice", "state_dict",
    "str", "tensor", "torch.Size", "torch.anneal", "torch.device", "torch.dtype", "tuple",
    "unknown",
]  # fmt: skip
json_leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), any_text)


def nest_json(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TAGS), inner, max_size=2)


@settings(max_examples=300, deadline=None)
@given(st.recursive(json_leaves, nest_json, max_leaves=8))
def test_reading_arbitrary_json_gives_a_value_or_says_that_it_is_malformed(found: Json) -> None:
    try:
        read(found)
    except (Malformed, NeedsPickle):
        return


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        math.inf,
        -math.inf,
        struct.unpack(">d", bytes.fromhex("7ff0dead0000beef"))[0],
        5e-324,
        1 << 20_000,
        -(1 << 63),
        1 << 63,
        "\ud800 half",
        bytearray(b"\0\xff"),
        Counter({"b": 2, "a": 1}),
        Counter({3: 1, 7: 2}),
        defaultdict(None, {1: 2}),
        deque([1, 2], maxlen=2),
        {(1, 2): "tuple", 1: "int", "1": "text", None: 0, 2.5: 1},
        {"z": 1, "a": 2},
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        np.complex64(1 - 2j),
        np.float16(-0.0),
        np.str_(""),
        np.str_("text\0"),
        np.bytes_(b"a\0"),
        np.datetime64("2024-01-02T03:04:05", "ns"),
        np.longdouble("0.1"),
        np.array([[1, 2], [3, 4]], dtype=">i2"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(2.5),
        np.zeros((0, 3), dtype=np.uint16),
        np.array(["ab", "c"]),
        np.frombuffer(bytes.fromhex("010000000000f87f"), dtype="<f8").copy(),
        {"anneal_func": torch_private.ANNEALING["cos"]},
        random.getstate(),
        np.random.get_state(),
        np.random.default_rng(3).bit_generator.state,
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_awkward_ones_come_back_bit_for_bit(value: object) -> None:
    assert same(through_json(value), value)


def test_a_strided_array_comes_back_as_the_elements_it_shows() -> None:
    array = np.arange(24).reshape(4, 6)[::2, ::3]
    found = through_json(array)
    assert isinstance(found, np.ndarray) and np.array_equal(found, array) and found.flags.writeable


def test_the_order_of_a_set_does_not_reach_the_file() -> None:
    members = ["b", "a", 3, 1]
    made = [
        encode(set(order), item="x", path="x", take_tensor=refuse_tensor, allow_pickle=False)
        for order in (members, members[::-1])
    ]
    assert made[0] == made[1] == {"set": ["a", "b", 1, 3]}


class Colour(Enum):
    RED = 1


class Text(str):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (Colour.RED, "Colour"),
        (Text("a"), "Text"),
        (Point(1, 2), "Point"),
        (object(), "object"),
        (len, "builtin_function_or_method"),
        (np.array([object()]), "ndarray"),
        (np.zeros(2, dtype=[("a", "i4")]), "ndarray"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (defaultdict(lambda: 0), "defaultdict"),
        ({torch.zeros(1): 1}, "Tensor as a key"),
    ],
)
def test_a_value_that_only_pickle_could_hold_is_refused_with_its_path_and_type(value: object, type_name: str) -> None:
    with pytest.raises(NeedsPickle) as refused:
        encode({"a": [0, value]}, item="ema", path="ema", take_tensor=refuse_tensor, allow_pickle=False)
    assert (refused.value.item, refused.value.path, refused.value.type_name) == ("ema", "ema.a.1", type_name)


def test_a_value_that_holds_itself_is_refused_and_one_that_is_there_twice_is_not() -> None:
    inner: list[object] = [1]
    assert through_json([inner, inner]) == [[1], [1]]
    inner.append(inner)
    with pytest.raises(NeedsPickle, match="holds itself"):
        through_json(inner)


def test_nesting_is_bounded_when_writing_and_when_reading() -> None:
    def nested(depth: int, around: Callable[[Json], Json]) -> Json:
        value: Json = 1
        for _ in range(depth):
            value = around(value)
        return value

    deepest = nested(MAX_DEPTH, lambda value: {"k": value})
    assert through_json(deepest) == deepest
    with pytest.raises(NeedsPickle, match="nested"):
        through_json([deepest])
    with pytest.raises(Malformed, match="nested"):
        read(nested(MAX_DEPTH + 1, lambda value: [value]))


def test_an_allowed_pickle_comes_back_and_is_not_opened_where_it_is_not_allowed() -> None:
    assert through_json({"c": Colour.RED}, allow_pickle=True) == {"c": Colour.RED}
    made = encode({"c": Colour.RED}, item="x", path="x", take_tensor=refuse_tensor, allow_pickle=True)
    with pytest.raises(NeedsPickle) as refused:
        read(made)
    assert (refused.value.path, refused.value.type_name) == ("x.c", "Colour")
    with pytest.raises(Malformed, match="cannot be opened"):
        decode({"pickle": ["x", "Colour", ""]}, item="x", give_tensor=give_none, allow_pickle=True)
    with pytest.raises(NeedsPickle, match="pickle refuses"):
        encode(lambda: 0, item="x", path="x", take_tensor=refuse_tensor, allow_pickle=True)


class Opened(Exception):
    pass


def open_it() -> None:
    raise Opened


class Trap:
    def __reduce__(self) -> tuple[object, tuple[()]]:
        return open_it, ()


def test_a_malicious_pickle_is_not_opened() -> None:
    bomb = pickle.dumps(Trap())
    with pytest.raises(Opened):
        pickle.loads(bomb)
    with pytest.raises(NeedsPickle):
        read({"pickle": ["x", "Trap", base64.b64encode(bomb).decode()]})


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"tuple": [], "list": []},
        {"object": 1},
        {"__class__": "os.system"},
        {"tuple": 1},
        {"tuple": {"tuple": []}},
        {"dict": [[1]]},
        {"dict": [[1, 2, 3]]},
        {"dict": {"a": 1}},
        {"dict": [[1, 2], [1, 3]]},
        {"dict": [[[], 1]]},
        {"dict": [[1, 2], [True, 3]]},
        {"set": [1, 1]},
        {"set": [[]]},
        {"int": "12x"},
        {"int": 12},
        {"float": "7ff8"},
        {"float": "zz"},
        {"float": None},
        {"complex": ["7ff8000000000000"]},
        {"str": "no base64!"},
        {"str": "/w=="},
        {"bytes": "ä"},
        {"bytes": "a"},
        {"range": [0, 5, 0]},
        {"range": [0, 5]},
        {"range": [0, "5", 1]},
        {"slice": [1]},
        {"deque": [-1, []]},
        {"deque": [1, [1, 2]]},
        {"deque": [1 << 80, []]},
        {"defaultdict": ["eval", []]},
        {"defaultdict": [["list"], []]},
        {"torch.dtype": "nn"},
        {"torch.dtype": "no_such"},
        {"torch.device": "toaster"},
        {"torch.anneal": "eval"},
        {"torch.anneal": ["cos"]},
        {"torch.Size": ["3"]},
        {"torch.Size": [True]},
        {"numpy": ["|O8", "AAAAAAAAAAA="]},
        {"numpy": ["<f4", "AAA="]},
        {"numpy": ["<f5", "AAAAAAA="]},
        {"numpy": ["<U", "/////w=="]},
        {"numpy": ["<U", "AAA="]},
        {"numpy": ["<U0", ""]},
        {"ndarray": ["<f4", [2], "C", "AAAAAA=="]},
        {"ndarray": ["<f4", [-1], "C", "AAAAAA=="]},
        {"ndarray": ["<f4", [0, 1 << 70], "C", ""]},
        {"ndarray": ["|S0", [1 << 60], "C", ""]},
        {"ndarray": ["<f4", [1], "K", "AAAAAA=="]},
        {"ndarray": ["i4,f4", [1], "C", "AAAAAAAAAAA="]},
        {"ndarray": ["<f4", [1] * 40, "C", "AAAAAA=="]},
        {"tensor": "nowhere"},
        {"state_dict": [[]]},
        {"pickle": "gASVBQAAAAAAAACMAWGULg=="},
        float("nan"),
        float("inf"),
    ],
    ids=lambda found: json.dumps(found)[:40],
)
def test_hostile_json_is_malformed_and_nothing_else(found: Json) -> None:
    with pytest.raises(Malformed):
        read({"tuple": [[found]]})
