"""Check a config against its data before the first step: how far the data reaches, and what does not fit.

The order of all samples is a function, so the step at which a bucket is exhausted is exact, not an estimate. All
problems are collected; a config flag that allows one turns it into a warning.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from unbroken.config import Config
from unbroken.data.corpus.catalogue import Bucket, Corpus, TokenizerIdentity
from unbroken.data.from_config import corpus_of, phases_of, stream_of
from unbroken.data.ingest.encoders import BYTES, find_tokenizer, load_encoder
from unbroken.data.order.schedule import Exhausted
from unbroken.data.stream import Stream
from unbroken.errors import BadMix, DataUnfit, NoEodToken, PackageMissing, TokenizerUnknown
from unbroken.quoting import amounts

BUDGET_TOLERANCE = Fraction(5, 100)
Progress = Callable[[int], None]


@dataclass(frozen=True)
class BucketForecast:
    """One bucket: what it holds, and how many of its sequences the run draws."""

    name: str
    shards: int
    documents: int
    tokens: int
    sequences: int
    fill: Fraction
    drawn: int
    exhausted_step: int | None

    @property
    def passes(self) -> Fraction:
        """How often the run reads it."""
        return Fraction(self.drawn, self.sequences) if self.sequences else Fraction(0)


@dataclass(frozen=True)
class Forecast:
    """What a run of a config reads; with ``problems`` it must not start, with ``warnings`` it may.

    Attributes:
        has_shards: whether ``path`` holds shards, not text.
        steps: ``max_steps`` of the config.
        steps_available: whole steps in the data; None: without end.
        vocabulary: ids of the tokenizer that made the data; None: unknown.
    """

    path: Path
    has_shards: bool
    buckets: tuple[BucketForecast, ...]
    global_batch: int
    max_length: int
    steps: int
    steps_available: int | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    vocabulary: int | None = None

    def require_fit(self, *, strict: bool = False) -> None:
        """Raise if there are problems; with ``strict`` also if there are warnings.

        Raises:
            DataUnfit: there is a problem; it lists all of them.
        """
        problems = self.problems + (self.warnings if strict else ())
        if problems:
            raise DataUnfit(path=self.path, problems=problems, has_shards=self.has_shards)


class _Findings:
    """Problems and warnings as they are found."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def add(self, text: str, *, is_allowed: bool = False) -> None:
        """Add a problem, or a warning if the config allows it."""
        (self.warnings if is_allowed else self.problems).append(text)


def forecast(config: Config, world: int = 1, *, progress: Progress | None = None) -> Forecast:
    """Check everything that config and data must agree on.

    Missing packing plans are built into the cache; ``progress`` is called with the documents of each group.

    Raises:
        DataError: the data is missing, damaged or unfinished.
        StorageFailed: an I/O error while reading, or writing the cache.
    """
    # The job and `data verify` verify bytes; a forecast depends only on sizes and indexes.
    config = replace(config, data=replace(config.data, check="quick"))
    findings = _Findings()
    corpus = corpus_of(config.data)
    stream = _stream(config, corpus, findings, progress)
    is_drawn_as_asked = not findings.problems
    batch, steps = config.global_batch_size(world), config.training.max_steps
    for text in _complaints_of_batch(config, world):
        findings.add(text)
    _look_at_tokenizer(config, corpus, findings)
    _look_at_budget(config, batch, findings)
    _look_at_validation(config, findings)
    for text in _unused(config, corpus):
        findings.add(text, is_allowed=True)
    if is_drawn_as_asked:
        _look_at_ends(config, stream, batch, findings)
    return Forecast(
        path=Path(config.data.path),
        has_shards=config.data.format == "pretokenized",
        buckets=_buckets(stream, batch, steps),
        global_batch=batch,
        max_length=config.data.max_length,
        steps=steps,
        steps_available=None if stream.end is None else stream.end // batch,
        problems=tuple(findings.problems),
        warnings=tuple(findings.warnings),
        vocabulary=None if corpus.tokenizer is None else corpus.tokenizer.vocab_size,
    )


def _stream(config: Config, corpus: Corpus, findings: _Findings, progress: Progress | None) -> Stream:
    try:
        return stream_of(config, corpus, phases=phases_of(config.data), progress=progress)
    except BadMix as bad:
        for problem in bad.problems:
            findings.add(f"data.curriculum: {problem}; the buckets are {', '.join(bad.buckets)}")
        # The buckets are still worth reporting.
        return stream_of(config, corpus)


def _buckets(stream: Stream, batch: int, steps: int) -> tuple[BucketForecast, ...]:
    last = steps * batch if stream.end is None else min(stream.end, steps * batch)
    drawn = stream.schedule.served(last)
    exhausted = {
        each.bucket: each.sample // batch for each in reversed(stream.exhausted) if each.sample < steps * batch
    }
    sources = {bucket.name: bucket for bucket in stream.corpus.buckets}
    return tuple(
        _bucket(
            sources[each.name], next(planned.plan.fill for planned in each.planned), each.sequences, drawn, exhausted
        )
        for each in stream.buckets
    )


