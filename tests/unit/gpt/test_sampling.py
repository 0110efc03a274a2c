"""Choosing a token: each option does what it says, alone; a seed repeats its choices."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from unbroken.errors import GenerationInvalid
from unbroken.gpt.generation import choose
from unbroken.gpt.sampling import Sampling

PLAIN = {"temperature": 1.0, "top_k": None, "top_p": None}


def logits(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities).log()


def drawn(given: Tensor, sampling: Sampling, times: int = 2000, seen: tuple[int, ...] = ()) -> Counter[int]:
    generator = torch.Generator().manual_seed(4)
    return Counter(choose(given, seen, sampling, generator) for _ in range(times))


def test_tokens_come_as_often_as_they_are_likely() -> None:
    counts = drawn(logits(0.5, 0.3, 0.2), Sampling(**PLAIN))  # type: ignore[arg-type]
    assert abs(counts[0] / 2000 - 0.5) < 0.04 and abs(counts[1] / 2000 - 0.3) < 0.04


def test_greedy_takes_the_most_likely_and_the_first_of_equals() -> None:
    assert drawn(logits(0.2, 0.4, 0.4), Sampling(is_greedy=True), 5) == {1: 5}


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    given = logits(0.6, 0.4)
    cold, hot = (drawn(given, Sampling(temperature=t, top_k=None, top_p=None)) for t in (0.1, 100.0))
    assert cold[0] > 1900
    assert abs(hot[0] - 1000) < 100


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, {1}), (2, {1, 3}), (3, {1, 3, 0}), (9, {0, 1, 2, 3}), (0, {0, 1, 2, 3})]
)
def test_top_k_keeps_the_most_likely(top_k: int, kept: set[int]) -> None:
    assert set(drawn(logits(0.2, 0.4, 0.1, 0.3), Sampling(temperature=1.0, top_k=top_k, top_p=None))) == kept


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, {1}), (0.39, {1}), (0.41, {1, 3}), (0.71, {1, 3, 0}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_most_likely_up_to_a_sum(top_p: float, kept: set[int]) -> None:
    assert set(drawn(logits(0.2, 0.4, 0.1, 0.3), Sampling(temperature=1.0, top_k=None, top_p=top_p))) == kept


def test_equal_logits_are_cut_in_the_order_of_their_tokens() -> None:
    assert set(drawn(torch.zeros(1000), Sampling(top_k=3, top_p=None))) == {0, 1, 2}


def test_a_penalty_makes_seen_tokens_less_likely_whatever_their_sign() -> None:
    given = torch.tensor([2.0, -0.5, 1.9, -0.6])
    sampling = Sampling(is_greedy=True, repetition_penalty=1.5)
    generator = torch.Generator()
    assert choose(given, (), sampling, generator) == 0
    assert choose(given, (0, 0), sampling, generator) == 2
    assert choose(given[[1, 3]], (0,), sampling, generator) == 1
    assert given.tolist() == torch.tensor([2.0, -0.5, 1.9, -0.6]).tolist()


@pytest.mark.parametrize("temperature", [1e-37, 1e-39, 1e-45, 1e-60, 1e-320])
def test_as_cold_as_can_be_it_takes_the_most_likely(temperature: float) -> None:
    given = torch.tensor([5.0, -3.0, 9.0, 8.9])
    assert set(drawn(given, Sampling(temperature=temperature), 20)) == {2}


@pytest.mark.parametrize("penalty", [1e-320, 1e-45, 1e-30, 1e30, 1e60])
@pytest.mark.parametrize("is_greedy", [False, True])
def test_a_penalty_out_of_all_proportion_still_leaves_a_choice(penalty: float, is_greedy: bool) -> None:
    sampling = Sampling(repetition_penalty=penalty, is_greedy=is_greedy)
    found = drawn(torch.tensor([1.0, 2.0, 0.0, -1.0, 3.0]), sampling, 20, seen=(0, 2, 3))
    assert set(found) <= ({0} if penalty < 1 else {1, 4})


def test_the_smallest_top_p_keeps_one() -> None:
    assert set(drawn(logits(0.3, 0.7), Sampling(temperature=1.0, top_k=None, top_p=1e-300), 20)) == {1}


def test_all_bad_options_are_named_at_once() -> None:
    with pytest.raises(GenerationInvalid) as caught:
        Sampling(temperature=0.0, top_k=-3, top_p=1.5, repetition_penalty=float("nan"))
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "temperature",
        "top_k",
        "top_p",
        "repetition_penalty",
    ]
    assert caught.value.problems[1] == "top_k must be 0 (all) or more, is -3"
