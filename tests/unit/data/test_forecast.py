"""What a run will read is known before it starts, exactly, and everything that does not fit is told at once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data.corpora import texts_of, write_corpus
from unbroken.config import Config, CurriculumPhase, DataConfig, ModelConfig, TrainingConfig
from unbroken.data.corpus.listing import TokenizerIdentity
from unbroken.data.forecast import forecast
from unbroken.data.from_config import corpus_of, phases_of, stream_of
from unbroken.errors import DataDamaged, DataUnfit

MAX_LENGTH = 32
BATCH = 4


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Sequences of 32: 40 of web, 20 of code; and a val split."""
    write_corpus(tmp_path / "data", {"web": [texts_of([31] * 25), texts_of([31] * 15)], "code": [texts_of([31] * 20)]})
    return write_corpus(tmp_path / "data", {"web": [texts_of([31] * 4)]}, split="val")


def config(path: Path, steps: int = 10, phases: tuple[CurriculumPhase, ...] | None = None, **fields: Any) -> Config:  # noqa: ANN401
    data = DataConfig(
        path=str(path), tokenizer="bytes", max_length=MAX_LENGTH, overlap_size=0, curriculum=phases, **fields
    )
    training = TrainingConfig(max_steps=steps, per_device_batch_size=2, global_batch_size=BATCH)
    return Config(model=ModelConfig(vocab_size=384), data=data, training=training)


def phase(samples: int, **mix: float) -> CurriculumPhase:
    return CurriculumPhase(samples * MAX_LENGTH, tuple(sorted(mix.items())))


def test_buckets_are_counted_and_what_the_steps_draw_of_each(data: Path) -> None:
    found = forecast(config(data))
    assert [(each.name, each.sequences, each.documents) for each in found.buckets] == [
        ("code", 20, 20),
        ("web", 40, 40),
    ]
    assert found.steps_available == 60 // BATCH
    assert sum(each.drawn for each in found.buckets) == 10 * BATCH
    assert (found.problems, found.warnings) == ((), ())
    found.require_fit(strict=True)


def test_the_forecast_is_what_the_stream_then_does(data: Path) -> None:
    asked = config(data, 20, (phase(80, web=0.5, code=0.5),))
    found = forecast(asked)
    stream = stream_of(asked, corpus_of(asked.data), phases=phases_of(asked.data))
    assert stream.end is not None
    assert found.steps_available == stream.end // BATCH
    names = [stream.schedule.buckets[b] for b in stream.schedule.locate(np.arange(stream.end))[0].tolist()]
    assert {each.name: each.drawn for each in found.buckets} == {name: names.count(name) for name in ("code", "web")}


@pytest.mark.promise("G18")
def test_data_that_ends_before_the_steps_do_is_a_problem_with_the_exact_step(data: Path) -> None:
    found = forecast(config(data, 16))
    assert found.problems == ("data exhausted at step 15 of 16; data.epochs is 1",)
    with pytest.raises(DataUnfit, check=lambda each: len(each.problems) == 1):
        found.require_fit()
    assert forecast(config(data, 15)).problems == ()
    assert forecast(config(data, 16, epochs=2)).problems == ()
    assert forecast(config(data, 16, epochs=None)).steps_available is None


@pytest.mark.promise("G18")
@pytest.mark.parametrize("world", [1, 3])
def test_a_bucket_that_is_exhausted_is_a_problem_or_a_warning_by_the_flag(data: Path, world: int) -> None:
    lanes = replace(config(data).training, max_steps=12, per_device_batch_size=1)
    phases = (phase(48, web=0.5, code=0.5),)
    halts = replace(config(data, 12, phases), training=lanes)
    renormalises = replace(config(data, 12, phases, allow_bucket_exhaustion=True), training=lanes)
    found = forecast(halts, world)
    # The 21st of code is asked for at about the 41st sample.
    assert len(found.problems) == 1 and "data.epochs" in found.problems[0]
    assert [each.exhausted_step for each in found.buckets] == [10, None]
    allowed = forecast(renormalises, world)
    assert allowed.problems == ()
    assert len(allowed.warnings) == 1
    assert {each.name: each.drawn for each in allowed.buckets} == {"code": 20, "web": 28}
    with pytest.raises(DataUnfit):
        allowed.require_fit(strict=True)


def test_continuing_until_every_bucket_is_exhausted_is_reported(data: Path) -> None:
    found = forecast(config(data, 30, (phase(120, web=0.5, code=0.5),), allow_bucket_exhaustion=True))
    assert found.steps_available == 15
    assert len(found.warnings) == 3


