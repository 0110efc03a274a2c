import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.state import fingerprint_reference as reference
from unbroken.state import mixing
from unbroken.state.fingerprint import combine, contribution, fingerprints
from unbroken.state.mixing import Add, HostPasses, Keys, Passes, Places, signed
from unbroken.world import World

ALONE = World(0, 1)
BIT_DTYPES = [torch.uint8, torch.int16, torch.int32, torch.int64]
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    # Since torch 2.7.
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),
]  # fmt: skip


# The passes by the size of their chunks: those of every device, and those of host memory.
WAYS: list[Callable[[int], Add]] = [lambda chunk: Passes(torch.device("cpu"), chunk), HostPasses]


def sample(dtype: torch.dtype, shape: Sequence[int], seed: int = 7) -> torch.Tensor:
    """A tensor of random bits."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size() * math.prod(shape)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(tuple(shape))


def print_of(tensor: torch.Tensor, name: str = "w") -> str:
    return fingerprints({name: tensor}, ALONE)[name]


def flip(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    raw = tensor.clone().reshape(-1)
    raw.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return raw.reshape(tensor.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4, 5)], ids=str)
def test_every_dtype_and_shape_gives_the_numbers_of_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = sample(dtype, shape)
    assert print_of(tensor) == reference.print_of("w", tensor)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, "9b155abc4e4b3c084ca9309d778ae1df"),
        (torch.bfloat16, "99516583f08c3f33b859105873b9acef"),
        (torch.float64, "d8863c890ab890d9d2aaf066e2984d0c"),
        (torch.uint8, "b3b7bc039da29a04f69d650ac36b582a"),
    ],
    ids=str,
)
def test_the_function_never_changes_since_checkpoints_hold_its_values(dtype: torch.dtype, expected: str) -> None:
    tensor = torch.arange(-50, 50).reshape(4, 25).to(dtype)
    assert print_of(tensor, "model.layer.weight") == expected


def test_the_digest_over_all_fingerprints_never_changes_and_has_no_order() -> None:
    prints = {"b": "1" * 32, "a": "2" * 32}
    assert combine(prints) == combine(dict(reversed(prints.items()))) == "7841da50a113432d87d7c8b2ab15f9bc"
    assert len({combine(prints), combine({**prints, "b": "2" * 32}), combine({"b": "1" * 32}), combine({})}) == 4
    assert combine({"a": "1" * 32, "b": "2" * 32}) != combine(prints)


@pytest.mark.promise("X2")
@settings(max_examples=150, deadline=None)
@given(st.sampled_from([dtype for dtype in DTYPES if dtype is not torch.bool]), st.integers(1, 40), st.data())
def test_one_flipped_bit_anywhere_is_seen_in_both_halves(dtype: torch.dtype, length: int, data: st.DataObject) -> None:
    tensor = sample(dtype, (length,))
    bit = data.draw(st.integers(0, tensor.nbytes * 8 - 1))
    before, after = print_of(tensor), print_of(flip(tensor, bit))
    assert before[:16] != after[:16] and before[16:] != after[16:]


def test_each_bit_of_each_element_counts_and_no_two_flips_look_alike() -> None:
    tensor = sample(torch.float32, (8, 8))
    seen = {print_of(flip(tensor, bit)) for bit in range(tensor.nbytes * 8)} | {print_of(tensor)}
    assert len(seen) == tensor.nbytes * 8 + 1


@pytest.mark.promise("X2")
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(BIT_DTYPES), st.lists(st.integers(-128, 127), min_size=2, max_size=30), st.data())
def test_any_other_order_of_the_elements_is_seen(dtype: torch.dtype, values: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(values))
    left, right = (torch.tensor([value % 128 for value in found], dtype=dtype) for found in (values, order))
    assert (print_of(left) == print_of(right)) == torch.equal(left, right)


@pytest.mark.promise("X2")
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 9))
def test_a_zeroed_tensor_is_seen(dtype: torch.dtype, seed: int) -> None:
    tensor = sample(dtype, (6, 5), seed)
    part = tensor.clone()
    part.view(torch.uint8).reshape(6, -1)[2] = 0
    assert len({print_of(tensor), print_of(part), print_of(torch.zeros_like(tensor))}) == 3


def test_the_name_the_dtype_and_the_shape_count_also_for_an_empty_tensor() -> None:
    for tensor in (sample(torch.float32, (6, 4)), torch.empty(0, 4), torch.zeros(4, 6)):
        prints = [
            print_of(tensor),
            print_of(tensor, "v"),
            print_of(tensor.view(torch.int32)),
            print_of(tensor.reshape(tensor.shape[1], tensor.shape[0])),
            print_of(tensor.reshape(-1)),
            print_of(tensor.reshape(1, *tensor.shape)),
        ]
        assert len(set(prints)) == len(prints)


def test_bits_count_and_not_values() -> None:
    assert print_of(torch.tensor([0.0])) != print_of(torch.tensor([-0.0]))
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert print_of(quiet[:1]) != print_of(quiet[1:]) and print_of(quiet[:1]) == print_of(quiet[:1].clone())


@pytest.mark.parametrize("add", WAYS, ids=["torch", "numpy"])
def test_a_number_and_its_complement_do_not_collide(add: Callable[[int], Add]) -> None:
    # An arithmetic shift where a logical one belongs makes exactly these two equal.
    keys = Keys(0, 0)
    sums = torch.zeros(2, 2, dtype=torch.int64)
    for row, word, place in ((0, 5, 9), (1, ~5, (1 << 32) - 1 - 9)):
        add(1)(torch.tensor([word], dtype=torch.int32), Places(place, (), False), keys, sums[row])
    assert sums[0].tolist() != sums[1].tolist()


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4), st.integers(1, 7), st.integers(1, 9), st.data()
)
def test_slices_chunks_and_strides_do_not_matter(
    dtype: torch.dtype, shape: list[int], ranks: int, chunk: int, data: st.DataObject
) -> None:
    straight = sample(dtype, shape)
    order = data.draw(st.permutations(range(len(shape))))
    back = [order.index(dim) for dim in range(len(shape))]
    strided = straight.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    expected = tuple(number % (1 << 64) for number in contribution("w", straight))
    before = mixing.CPU_CHUNK_WORDS, mixing.SLAB_ELEMENTS
    mixing.CPU_CHUNK_WORDS = mixing.SLAB_ELEMENTS = chunk  # type: ignore[misc]
    try:
        for tensor in (straight, strided):
            parts = [contribution("w", tensor, rank=rank, size=ranks) for rank in range(ranks)]
            assert tuple(sum(lane) % (1 << 64) for lane in zip(*parts, strict=True)) == expected
    finally:
        mixing.CPU_CHUNK_WORDS, mixing.SLAB_ELEMENTS = before  # type: ignore[misc]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=4))
def test_the_places_of_a_box_are_those_of_its_elements_in_the_whole(dims: list[tuple[int, int, int]]) -> None:
    whole = [length for length, _, _ in dims]
    offsets = [min(offset, length - 1) for length, offset, _ in dims]
    sizes = [min(size, length - offset) for (length, _, size), offset in zip(dims, offsets, strict=True)]
    places = Places.of(whole, offsets, sizes)
    found = [
        places.start + j + sum(j // period * jump for period, jump in places.jumps) for j in range(math.prod(sizes))
    ]
    assert found == reference.places_of(whole, offsets, sizes)


@pytest.mark.parametrize("start", [0, (1 << 32) - 3, 5 << 32, (1 << 62) + 11])
@pytest.mark.parametrize("jumps", [(), ((2, 1 << 33),), ((1, 7), (4, (1 << 40) - 1))], ids=str)
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("add", WAYS, ids=["torch", "numpy"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_places_beyond_32_bits_count_as_the_reference_counts_them(
    start: int, jumps: tuple[tuple[int, int], ...], chunk: int, add: Callable[[int], Add], dtype: torch.dtype
) -> None:
    words = sample(dtype, (9,))
    keys = Keys(0x0123456789ABCDEF, 0xFEDCBA9876543210)
    total = torch.zeros(2, dtype=torch.int64)
    add(chunk)(words, Places(start, jumps, True), keys, total)
    expected = [0, 0]
    for j, word in enumerate(words.tolist()):
        place = start + j + sum(j // period * jump for period, jump in jumps)
        for lane, number in enumerate(reference.lanes(word, place, keys.first, keys.second)):
            expected[lane] += number
    assert total.tolist() == [signed(number) for number in expected]


def test_a_tensor_of_more_than_32_bits_of_elements_is_counted_with_its_pages() -> None:
    assert not Places.of((1 << 32,), (0,), (5,)).is_paged
    assert Places.of((1 << 32, 2), (0, 0), (5, 2)).is_paged
    whole, offset = ((1 << 20) + 1, 1 << 20), 1 << 19
    tensor = sample(torch.bfloat16, (2, 3))
    prints = set()
    for row in (0, 1 << 12, 2 << 12, 1 << 20):
        total = torch.zeros(2, dtype=torch.int64)
        mixing.add_box(total, tensor[:1], whole=whole, offsets=(row, offset), keys=Keys(1, 2), add=HostPasses(4))
        prints.add(tuple(total.tolist()))
    assert len(prints) == 4


def test_own_tensors_are_hashed_like_all_others() -> None:
    tensor = sample(torch.float32, (5, 5))
    together = fingerprints({"a": tensor, "ranks.0.b": tensor, "c": tensor.t()}, ALONE, own={"ranks.0.b"})
    assert together == {name: reference.print_of(name, held) for name, held in
                        (("a", tensor), ("ranks.0.b", tensor), ("c", tensor.t()))}  # fmt: skip
    assert fingerprints({}, ALONE) == {}


def test_parameters_lone_elements_and_conjugate_views_are_hashed_by_what_they_show() -> None:
    tensor = sample(torch.float32, (3, 3))
    assert print_of(torch.nn.Parameter(tensor)) == print_of(tensor)
    assert print_of(torch.arange(2)[::2]) == print_of(torch.zeros(1, dtype=torch.int64))
    wave = torch.tensor([1 + 2j, 3 - 4j])
    assert print_of(wave.conj()) == print_of(wave.conj().resolve_conj()) != print_of(wave)
