"""The whole config: JSON form, digest, and the numbers that follow from it."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from tests.unit.config.strategies import configs
from unbroken.config import (
    Config,
    CurriculumPhase,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
    require_sound,
)
from unbroken.config.document import SECTIONS, digest_of
from unbroken.config.reading import from_json
from unbroken.errors import ConfigInvalid, RunRecordDamaged

SOUND = Config(data=DataConfig(path="data"))


@settings(deadline=None)
@given(configs())
def test_any_sound_config_comes_back_from_its_json_document_unchanged(config: Config) -> None:
    back = from_json(config.to_json(), "config.json").config
    assert back == config
    assert back.digest() == config.digest()


@settings(deadline=None)
@given(configs())
def test_any_sound_config_made_in_python_is_found_sound(config: Config) -> None:
    require_sound(config)


def test_the_digest_does_not_depend_on_the_order_of_fields_or_buckets() -> None:
    values = SOUND.values()
    turned = {section: dict(reversed(values[section].items())) for section in reversed(values)}
    assert digest_of(turned) == SOUND.digest()


def test_the_digest_does_not_depend_on_how_a_number_is_written() -> None:
    whole = replace(SOUND, optimizer=OptimizerConfig(weight_decay=1, max_grad_norm=2))
    parts = replace(SOUND, optimizer=OptimizerConfig(weight_decay=1.0, max_grad_norm=2.0))
    assert whole.digest() == parts.digest()
    first = replace(SOUND, training=TrainingConfig(gradient_checkpointing=1))
    every = replace(SOUND, training=TrainingConfig(gradient_checkpointing=True))
    assert first.digest() == every.digest()


def test_the_digest_of_the_defaults_is_the_one_that_runs_have_recorded() -> None:
    # It changes only when a field is added or a default changes; then this line is changed on purpose.
    assert Config().digest() == "sha256:937eadd72d18b074f3125eeb98532780fbf72f0bad7d98087ecfb19142e35109"


def test_every_single_field_changes_the_digest() -> None:
    seen = {SOUND.digest()}
    values = SOUND.values()
    for section in SECTIONS:
        for name in values[section]:
            changed: dict[str, Any] = {**values, section: {**values[section], name: "other"}}
            seen.add(digest_of(changed))
    assert len(seen) == 1 + sum(len(values[section]) for section in SECTIONS)


def test_a_record_that_was_changed_by_hand_is_refused() -> None:
    document = json.loads(SOUND.to_json())
    document["training"]["seed"] = 43
    with pytest.raises(RunRecordDamaged, match="changed after it was written"):
        from_json(json.dumps(document), "config.json")


def test_a_record_without_a_field_that_came_later_takes_its_default_and_reports_it() -> None:
    document = json.loads(SOUND.to_json())
    del document["training"]["non_finite"]
    document["digest"] = digest_of({section: document[section] for section in SECTIONS})
    resolved = from_json(json.dumps(document), "config.json")
    assert resolved.config == SOUND
    assert [name for name, place in resolved.origins.items() if str(place) == "default"] == ["training.non_finite"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "{", '{"schema": "unbroken.config/2"}', '{"schema": NaN}', "[" * 100_000, '"unbroken.config/1"'],
    ids=["empty", "list", "no schema", "cut", "newer", "nan", "deep", "text"],
)
def test_a_document_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(RunRecordDamaged):
        from_json(text, "config.json")


def test_values_of_the_wrong_type_made_in_python_are_named() -> None:
    wrong: Any = "many"
    with pytest.raises(ConfigInvalid) as caught:
        require_sound(Config(data=DataConfig(path="data", max_length=wrong), model=ModelConfig(n_head=5)))
    assert [problem.field for problem in caught.value.problems] == ["data.max_length", "model.n_head"]
    with pytest.raises(ConfigInvalid):
        require_sound(replace(SOUND, optimizer=OptimizerConfig(learning_rate=wrong)))
    with pytest.raises(ConfigInvalid):
        require_sound(replace(SOUND, optimizer=OptimizerConfig(learning_rate=float("nan"))))


def test_the_global_batch_follows_from_the_first_jobs_ranks_and_is_then_settled() -> None:
    config = replace(SOUND, training=TrainingConfig(per_device_batch_size=3, gradient_accumulation_steps=5))
    assert config.global_batch_size(starting_world=4) == 60
    settled = config.settled(starting_world=4)
    assert settled.training.global_batch_size == 60
    assert settled.global_batch_size(starting_world=7) == 60
    assert settled.settled(starting_world=2) == settled


def test_a_global_batch_that_is_set_wins_over_the_ranks() -> None:
    config = replace(SOUND, training=TrainingConfig(global_batch_size=512))
    assert {config.global_batch_size(world) for world in (1, 3, 8)} == {512}


def test_the_parameter_count_of_gpt2_small_is_the_published_one() -> None:
    # GPT-2 small has 124,439,808 parameters, of which 1024 x 768 are learned positions that rotary ones replace.
    gpt2 = ModelConfig(use_bias=True, mlp_type="mlp", activation="gelu", norm="layernorm")
    assert gpt2.parameters(50257) == 124_439_808 - 1024 * 768


def test_the_parameter_count_of_llama_2_7b_is_the_published_one() -> None:
    llama = ModelConfig(n_embd=4096, n_layer=32, n_head=32, intermediate_size=11008, tie_word_embeddings=False)
    assert llama.parameters(32000) == 6_738_415_616


def test_the_parameter_count_of_llama_3_8b_with_grouped_heads_is_the_published_one() -> None:
    llama = ModelConfig(
        n_embd=4096, n_layer=32, n_head=32, n_kv_head=8, intermediate_size=14336, tie_word_embeddings=False
    )
    assert llama.parameters(128256) == 8_030_261_248


def test_null_sizes_resolve_as_documented() -> None:
    assert ModelConfig().mlp_width == 2048
    assert ModelConfig(mlp_type="mlp").mlp_width == 3072
    assert ModelConfig(n_embd=1024).mlp_width == 2816
    assert ModelConfig(n_head=6).kv_heads == 6
    assert ModelConfig(use_bias=True, mlp_bias=False).has_qkv_bias
    assert not ModelConfig(use_bias=True, mlp_bias=False).has_mlp_bias
    assert OptimizerConfig().resolved_decay_steps(1000) == 900
    assert OptimizerConfig(schedule="wsd").resolved_decay_steps(1000) == 100
    assert OptimizerConfig(decay_steps=7).resolved_decay_steps(1000) == 7


def test_the_weights_of_a_phase_add_up_to_one_even_where_their_sum_overflows() -> None:
    phase = CurriculumPhase(1, (("a", 1.5e308), ("b", 1.5e308)))
    assert phase.weights == {"a": 0.5, "b": 0.5}