@pytest.mark.promise("G18")
@pytest.mark.parametrize(("samples", "fits"), [(40, True), (42, True), (38, True), (43, False), (37, False)])
def test_a_curriculum_may_miss_the_steps_by_a_twentieth(data: Path, samples: int, fits: bool) -> None:
    phases = (phase(samples, web=1),)
    found = forecast(config(data, 10, phases))
    misses = [problem for problem in found.problems if "data.curriculum" in problem]
    assert misses == [] if fits else all(f"{samples * 32:,}" in miss and "1,280" in miss for miss in misses)
    assert len(misses) == (not fits)
    allowed = forecast(config(data, 10, phases, allow_budget_mismatch=True))
    assert not any("data.curriculum" in problem for problem in allowed.problems)
    assert any("data.curriculum" in warning for warning in allowed.warnings) != fits


def test_a_bucket_that_is_absent_is_a_problem_and_one_that_is_unused_a_warning(data: Path) -> None:
    found = forecast(config(data, 10, (phase(40, wiki=0.5, web=0.5),)))
    [problem], [warning] = found.problems, found.warnings
    assert problem.startswith("data.curriculum: ") and "'wiki'" in problem and "code" in warning


def test_every_problem_is_reported_at_once(data: Path) -> None:
    asked = config(data, 1000, (phase(40, wiki=1),))
    asked = replace(asked, model=replace(asked.model, vocab_size=200), data=replace(asked.data, tokenizer="gpt2"))
    said = forecast(replace(asked, training=replace(asked.training, per_device_batch_size=4)), 3).problems
    assert [each.split(" ")[0].rstrip(":") for each in said] == [
        "data.curriculum",
        "training.global_batch_size",
        "model.vocab_size",
        "data.tokenizer",
        "data.curriculum",
    ]


@pytest.mark.parametrize(
    ("made_by", "asked", "problems", "warnings"),
    [
        ("bytes", "bytes", 0, 0),
        ("bytes", "gpt2", 1, 0),
        ("gpt2", "gpt2", 0, 0),
        ("gpt2", "bytes", 1, 0),
        ("gpt2", "another-name", 0, 1),
        (None, "gpt2", 0, 1),
    ],
)
def test_the_tokenizer_of_the_shards_is_compared_without_a_network(
    tmp_path: Path, made_by: str | None, asked: str, problems: int, warnings: int
) -> None:
    identities: dict[str | None, dict[str, Any]] = {
        "bytes": {},
        "gpt2": {"tokenizer": TokenizerIdentity("gpt2", "c" * 32, 300, 256)},
        None: {"tokenizer": None},
    }
    path = write_corpus(tmp_path / "data", {"web": [texts_of([31] * 60)]}, **identities[made_by])
    write_corpus(path, {"web": [texts_of([31] * 4)]}, split="val", **identities[made_by])
    asking = config(path)
    found = forecast(replace(asking, data=replace(asking.data, tokenizer=asked)))
    assert (len(found.problems), len(found.warnings)) == (problems, warnings), found


def test_a_missing_val_is_a_warning_only_where_evaluations_are_requested(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "data", {"web": [texts_of([31] * 60)]})
    asking = config(path)
    assert "val/" in forecast(asking).warnings[0]
    assert forecast(replace(asking, training=replace(asking.training, eval_steps=None))).warnings == ()


def test_damage_in_val_is_damage(data: Path) -> None:
    with (data / "val/web/00000-000.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataDamaged):
        forecast(config(data))


def test_phases_are_whole_sequences_and_weights_the_digits_that_were_written() -> None:
    phases = phases_of(DataConfig(path="d", max_length=32, curriculum=(CurriculumPhase(33, (("a", 0.1), ("b", 3))),)))
    assert phases is not None
    assert phases[0].samples == 2
    assert [str(weight) for _, weight in phases[0].mix] == ["1/10", "3"]


def test_text_is_forecast_as_shards_are(tmp_path: Path) -> None:
    (tmp_path / "text/train/web").mkdir(parents=True)
    lines = (json.dumps({"text": text}) for text in texts_of([31] * 12))
    (tmp_path / "text/train/web/a.jsonl").write_text("\n".join(lines))
    found = forecast(config(tmp_path / "text", 10, format="jsonl"))
    assert [(each.name, each.documents, each.sequences) for each in found.buckets] == [("web", 12, 12)]
    with pytest.raises(DataUnfit) as caught:
        found.require_fit()
    assert all("data stats" not in each.command for each in caught.value.help())
