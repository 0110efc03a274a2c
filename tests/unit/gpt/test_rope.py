"""Rotary positions: each kind of stretching has the frequencies of its definition, and a turn keeps lengths."""

import math

import pytest
import torch

from tests.unit.gpt.models import config_of
from unbroken.gpt.rope import Angles, frequencies_of, rotate, tables, yarn_scale


def test_plain_frequencies_fall_from_one_by_the_base() -> None:
    frequencies, scale = frequencies_of(config_of(n_embd=64, n_head=4, rope_base=10000.0))
    expected = [10000 ** (-pair / 8) for pair in range(8)]
    torch.testing.assert_close(frequencies, torch.tensor(expected))
    assert scale == 1.0


def test_linear_divides_every_frequency_by_the_factor() -> None:
    plain, _ = frequencies_of(config_of())
    linear, scale = frequencies_of(config_of(rope_scaling_type="linear", rope_scaling_factor=4.0))
    assert torch.equal(linear, plain / 4)
    assert scale == 1.0


def test_ntk_keeps_the_highest_frequency_and_stretches_the_lowest_by_the_whole_factor() -> None:
    plain, _ = frequencies_of(config_of(n_embd=64))
    ntk, scale = frequencies_of(config_of(n_embd=64, rope_scaling_type="ntk", rope_scaling_factor=4.0))
    assert ntk[0] == plain[0]
    torch.testing.assert_close(ntk[-1], plain[-1] / 4)
    assert bool((ntk[1:] < plain[1:]).all())
    assert scale == 1.0


def test_yarn_keeps_what_turns_often_and_stretches_what_never_turns_once() -> None:
    shape = {"n_embd": 256, "n_head": 2, "n_positions": 4096}
    plain, _ = frequencies_of(config_of(**shape))
    yarn, scale = frequencies_of(config_of(**shape, rope_scaling_type="yarn", rope_scaling_factor=8.0))
    torch.testing.assert_close(yarn[0], plain[0])
    torch.testing.assert_close(yarn[-1], plain[-1] / 8)
    assert bool((yarn <= plain * 1.000001).all()) and bool((yarn >= plain / 8.000001).all())
    assert scale == yarn_scale(8.0) == 0.1 * math.log(8) + 1


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn"])
def test_a_factor_of_one_stretches_nothing(kind: str) -> None:
    plain, stretched = tables(config_of()), tables(config_of(rope_scaling_type=kind, rope_scaling_factor=1.0))
    torch.testing.assert_close(plain.cosine, stretched.cosine, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(plain.sine, stretched.sine, rtol=1e-6, atol=1e-6)


def test_a_turn_keeps_lengths_and_depends_on_distance_alone() -> None:
    cosine, sine = tables(config_of(n_embd=32, n_head=1))
    query, key = torch.randn(32, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 32)

    def at(vector: torch.Tensor, place: int) -> torch.Tensor:
        return rotate(vector.view(1, 1, 1, -1), Angles(cosine[place], sine[place])).flatten()

    torch.testing.assert_close(at(query, 9).norm(), query.norm())
    torch.testing.assert_close(at(query, 9) @ at(key, 4), at(query, 15) @ at(key, 10), rtol=1e-5, atol=1e-5)
    assert not torch.isclose(at(query, 9) @ at(key, 4), at(query, 9) @ at(key, 5), rtol=1e-3)
