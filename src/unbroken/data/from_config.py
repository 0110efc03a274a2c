"""Open the corpus and stream that a config describes; no other module of ``data`` reads config fields."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from unbroken.config import Config, DataConfig
from unbroken.data.corpus.catalogue import Corpus, open_corpus
from unbroken.data.order.schedule import Phase
from unbroken.data.stream import CACHE, Stream


def phases_of(data: DataConfig) -> tuple[Phase, ...] | None:
    """The curriculum in samples; a phase that is not a whole number of sequences is rounded up."""
    if data.curriculum is None:
        return None
    return tuple(
        # The digits of a weight are what the user meant: 0.1 is a tenth, not the nearest binary fraction.
        Phase(
            -(-phase.duration_tokens // data.max_length),
            tuple((name, Fraction(str(weight))) for name, weight in phase.mix),
        )
        for phase in data.curriculum
    )


def cache_of(data: DataConfig) -> Path:
    """The directory of cached packing plans."""
    return Path(data.cache_dir) if data.cache_dir is not None else Path(data.path) / CACHE


def corpus_of(data: DataConfig, split: str = "train") -> Corpus:
    """The shards that a config names; with format jsonl, text is tokenized into the cache first.

    Raises:
        DataError: they are missing, damaged or unfinished.
        StorageFailed: an I/O error.
    """
    if data.format == "jsonl":
        from unbroken.data.ingest.text_corpus import open_text_corpus

        return open_text_corpus(Path(data.path), split, data.tokenizer, cache_of(data))
    return open_corpus(Path(data.path), split, check="full" if data.check == "full" else "quick")


def stream_of(
    config: Config,
    corpus: Corpus,
    *,
    phases: tuple[Phase, ...] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Stream:
    """The samples that a fresh run of this config reads; ``phases`` are those of ``phases_of``.

    Raises:
        BadMix: the phases cannot be drawn from this corpus.
        ShardDamaged: an index is damaged.
        StorageFailed: an I/O error while reading, or writing the cache.
    """
    data = config.data
    return Stream(
        corpus,
        max_length=data.max_length,
        overlap_size=data.overlap_size,
        seed=config.training.seed,
        packing=data.packing,
        phases=phases,
        epochs=data.epochs,
        on_exhausted="renormalise" if data.allow_bucket_exhaustion else "halt",
        cache_dir=cache_of(data),
        check_reads=data.check == "read",
        progress=progress,
    )
