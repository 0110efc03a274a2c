"""What must hold between fields: each rule broken alone, told at the value that was written."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unbroken.config import Config, load, rules
from unbroken.errors import ConfigInvalid, Problem

SOUND = ["data.path=tokens"]

BROKEN = {
    "no data": (["data.path="], "data.path", "is not set"),
    "blank tokenizer": (["data.tokenizer= "], "data.tokenizer", "is empty"),
    "heads": (["model.n_head=7"], "model.n_head", "must divide model.n_embd (768), is 7"),
    "odd head": (["model.n_embd=36"], "model.n_head", "even width per head"),
    "kv heads": (["model.n_kv_head=5"], "model.n_kv_head", "must divide model.n_head (12), is 5"),
    "more kv heads": (["model.n_kv_head=24"], "model.n_kv_head", "must divide model.n_head (12), is 24"),
    "length": (["data.max_length=4096"], "data.max_length", "at most model.n_positions (2048), is 4096"),
    "overlap": (["data.overlap_size=1025"], "data.overlap_size", "at most half of data.max_length (2048), is 1025"),
    "warmup": (["optimizer.warmup_steps=1000"], "optimizer.warmup_steps", "below training.max_steps (1000), is 1000"),
    "wsd": (["optimizer.schedule=wsd", "optimizer.decay_steps=901"], "optimizer.decay_steps", "901 and 100"),
    "lanes": (["training.global_batch_size=10"], "training.global_batch_size", "multiple of"),
    "blocks": (["training.gradient_checkpointing=13"], "training.gradient_checkpointing", "at most model.n_layer (12)"),
    "best": (["training.keep_best=loss"], "training.keep_best", "name:min or name:max"),
    "best without name": (["training.keep_best=:min"], "training.keep_best", "name:min or name:max"),
    "best by nothing": (
        ["training.keep_best=valloss:min"],
        "training.keep_best",
        "names the metric valloss; the trainer",
    ),
    "best unmeasured": (
        ["training.keep_best=val_loss:min", "training.eval_steps=null"],
        "training.keep_best",
        "names val_loss, but training.eval_steps is null",
    ),
    "best of no average": (
        ["training.keep_best=ema_val_loss:min"],
        "training.keep_best",
        "names ema_val_loss, but training.ema_decay is null",
    ),
    "reserve": (
        ["training.max_runtime_seconds=300", "training.walltime_reserve_seconds=300"],
        "training.walltime_reserve_seconds",
        "below training.max_runtime_seconds (300), is 300",
    ),
    "no address": (["training.checkpoints=runs/a"], "training.checkpoints", "it has no scheme"),
    "an unknown tracker": (
        ["training.trackers=tensorboard, comet"],
        "training.trackers",
        "'comet' is no tracker: wandb, trackio, tensorboard, mlflow, each with or without :PROJECT",
    ),
    "direct and mirrored": (
        ["training.checkpoints=s3://bucket/a", "training.mirror=s3://bucket/b"],
        "training.mirror",
        "is for local checkpoints",
    ),
    "copies": (["training.persistent_dir=/shared"], "training.persistent_dir", "training.emergency_dir is not"),
}

KEPT = [
    ["model.n_kv_head=1"],
    ["data.max_length=2048", "data.overlap_size=1024"],
    ["optimizer.warmup_steps=999"],
    ["optimizer.schedule=wsd", "optimizer.decay_steps=900"],
    ["optimizer.schedule=wsd", "optimizer.warmup_steps=999"],
    ["optimizer.decay_steps=5000"],
    ["training.global_batch_size=12"],
    ["training.gradient_checkpointing=12"],
    ["training.gradient_checkpointing=false", "model.n_layer=1", "model.n_embd=24"],
    ["training.gradient_checkpointing=true", "model.n_layer=1"],
    ["training.keep_best=val_loss:max"],
    ["training.keep_best=ema_val_loss:min", "training.ema_decay=0.9"],
    ["training.keep_best=loss:min", "training.eval_steps=null"],
    ["training.max_runtime_seconds=100"],
    ["training.emergency_dir=/scratch", "training.persistent_dir=/shared"],
]


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model:\n")
    return path


def problems(path: Path, *overrides: str) -> list[Problem]:
    with pytest.raises(ConfigInvalid) as caught:
        load(path, overrides)
    return list(caught.value.problems)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_the_only_problem_and_says_both_values(case: str, empty: Path) -> None:
    overrides, field, complaint = BROKEN[case]
    (found,) = problems(empty, *SOUND, *overrides)
    assert (found.source, found.field) == ("command line", field)
    assert complaint in found.complaint


@pytest.mark.parametrize("overrides", KEPT, ids=" ".join)
def test_values_at_the_edge_of_a_rule_are_sound(overrides: list[str], empty: Path) -> None:
    load(empty, [*SOUND, *overrides])


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__.strip("_"))
def test_without_one_of_the_rules_some_case_would_pass(
    rule: Callable[[Config], Iterator[rules.Complaint]], empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "RULES", tuple(each for each in rules.RULES if each is not rule))
    passed = []
    for case, (overrides, _, _) in BROKEN.items():
        with contextlib.suppress(ConfigInvalid):
            load(empty, [*SOUND, *overrides])
            passed.append(case)
    assert passed


def test_a_rule_blames_the_value_that_was_written_when_the_other_is_a_default(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data:\n  path: a\ntraining:\n  max_steps: 50\n")
    (found,) = problems(path)
    assert (found.line, found.field) == (4, "optimizer.warmup_steps")


def test_a_rule_about_a_value_that_could_not_be_read_stays_silent(empty: Path) -> None:
    (found,) = problems(empty, *SOUND, "model.n_embd=lots", "model.n_head=7")
    assert found.field == "model.n_embd"


def test_a_best_can_be_by_what_evaluations_are_called_in_the_trainer() -> None:
    from unbroken.gpt.train import AVERAGED_LOSS, VALIDATION_LOSS

    assert {AVERAGED_LOSS, VALIDATION_LOSS} < set(rules.METRICS)