def _bucket(
    bucket: Bucket, fill: Fraction, sequences: int, drawn: dict[str, int], exhausted: dict[str, int]
) -> BucketForecast:
    return BucketForecast(
        name=bucket.name,
        shards=len(bucket.shards),
        documents=bucket.entries,
        tokens=bucket.tokens,
        sequences=sequences,
        fill=fill,
        drawn=drawn[bucket.name],
        exhausted_step=exhausted.get(bucket.name),
    )


def _complaints_of_batch(config: Config, world: int) -> Iterator[str]:
    lane = config.training.per_device_batch_size
    lanes = config.lanes(world)
    if world > lanes:
        yield (
            f"training.global_batch_size: a step has {amounts.plural(lanes, 'lane')} of {lane}, "
            f"too few for {amounts.plural(world, 'rank')}"
        )


def _look_at_ends(config: Config, stream: Stream, batch: int, findings: _Findings) -> None:
    """Buckets that are exhausted before the last step."""
    steps = config.training.max_steps
    asked = steps * batch
    early = [each for each in stream.exhausted if each.sample < asked]
    is_allowed = config.data.allow_bucket_exhaustion
    if config.data.curriculum is None:
        if early:
            text = f"data exhausted at step {amounts.count(early[0].sample // batch)} of {amounts.count(steps)}"
            findings.add(f"{text}{_remedy(config)}", is_allowed=is_allowed)
        return
    for exhausted in early:
        findings.add(_exhausted_line(config, exhausted, batch), is_allowed=is_allowed)
    if is_allowed and stream.end is not None and stream.end < asked:
        step = amounts.count(stream.end // batch)
        findings.add(
            f"all buckets exhausted at step {step} of {amounts.count(steps)}: the run ends there", is_allowed=True
        )


def _exhausted_line(config: Config, exhausted: Exhausted, batch: int) -> str:
    step, steps = amounts.count(exhausted.sample // batch), amounts.count(config.training.max_steps)
    text = f"bucket {exhausted.bucket} is exhausted at step {step} of {steps}, in phase {exhausted.phase + 1}"
    if config.data.allow_bucket_exhaustion:
        return f"{text}; the other buckets continue in proportion"
    return f"{text}{_remedy(config)}"


def _remedy(config: Config) -> str:
    epochs = config.data.epochs
    return "" if epochs is None else f"; data.epochs is {epochs}"


def _look_at_budget(config: Config, batch: int, findings: _Findings) -> None:
    """Whether the curriculum is as long as the training."""
    if config.data.curriculum is None:
        return
    planned = sum(phase.duration_tokens for phase in config.data.curriculum)
    read = config.training.max_steps * batch * config.data.max_length
    if abs(planned - read) > BUDGET_TOLERANCE * read:
        text = (
            f"data.curriculum has {amounts.count(planned)} tokens and the steps read {amounts.count(read)}, "
            f"{float(Fraction(planned, read)) * 100 - 100:+.0f} %"
        )
        findings.add(text, is_allowed=config.data.allow_budget_mismatch)


def _look_at_tokenizer(config: Config, corpus: Corpus, findings: _Findings) -> None:
    """Whether tokenizer and vocabulary of the config are those of the shards."""
    made_by = corpus.tokenizer
    if made_by is None:
        findings.add("the shards do not name their tokenizer; it was not checked", is_allowed=True)
        return
    vocabulary = config.model.vocab_size
    if vocabulary is not None and vocabulary < made_by.vocab_size:
        findings.add(
            f"model.vocab_size is {amounts.count(vocabulary)} and the shards hold ids "
            f"up to {amounts.count(made_by.vocab_size - 1)}"
        )
    _compare_tokenizers(config.data.tokenizer, made_by, findings)


def _compare_tokenizers(asked: str, made_by: TokenizerIdentity, findings: _Findings) -> None:
    made_with = f"the shards were made with {made_by.name}, {amounts.count(made_by.vocab_size)} ids"
    if asked != BYTES and not Path(asked).exists():
        # A name on the hub: a check downloads nothing, and a name alone proves little.
        if made_by.name == BYTES:
            findings.add(f"data.tokenizer is {asked}; {made_with}")
        elif made_by.name != asked:
            findings.add(
                f"data.tokenizer is {asked}, not on this machine and not checked; {made_with}", is_allowed=True
            )
        return
    try:
        named = load_encoder(find_tokenizer(asked)).identity
    except (TokenizerUnknown, NoEodToken, PackageMissing) as unknown:
        findings.add(f"data.tokenizer: {unknown}")
        return
    if named.digest != made_by.digest:
        findings.add(f"data.tokenizer is {asked}, {amounts.count(named.vocab_size)} ids; {made_with}")


def _look_at_validation(config: Config, findings: _Findings) -> None:
    if config.training.eval_steps is None:
        return
    if not Path(config.data.path, "val").is_dir():
        findings.add("training.eval_steps is set, but there is no val/: no evaluations", is_allowed=True)
        return
    corpus_of(config.data, "val")


def _unused(config: Config, corpus: Corpus) -> Iterator[str]:
    if config.data.curriculum is None:
        return
    named = {bucket for phase in config.data.curriculum for bucket, weight in phase.mix if weight}
    for bucket in corpus.buckets:
        if bucket.name not in named:
            yield f"bucket {bucket.name} is in no phase: {amounts.plural(bucket.tokens, 'token')} unused"
