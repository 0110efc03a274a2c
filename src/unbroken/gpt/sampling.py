"""The parameters of generation, with their defaults and ranges; without torch, so that ``--help`` can show them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from unbroken.errors import GenerationInvalid

DEFAULT_NEW_TOKENS: Final = 100
SEED_END: Final = 1 << 63


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; ``top_k`` of 0 or None, ``top_p`` of None, ``repetition_penalty`` of 1 change nothing.

    Raises:
        GenerationInvalid: values are out of range; all are named.
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
        # Written as "not inside", so that NaN is rejected too.
        if not 0 < self.temperature < float("inf"):
            yield f"temperature must be above 0, is {self.temperature}; greedy takes the most likely token"
        if self.top_k is not None and self.top_k < 0:
            yield f"top_k must be 0 (all) or more, is {self.top_k}"
        if self.top_p is not None and not 0 < self.top_p <= 1:
            yield f"top_p must be above 0 and at most 1, is {self.top_p}"
        if not 0 < self.repetition_penalty < float("inf"):
            yield f"repetition_penalty must be above 0, is {self.repetition_penalty}"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How a prompt is continued; ``max_new_tokens`` of None: 100, or as many as the model has positions for.

    ``top_k`` of 0 and ``top_p`` of 1 keep all tokens.

    Raises:
        GenerationInvalid: a value is out of its range; all such values are named.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.95
    greedy: bool = False
    repetition_penalty: float = 1.0
    seed: int = 0
    return_full_text: bool = False

    def __post_init__(self) -> None:
        problems: list[str] = []
        try:
            self.sampling()
        except GenerationInvalid as wrong:
            problems += wrong.problems
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            problems.append(f"max_new_tokens must be at least 1, is {self.max_new_tokens}")
        if not 0 <= self.seed < SEED_END:
            problems.append(f"seed must be at least 0 and below 2^63, is {self.seed}")
        if problems:
            raise GenerationInvalid(problems=tuple(problems))

    def sampling(self) -> Sampling:
        """How each token is chosen."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            is_greedy=self.greedy,
            repetition_penalty=self.repetition_penalty,
        )

    def new_tokens(self, prompt_tokens: int, positions: int) -> int:
        """How many tokens at most follow a prompt; the last one is never read, so it needs no position."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return max(1, min(DEFAULT_NEW_TOKENS, positions - prompt_tokens + 1))
