"""Initial weights: as they are meant to be distributed, and functions of seed, name and place alone."""

import math

import pytest
import torch

from tests.unit.gpt.models import config_of
from unbroken.gpt.build import fill_normal, initialize
from unbroken.gpt.model import GPT


def initialized(seed: int = 7, **options: object) -> GPT:
    model = GPT(config_of(n_embd=128, n_layer=3, **options))
    initialize(model, torch.Generator().manual_seed(seed))
    return model


def test_every_parameter_has_its_distribution() -> None:
    for name, parameter in initialized(use_bias=True, norm="layernorm", tie_word_embeddings=False).named_parameters():
        values = parameter.detach()
        if name.endswith("bias"):
            assert not values.any()
        elif "norm" in name:
            assert bool((values == 1).all())
        else:
            is_residual = name.endswith(("out.weight", "down.weight"))
            expected = 0.02 / math.sqrt(6) if is_residual else 0.02
            assert abs(float(values.std()) / expected - 1) < 0.03, name
            assert abs(float(values.mean())) < expected / 20, name


def test_values_are_normal_in_their_moments_and_in_their_shares() -> None:
    values = torch.empty(1000, 1000)
    fill_normal(values, values.shape, (0, 0), key=3, deviation=1.0)
    assert abs(float(values.mean())) < 0.004
    assert abs(float(values.var()) - 1) < 0.006
    assert abs(float(values.pow(3).mean())) < 0.02
    assert abs(float(values.pow(4).mean()) - 2.9) < 0.04
    for bound, share in ((1.0, 0.6827), (2.0, 0.9545), (3.0, 0.9973)):
        assert abs(float((values.abs() < bound).float().mean()) - share) < 0.004
    # Neighbours in a row, in a column and across words have nothing to do with each other.
    for first, second in ((values[:, 1:], values[:, :-1]), (values[1:], values[:-1]), (values[2:], values[:-2])):
        assert abs(float((first * second).mean())) < 0.005


def test_a_box_has_the_values_it_has_in_the_whole() -> None:
    whole = torch.empty(37, 29)
    fill_normal(whole, whole.shape, (0, 0), key=5, deviation=0.02)
    for rows, columns in ((slice(0, 1), slice(0, 29)), (slice(11, 30), slice(0, 29)), (slice(5, 6), slice(7, 20))):
        box = torch.empty(rows.stop - rows.start, columns.stop - columns.start)
        fill_normal(box, whole.shape, (rows.start, columns.start), key=5, deviation=0.02)
        assert torch.equal(box, whole[rows, columns])


def test_the_bits_are_those_of_plain_integers() -> None:
    values = torch.empty(2, 3)
    key, mask = 0x0123456789ABCDEF, (1 << 64) - 1
    fill_normal(values, values.shape, (0, 0), key=key, deviation=1.0)

    def mixed(number: int) -> int:
        for factor in (0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            number = (number ^ (number >> 32)) * factor & mask
        return number ^ (number >> 32)

    for place, value in enumerate(values.flatten().tolist()):
        words = [mixed((3 * place + word + key) & mask) for word in range(3)]
        total = sum(word >> 16 * field & 0xFFFF for word in words for field in range(4))
        assert value == (total - 393_210) / 65_536


def test_the_seed_decides_and_names_differ() -> None:
    first, same, other = initialized(7), initialized(7), initialized(8)
    for one, two, three in zip(first.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert one.ndim == 1 or not torch.equal(one, three)
    assert not torch.equal(first.blocks[0].mlp.gate_up.weight, first.blocks[1].mlp.gate_up.weight)  # type: ignore[union-attr, arg-type]


def test_no_global_generator_is_touched() -> None:
    before = torch.get_rng_state()
    initialized()
    # Building a model draws, as every layer of torch does; filling it must not.
    model = GPT(config_of())
    torch.set_rng_state(before)
    initialize(model, torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_model_gets_the_rounded_values(dtype: torch.dtype) -> None:
    narrow = GPT(config_of(n_embd=128, n_layer=3)).to(dtype)
    initialize(narrow, torch.Generator().manual_seed(7))
    for one, two in zip(narrow.parameters(), initialized(7).parameters(), strict=True):
        assert torch.equal(one, two.to(dtype))
