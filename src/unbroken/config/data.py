"""The section ``data``: what is read, and how documents become sequences."""

from dataclasses import dataclass
from typing import Final, Literal

from unbroken.config.fields import ResumeClass, field
from unbroken.config.model import MOST_POSITIONS

FIXED, DECLARED, FREE = ResumeClass.FIXED, ResumeClass.DECLARED, ResumeClass.FREE
# More would take a machine down before the first step, with everything else on it.
_MOST_WORKERS: Final = 1024


@dataclass(frozen=True)
class CurriculumPhase:
    """One phase: so many tokens, drawn from buckets in proportion to their weights.

    The mix is a tuple of pairs sorted by bucket, so that two configs that say the same are equal and hashable.
    """

    duration_tokens: int
    mix: tuple[tuple[str, float], ...]

    @property
    def weights(self) -> dict[str, float]:
        """The mix as shares that add up to one."""
        # Scaled by the largest first: the plain sum of two huge weights would overflow to infinity.
        largest = max(weight for _, weight in self.mix)
        total = sum(weight / largest for _, weight in self.mix)
        return {bucket: weight / largest / total for bucket, weight in self.mix}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from."""

    path: str = field("", "Folder with train/ and val/; it may move between jobs, its contents may not change.", FREE)
    tokenizer: str = field("gpt2", "Tokenizer by name or path; bytes is built in and works offline.", FIXED)
    format: Literal["pretokenized", "jsonl"] = field(
        "pretokenized", "Token shards (.bin, .idx), or text tokenized on the fly.", FIXED
    )
    max_length: int = field(
        2048, "Sequence length, in tokens; at most model.n_positions.", FIXED, minimum=2, maximum=MOST_POSITIONS
    )
    overlap_size: int = field(
        256,
        "Tokens that the windows of a long document share; at most half of max_length; 0 repeats none.",
        FIXED,
        minimum=0,
    )
    packing: bool = field(True, "Several documents share a sequence.", FIXED)
    epochs: int | None = field(
        1,
        "Passes over a bucket before it counts as dry.",
        DECLARED,
        minimum=1,
        null_means="as many as are asked for",
        example=4,
    )
    check: Literal["quick", "full", "read"] = field(
        "read",
        "Verify every sequence as it is read, all bytes at each start (full), or sizes and indexes (quick).",
        FREE,
    )
    cache_dir: str | None = field(
        None,
        "Where packing plans and checksums are kept.",
        FREE,
        null_means=".unbroken in data.path",
        example="/scratch/plans",
    )
    num_workers: int = field(
        4,
        "Processes per rank that prepare batches; 0 does it in the trainer.",
        FREE,
        minimum=0,
        maximum=_MOST_WORKERS,
    )
    curriculum: tuple[CurriculumPhase, ...] | None = field(
        None,
        "Phases, each with duration_tokens and a mix of bucket weights.",
        FIXED,
        null_means="one phase over all data",
        example="[{duration_tokens: 5_000_000_000, mix: {web: 0.8, code: 0.2}}]",
    )
    allow_bucket_exhaustion: bool = field(
        False, "When a bucket runs dry, go on with the others in proportion instead of halting.", FREE
    )
    allow_budget_mismatch: bool = field(
        False, "Accept a curriculum whose length differs from what max_steps will read.", FREE
    )
