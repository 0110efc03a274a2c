"""The memory of a rank is counted as torch really keeps it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from unbroken.config import Config, DataConfig, ModelConfig, TrainingConfig
from unbroken.config.memory_need import (
    CHUNK_LOGITS,
    activations,
    block_activations,
    block_parameters,
    compute_bytes,
    estimate,
    logits,
)
from unbroken.gpt.loss import CUDA_CHUNK_LOGITS
from unbroken.gpt.model import GPT

ROWS, LENGTH, LANE = 300, 128, 2
TYPES = {"no": torch.float32, "bf16": torch.bfloat16}


def config_of(precision: str = "no", every: bool | int = False, **model: Any) -> Config:  # noqa: ANN401 - of ModelConfig
    shape: dict[str, Any] = {"n_embd": 128, "n_layer": 3, "n_head": 8, "n_positions": LENGTH, **model}
    return Config(
        model=ModelConfig(**shape),
        data=DataConfig(path="data", max_length=LENGTH),
        training=TrainingConfig(
            per_device_batch_size=LANE,
            mixed_precision=precision,  # type: ignore[arg-type]
            gradient_checkpointing=every,
        ),
    )


def kept_bytes(config: Config) -> int:
    """What autograd holds after a forward pass, besides the weights; each piece of memory once."""
    model = GPT(config.model, ROWS, gradient_checkpointing=config.training.gradient_checkpointing)
    model.to(TYPES[str(config.training.mixed_precision)]).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    held: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(LANE, LENGTH, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(tokens, labels=tokens)
    assert loss.total.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"n_kv_head": 2},
    {"mlp_type": "mlp"},
    {"norm": "layernorm"},
    {"dropout": 0.1},
    {"n_layer": 1, "intermediate_size": 100},
]


@pytest.mark.promise("G22")
@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_activations_are_counted_as_autograd_keeps_them(precision: str, options: dict[str, Any]) -> None:
    config = config_of(precision, **options)
    # The logits themselves are gone by then; their gradients are kept.
    loss = logits(config, ROWS) - compute_bytes(config) * LANE * LENGTH * ROWS
    assert activations(config, 0, is_fused=False) + loss == pytest.approx(kept_bytes(config), rel=0.01)


@pytest.mark.parametrize("every", [True, 2])
def test_a_block_that_is_recomputed_keeps_its_input_alone(every: bool | int) -> None:
    config = config_of(every=every)
    counted = activations(config, int(every), is_fused=False) + logits(config, ROWS)
    alive_later = block_activations(config, is_fused=False) + compute_bytes(config) * LANE * LENGTH * ROWS
    assert counted - alive_later == pytest.approx(kept_bytes(config), rel=0.02)


def test_the_chunk_is_the_one_the_loss_has() -> None:
    assert CHUNK_LOGITS == CUDA_CHUNK_LOGITS


def test_a_block_has_the_parameters_that_the_model_has_in_it() -> None:
    for options in OPTIONS:
        config = config_of(**options)
        block = GPT(config.model, ROWS).blocks[0]
        assert block_parameters(config.model) == sum(parameter.numel() for parameter in block.parameters())


def test_states_are_four_bytes_each_and_a_narrow_type_needs_a_copy_of_the_weights() -> None:
    parameters = config_of().model.parameters(ROWS)
    wide, narrow = (estimate(config_of(precision), ROWS, 1) for precision in TYPES)
    assert (wide.weights, wide.gradients, wide.optimizer) == (4 * parameters, 4 * parameters, 8 * parameters)
    assert narrow.weights == 6 * parameters and narrow.optimizer == 8 * parameters
    assert narrow.activations < wide.activations
    assert wide.total == wide.weights + wide.gradients + wide.optimizer + wide.activations + wide.logits


def test_sharding_divides_what_is_kept_and_not_what_one_lane_makes() -> None:
    replicated = config_of("bf16", n_layer=24)
    sharded = replace(replicated, training=replace(replicated.training, sharding="fsdp2"))
    one, whole, shard = estimate(sharded, ROWS, 1), estimate(replicated, ROWS, 8), estimate(sharded, ROWS, 8)
    assert one == estimate(replicated, ROWS, 1)
    assert shard.optimizer * 8 == whole.optimizer
    assert shard.weights < whole.weights / 3 and shard.gradients < whole.gradients / 3
    assert shard.activations == whole.activations


def test_both_ways_of_the_activations_are_reported_whichever_is_set() -> None:
    kept, recomputed = estimate(config_of(every=False), ROWS, 1), estimate(config_of(every=True), ROWS, 1)
    assert kept.activations == kept.activations_kept == recomputed.activations_kept
    assert recomputed.activations == recomputed.activations_recomputed < kept.activations


@pytest.mark.parametrize(("sharding", "share"), [("replicated", 1), ("fsdp2", 2)])
def test_an_average_is_four_bytes_for_each_weight_that_a_rank_holds(sharding: str, share: int) -> None:
    plain = config_of()
    plain = replace(plain, training=replace(plain.training, sharding=sharding))  # type: ignore[arg-type]
    kept = replace(plain, training=replace(plain.training, ema_decay=0.999))
    without, with_average = (estimate(each, ROWS, 2) for each in (plain, kept))
    assert without.average == 0
    assert with_average.average == 4 * -(-plain.model.parameters(ROWS) // share)
    assert with_average.total == without.total + with_average.average
