"""Continuing a prompt, one token at a time, over a cache of keys and values.

Prompts are continued one by one, so that the result never depends on other prompts of a batch. This module works on
tokens; text is in ``text``.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from unbroken.errors import GenerationInvalid, LogitsNotFinite, SequenceTooLong
from unbroken.gpt.attention import KeyValueCache
from unbroken.gpt.model import GPT
from unbroken.gpt.sampling import Sampling

# ---- choosing a token ----


def choose(logits: Tensor, seen: Collection[int], sampling: Sampling, generator: torch.Generator) -> int:
    """One token from the logits of a whole vocabulary, fp32 on the CPU; ``seen`` are prompt and generated tokens."""
    logits = _penalized(logits, seen, sampling.repetition_penalty)
    if sampling.is_greedy:
        return int(logits.argmax())
    # Stable, so that equal logits keep the order of their tokens on every machine.
    ranked, tokens = torch.sort(_sharpened(logits, sampling.temperature), descending=True, stable=True)
    probabilities = torch.softmax(ranked[: sampling.top_k or None], dim=0)
    if sampling.top_p is not None:
        # The sum before a token decides, so the most likely one is always kept, even if top_p is zero in fp32.
        is_kept = probabilities.cumsum(0) - probabilities < sampling.top_p
        is_kept[0] = True
        probabilities = torch.where(is_kept, probabilities, 0.0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def _sharpened(logits: Tensor, temperature: float) -> Tensor:
    sharp = logits / temperature
    if bool(sharp.isfinite().all()):
        return sharp
    # So low that the largest quotient overflows fp32; relative to it, all are finite.
    return ((logits.double() - logits.max()) / temperature).float()


def _penalized(logits: Tensor, seen: Collection[int], penalty: float) -> Tensor:
    """Make tokens that were seen less likely: positive logits are divided by the penalty, negative ones multiplied."""
    if penalty == 1 or not seen:
        return logits
    places = torch.tensor(sorted(set(seen)))
    logits = logits.clone()
    chosen = logits[places]
    # An extreme penalty gives the largest finite number, never Inf or NaN.
    logits[places] = torch.nan_to_num(torch.where(chosen < 0, chosen * penalty, chosen / penalty))
    return logits


# ---- continuing a prompt ----


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
        model: evaluated in evaluation mode; its mode is restored.
        prompt: at least one token.
        max_new_tokens: the maximum number of new tokens.
        sampling: how each token is chosen.
        seed: the seed of the RNG.
        stop_tokens: any of these ends the text; it is not part of it.
        known_tokens: only tokens below this are chosen; the embedding may have rows that the tokenizer does not use.
        return_full_text: whether to return the prompt as well.

    Raises:
        GenerationInvalid: the prompt is empty or holds tokens the model does not have.
        SequenceTooLong: prompt and new tokens exceed the model's positions.
        LogitsNotFinite: the logits are NaN or Inf.
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
    """The same tokens as an iterator. Arguments and errors are those of ``generate``."""
    _check(model, prompt, max_new_tokens, known_tokens)
    # Not a generator itself: errors are raised by the call, not by the first token.
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
    # The mode is set per call: the caller may train the model between two tokens.
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
        problems.append("the prompt has no tokens; at least one is needed")
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
