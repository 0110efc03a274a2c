"""Continuing a prompt, one token at a time, over a cache of keys and values.

Prompts are continued one by one: what a prompt becomes never depends on its company in a batch. Tokens go in and come
out; what they mean is the tokenizer's business.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from unbroken.errors import GenerationInvalid, LogitsNotFinite, SequenceTooLong
from unbroken.gpt.cache import KeyValueCache
from unbroken.gpt.model import GPT
from unbroken.gpt.sampling import Sampling, choose


def generate(
    model: GPT,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 100,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
    known_tokens: int | None = None,
    return_full_text: bool = False,
) -> list[int]:
    """The tokens that follow a prompt, or with ``return_full_text`` the prompt and them.

    Args:
        model: it is asked in evaluation mode, and left in the mode it was in.
        prompt: at least one token.
        max_new_tokens: how many at most.
        sampling: how each is chosen.
        seed: of the generator that draws them.
        stop_tokens: the first of these ends the text; it is not part of it.
        known_tokens: only tokens below this are chosen: a vocabulary may have rows that the tokenizer does not know.
        return_full_text: whether the prompt comes first in what is returned.

    Raises:
        GenerationInvalid: the prompt is empty or holds tokens the model does not have.
        SequenceTooLong: prompt and new tokens are more than the model has positions.
        LogitsNotFinite: the model's weights have diverged.
    """
    new = stream(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        stop_tokens=stop_tokens,
        known_tokens=known_tokens,
    )
    return [*prompt, *new] if return_full_text else list(new)


def stream(
    model: GPT,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 100,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
    known_tokens: int | None = None,
) -> Iterator[int]:
    """The same tokens, each as soon as it is chosen. Arguments and errors are those of ``generate``."""
    _check(model, prompt, max_new_tokens, known_tokens)
    # A generator function of its own: what is wrong is raised by the call, not by the first token.
    return _stream(model, prompt, max_new_tokens, sampling or Sampling(), seed, stop_tokens, known_tokens)


def _stream(
    model: GPT,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    stop_tokens: Collection[int],
    known_tokens: int | None,
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    cache = model.new_cache(batch=1, room=len(prompt) + max_new_tokens)
    text = list(prompt)
    fed = 0
    for _ in range(max_new_tokens):
        logits = _next_logits(model, text[fed:], cache)[:known_tokens]
        fed = len(text)
        if not bool(logits.isfinite().all()):
            raise LogitsNotFinite(tokens=fed)
        token = choose(logits, text, sampling, generator)
        if token in stop_tokens:
            return
        text.append(token)
        yield token


@torch.no_grad()
def _next_logits(model: GPT, tokens: Sequence[int], cache: KeyValueCache) -> Tensor:
    # The mode is set for each call alone: whoever takes the tokens may train the model between two of them.
    was_training = model.training
    model.eval()
    try:
        row = torch.tensor([tokens], device=model.embedding.weight.device)
        return model.extend(row, cache)[0].cpu()
    finally:
        model.train(was_training)


def _check(model: GPT, prompt: Sequence[int], max_new_tokens: int, known_tokens: int | None) -> None:
    problems = []
    if not prompt:
        problems.append("the prompt has no token; a text needs one to begin with")
    if max_new_tokens < 0:
        problems.append(f"max_new_tokens must be at least 0, is {max_new_tokens}")
    if known_tokens is not None and not 1 <= known_tokens <= model.vocab_size:
        problems.append(f"known_tokens must be 1 to {model.vocab_size}, is {known_tokens}")
    foreign = sorted({token for token in prompt if not 0 <= token < model.vocab_size})
    if foreign:
        problems.append(f"the prompt holds token {foreign[0]}; the model has {model.vocab_size}")
    if problems:
        raise GenerationInvalid(problems=tuple(problems))
    # The last token is chosen and never read.
    needed = len(prompt) + max(max_new_tokens - 1, 0)
    if needed > model.config.n_positions:
        raise SequenceTooLong(tokens=needed, positions=model.config.n_positions)
