"""A resume's changes, sorted by what they ask for."""

from dataclasses import replace

import pytest

from unbroken.config import Config, CurriculumPhase, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from unbroken.config.changes import compare

STARTED = Config(data=DataConfig(path="data")).settled(starting_world=2)


def test_the_same_config_differs_in_nothing() -> None:
    assert compare(STARTED, STARTED) == compare(Config(), Config())
    assert not compare(STARTED, STARTED).free


def test_differences_are_sorted_by_resume_class_and_name_both_values() -> None:
    now = Config(
        model=ModelConfig(n_layer=3),
        data=DataConfig(path="data", num_workers=9),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        training=replace(STARTED.training, max_steps=2000),
    )
    found = compare(STARTED, now)
    assert [(each.field, each.started_with, each.now) for each in found.fixed] == [("model.n_layer", 12, 3)]
    assert [each.field for each in found.declared] == ["optimizer.learning_rate", "training.max_steps"]
    assert [each.field for each in found.free] == ["data.num_workers"]


def test_a_declared_difference_stays_until_it_is_accepted_by_its_own_name() -> None:
    found = compare(STARTED, replace(STARTED, optimizer=OptimizerConfig(learning_rate=1e-3, beta1=0.8)))
    left = found.not_accepted(frozenset({"optimizer.learning_rate", "optimizer"}))
    assert [each.field for each in left] == ["optimizer.beta1"]


def test_a_job_on_other_ranks_that_leaves_the_global_batch_null_keeps_the_runs_batch() -> None:
    assert STARTED.training.global_batch_size == 32
    assert compare(STARTED, Config(data=DataConfig(path="data"))) == compare(STARTED, STARTED)


@pytest.mark.parametrize(
    "training",
    [
        TrainingConfig(global_batch_size=64),
        TrainingConfig(per_device_batch_size=2),
        TrainingConfig(gradient_accumulation_steps=8),
    ],
)
def test_a_job_that_asks_for_another_batch_is_reported(training: TrainingConfig) -> None:
    assert len(compare(STARTED, replace(STARTED, training=training)).fixed) == 1


def test_numbers_that_are_equal_are_equal_in_any_notation_and_a_switch_is_not_a_number() -> None:
    same = replace(STARTED, optimizer=OptimizerConfig(max_grad_norm=1))
    assert compare(STARTED, same) == compare(STARTED, STARTED)
    every = replace(STARTED, training=replace(STARTED.training, gradient_checkpointing=2))
    assert len(compare(STARTED, every).declared) == 1


def test_a_change_of_one_weight_in_the_curriculum_is_a_difference() -> None:
    def with_weight(weight: float) -> Config:
        return replace(STARTED, data=DataConfig(path="data", curriculum=(CurriculumPhase(5, (("a", weight),)),)))

    assert [each.field for each in compare(with_weight(1.0), with_weight(2.0)).fixed] == ["data.curriculum"]
    assert not compare(with_weight(1.0), with_weight(1)).fixed
