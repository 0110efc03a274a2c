"""A config file of GPT-Simple works as it is."""

import json
from pathlib import Path
from typing import Any

import pytest

from unbroken.config import Config, CurriculumPhase, load
from unbroken.config.document import all_fields
from unbroken.errors import ConfigInvalid

# Every field that GPT-Simple documents, with its default; two defaults are ours on purpose, see OURS.
DOCUMENTED: dict[str, dict[str, Any]] = {
    "model": {
        "vocab_size": None,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_kv_head": None,
        "n_positions": 2048,
        "dropout": 0.0,
        "use_bias": False,
        "qkv_bias": None,
        "attn_out_bias": None,
        "mlp_bias": None,
        "activation": "swish",
        "mlp_type": "gated",
        "intermediate_size": None,
        "norm": "rmsnorm",
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_base": 10000,
        "rope_scaling_type": None,
        "rope_scaling_factor": 1.0,
        "attention_mode": "causal",
    },
    "data": {
        "path": "",
        "tokenizer": "gpt2",
        "format": "pretokenized",
        "max_length": 2048,
        "overlap_size": 256,
        "packing": True,
        "num_workers": 4,
        "curriculum": None,
        "allow_bucket_exhaustion": False,
        "allow_budget_mismatch": False,
    },
    "optimizer": {
        "learning_rate": 3e-4,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "max_grad_norm": 1.0,
        "warmup_steps": 100,
        "decay_steps": None,
        "min_lr_ratio": 0.1,
    },
    "training": {
        "per_device_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "max_steps": 1000,
        "gradient_checkpointing": True,
        "compile": True,
        "seed": 42,
        "logging_steps": 10,
        "eval_steps": 500,
        "save_steps": 1000,
        "max_eval_batches": None,
        "output_dir": "./outputs",
        "resume": "auto",
        "keep_last_k": 3,
        "keep_milestone_every": None,
        "max_runtime_seconds": None,
        "walltime_reserve_seconds": 300,
        "mixed_precision": None,
        "wandb_project": None,
        "wandb_run_name": None,
    },
}
# Saving often enough and stopping early enough are measured here instead of guessed.
OURS = {"training.save_steps", "training.walltime_reserve_seconds"}

YAML = """\
# a training of three weeks in jobs of twenty hours
model:
  vocab_size: null
  n_embd: 1024
  n_layer: 24
  n_head: 16
  n_kv_head: 4
  activation: gelu
  mlp_type: gated
  norm_eps: 1e-5
  rope_scaling_type: ntk
  rope_scaling_factor: 2
  attention_mode: flex
data:
  path: ./data/tokens
  tokenizer: gpt2
  curriculum:
    - duration_tokens: 5000000000
      mix: {web: 0.7, code: 0.3}
    - duration_tokens: 1_000_000_000
      mix:
        web: 1
        code: 3
optimizer:
  learning_rate: 3e-4
  weight_decay: 0.1
training:
  per_device_batch_size: 8
  gradient_accumulation_steps: 2
  max_steps: 100000
  save_steps: 500
  max_runtime_seconds: 72000
  walltime_reserve_seconds: 300
  mixed_precision: bf16
  wandb_project: my-project
"""


def test_all_its_fields_are_known_with_their_defaults() -> None:
    ours = Config()
    for section, fields in DOCUMENTED.items():
        for name, default in fields.items():
            assert f"{section}.{name}" in all_fields()
            if f"{section}.{name}" not in OURS:
                assert ours.value(f"{section}.{name}") == default, f"{section}.{name}"


def test_its_defaults_written_out_decode_to_the_same_values(tmp_path: Path) -> None:
    document = {**DOCUMENTED, "data": {**DOCUMENTED["data"], "path": "tokens"}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    config = load(path).config
    for section, fields in document.items():
        for name, value in fields.items():
            assert config.value(f"{section}.{name}") == value


def test_its_yaml_decodes_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(YAML)
    config = load(path).config
    assert config.optimizer.learning_rate == 3e-4
    assert config.model.norm_eps == 1e-5
    assert config.model.n_kv_head == 4
    assert config.training.max_runtime_seconds == 72000.0
    assert config.data.curriculum == (
        CurriculumPhase(5_000_000_000, (("code", 0.3), ("web", 0.7))),
        CurriculumPhase(1_000_000_000, (("code", 3.0), ("web", 1.0))),
    )


def test_its_batch_becomes_the_global_batch_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(YAML)
    assert load(path).config.global_batch_size(starting_world=4) == 8 * 2 * 4


@pytest.mark.parametrize("key", ["experiment: a", "model_name: b"])
def test_a_top_level_key_that_it_ignores_is_a_problem_here(key: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{key}\n{YAML}")
    with pytest.raises(ConfigInvalid) as caught:
        load(path)
    assert [problem.line for problem in caught.value.problems] == [1]
