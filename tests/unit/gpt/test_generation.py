"""Continuing a prompt: the cache changes no logit, a seed repeats a text, and bad prompts are named."""

from typing import Any

import pytest
import torch

from tests.unit.gpt.models import OPTIONS, VOCAB, config_of, error, model_of, tokens_of
from unbroken.errors import GenerationInvalid, LogitsNotFinite, SequenceTooLong
from unbroken.gpt import Sampling, generate, stream

GREEDY = Sampling(is_greedy=True)


@pytest.mark.promise("G22")
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
@pytest.mark.parametrize("pieces", [(24,), (1,) * 24, (10, 1, 5, 8)])
def test_logits_over_the_cache_are_those_of_the_whole(options: dict[str, Any], pieces: tuple[int, ...]) -> None:
    model = model_of(config_of(**options)).eval()
    tokens = tokens_of()
    cache = model.new_cache(batch=2, room=24)
    with torch.no_grad():
        whole = model(tokens)
        for piece in torch.split(tokens, list(pieces), dim=1):
            found = model.extend(piece, cache)
            assert error(found, whole[:, cache.length - 1]) < 1e-5
    assert cache.length == cache.room == 24


def test_greedy_text_is_what_asking_again_for_the_whole_gives() -> None:
    model = model_of(config_of()).eval()
    text = [3, 1, 4]
    for _ in range(12):
        with torch.no_grad():
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert generate(model, [3, 1, 4], max_new_tokens=12, sampling=GREEDY) == text[3:]
    assert generate(model, [3, 1, 4], max_new_tokens=12, sampling=GREEDY, return_full_text=True) == text


def test_a_seed_repeats_its_text_and_another_gives_another() -> None:
    model = model_of(config_of())
    texts = [generate(model, [3], max_new_tokens=20, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_no_global_generator_is_touched_and_the_mode_is_left_alone() -> None:
    model = model_of(config_of(dropout=0.5))
    before = torch.get_rng_state()
    first = generate(model, [3], max_new_tokens=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training and all(block.training for block in model.blocks)
    assert first == generate(model.eval(), [3], max_new_tokens=5)
    assert not model.training


def test_a_text_ends_before_the_first_stop_token() -> None:
    model = model_of(config_of())
    text = generate(model, [3], max_new_tokens=20, seed=1)
    stop = text[7]
    assert generate(model, [3], max_new_tokens=20, seed=1, stop_tokens={stop}) == text[: text.index(stop)]


def test_only_tokens_that_the_tokenizer_knows_are_chosen() -> None:
    model = model_of(config_of())
    assert max(generate(model, [3], max_new_tokens=30)) >= 10
    assert max(generate(model, [3], max_new_tokens=30, known_tokens=10)) < 10


def test_a_stream_gives_the_same_tokens_one_by_one() -> None:
    model = model_of(config_of())
    tokens = stream(model, [3], max_new_tokens=6, seed=2)
    assert [next(tokens), *tokens] == generate(model, [3], max_new_tokens=6, seed=2)


@pytest.mark.parametrize(
    ("prompt", "options", "problems"),
    [
        ([], {}, ["the prompt has no token"]),
        ([1, VOCAB], {}, [f"the prompt holds token {VOCAB}"]),
        ([-1], {"max_new_tokens": -1}, ["max_new_tokens must be", "the prompt holds token -1"]),
        ([1], {"known_tokens": 0}, ["known_tokens must be 1"]),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_generated(
    prompt: list[int], options: dict[str, Any], problems: list[str]
) -> None:
    with pytest.raises(GenerationInvalid) as caught:
        stream(model_of(config_of()), prompt, **options)
    found = caught.value.problems
    assert len(found) == len(problems) and all(a.startswith(b) for a, b in zip(found, problems, strict=True))


def test_a_text_may_fill_the_positions_and_not_one_more() -> None:
    model = model_of(config_of())
    assert len(generate(model, [1] * 10, max_new_tokens=23)) == 23
    with pytest.raises(SequenceTooLong, check=lambda each: each.tokens == 33):
        generate(model, [1] * 10, max_new_tokens=24)
    assert generate(model, [1] * 10, max_new_tokens=0) == []


def test_a_diverged_model_is_reported_and_not_sampled() -> None:
    model = model_of(config_of())
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(LogitsNotFinite):
        generate(model, [1], max_new_tokens=3)


def test_a_narrow_model_and_autocast_have_caches_of_their_dtype() -> None:
    tokens = tokens_of()
    narrow = model_of(config_of()).to(torch.bfloat16).eval()
    wide = model_of(config_of()).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = wide.new_cache(batch=2, room=24)
        under_autocast = wide.extend(tokens, cache)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(under_autocast, narrow.extend(tokens, narrow.new_cache(batch=2, room=24)))
