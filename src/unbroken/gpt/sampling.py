"""Choosing the next token from its logits: greedy, or drawn after penalty, temperature, top-k and top-p, in this order.

It is done on the CPU in fp32, from a generator of its own: the same seed gives the same choice wherever the model runs,
as long as its logits are the same.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unbroken.errors import GenerationInvalid


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; ``top_k`` of 0 or None, ``top_p`` of None, ``repetition_penalty`` of 1 change nothing.

    Raises:
        GenerationInvalid: a value is out of its range; all such values are named.
    """

    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float | None = 0.95
    is_greedy: bool = False
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        problems = tuple(self._problems())
        if problems:
            raise GenerationInvalid(problems=problems)

    def _problems(self) -> Iterator[str]:
        # Written as "not inside": a value that is no number is inside nothing.
        if not 0 < self.temperature < float("inf"):
            yield f"temperature must be above 0, is {self.temperature}; greedy takes the most likely token"
        if self.top_k is not None and self.top_k < 0:
            yield f"top_k must be 0 (all) or more, is {self.top_k}"
        if self.top_p is not None and not 0 < self.top_p <= 1:
            yield f"top_p must be above 0 and at most 1, is {self.top_p}"
        if not 0 < self.repetition_penalty < float("inf"):
            yield f"repetition_penalty must be above 0, is {self.repetition_penalty}"


def choose(logits: Tensor, seen: Collection[int], sampling: Sampling, generator: torch.Generator) -> int:
    """One token from the logits of a whole vocabulary, fp32 on the CPU; ``seen`` are prompt and generated tokens."""
    logits = _penalized(logits, seen, sampling.repetition_penalty)
    if sampling.is_greedy:
        return int(logits.argmax())
    # Stable, so that equal logits keep the order of their tokens on every machine.
    ranked, tokens = torch.sort(_sharpened(logits, sampling.temperature), descending=True, stable=True)
    probabilities = torch.softmax(ranked[: sampling.top_k or None], dim=0)
    if sampling.top_p is not None:
        # What stands before a token decides, so the most likely one stays, even where fp32 takes top_p for zero.
        is_kept = probabilities.cumsum(0) - probabilities < sampling.top_p
        is_kept[0] = True
        probabilities = torch.where(is_kept, probabilities, 0.0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def _sharpened(logits: Tensor, temperature: float) -> Tensor:
    sharp = logits / temperature
    if bool(sharp.isfinite().all()):
        return sharp
    # So low that the likeliest cannot be said in fp32: below it, all of them can.
    return ((logits.double() - logits.max()) / temperature).float()


def _penalized(logits: Tensor, seen: Collection[int], penalty: float) -> Tensor:
    """Make tokens that were seen less likely: positive logits are divided by the penalty, negative ones multiplied."""
    if penalty == 1 or not seen:
        return logits
    places = torch.tensor(sorted(set(seen)))
    logits = logits.clone()
    chosen = logits[places]
    # A penalty out of all proportion gives the largest number there is, never one that is none.
    logits[places] = torch.nan_to_num(torch.where(chosen < 0, chosen * penalty, chosen / penalty))
    return logits
