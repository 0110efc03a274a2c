"""The network: every option works, counts its parameters, looks only back, and repeats its bits."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.torch_versions import torch_is_older
from tests.unit.gpt.models import (
    LENGTH,
    OPTIONS,
    VOCAB,
    config_of,
    error,
    gradients_of,
    model_of,
    plain_loss,
    tokens_of,
)
from unbroken.errors import SequenceTooLong
from unbroken.gpt.model import GPT, Block

each_option = pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))


@pytest.mark.promise("G21")
@each_option
def test_a_model_has_as_many_parameters_as_its_config_says(options: dict[str, Any]) -> None:
    config = config_of(**options)
    assert sum(p.numel() for p in GPT(config).parameters()) == config.parameters(VOCAB)


@pytest.mark.promise("G21")
@each_option
def test_loss_and_gradients_are_those_of_the_logits(options: dict[str, Any]) -> None:
    model = model_of(config_of(**{**options, "dropout": 0.0}), chunk_logits=7 * VOCAB)
    tokens = tokens_of()
    labels = tokens.clone()
    labels[0, :5] = -100
    plain_loss(model(tokens), labels).backward()  # type: ignore[no-untyped-call]
    expected = gradients_of(model)
    model.zero_grad()
    loss = model(tokens, labels=labels)
    loss.total.backward()
    found = gradients_of(model)
    assert loss.total.dtype == loss.tokens.dtype == torch.float32
    assert int(loss.tokens) == 2 * (LENGTH - 1) - 4
    assert set(found) == set(expected) == {name for name, _ in model.named_parameters()}
    torch.testing.assert_close(loss.total, plain_loss(model(tokens), labels), rtol=1e-5, atol=1e-5)
    for name, gradient in found.items():
        assert error(gradient, expected[name]) < 1e-5, name


@each_option
def test_a_token_changes_no_logit_before_it(options: dict[str, Any]) -> None:
    model = model_of(config_of(**options)).eval()
    tokens = tokens_of()
    changed = tokens.clone()
    changed[:, 10] = (tokens[:, 10] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.isclose(before[:, 10:], after[:, 10:]).all(dim=-1).any()


@each_option
def test_every_other_block_checkpointed_gives_the_same_gradients_bit_for_bit(options: dict[str, Any]) -> None:
    tokens = tokens_of()
    found = []
    for every in (False, True, 2):
        model = model_of(config_of(**options), gradient_checkpointing=every)
        torch.manual_seed(5)
        model(tokens, labels=tokens).total.backward()
        found.append(gradients_of(model))
    for other in found[1:]:
        assert all(torch.equal(gradient, other[name]) for name, gradient in found[0].items())


@pytest.mark.parametrize(("every", "recomputed"), [(False, []), (True, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (3, [0, 3])])
def test_only_the_named_blocks_are_computed_twice(every: bool | int, recomputed: list[int]) -> None:
    model = model_of(config_of(n_layer=4), gradient_checkpointing=every)
    calls = [0] * 4

    def count(number: int) -> None:
        calls[number] += 1

    for number, block in enumerate(model.blocks):
        # Before and not after: recomputing stops at the last tensor that is needed, not at the end of the block.
        assert isinstance(block, Block)
        block.attention.register_forward_pre_hook(lambda *_, number=number: count(number))
    model(tokens_of(), labels=tokens_of()).total.backward()
    assert [number for number, times in enumerate(calls) if times == 2] == recomputed
    assert all(times in (1, 2) for times in calls)


def test_dropout_acts_in_training_alone() -> None:
    model = model_of(config_of(dropout=0.5))
    tokens = tokens_of()
    with torch.no_grad():
        first, second = model(tokens), model(tokens)
        model.eval()
        third, fourth = model(tokens), model(tokens)
    assert not torch.equal(first, second)
    assert torch.equal(third, fourth)
    without = model_of(config_of(dropout=0.0)).eval()
    with torch.no_grad():
        assert torch.equal(third, without(tokens))


def test_the_state_has_plain_names() -> None:
    state = GPT(config_of(n_layer=1, use_bias=True, tie_word_embeddings=False)).state_dict()
    assert list(state) == [
        "embedding.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.qkv.bias",
        "blocks.0.attention.out.weight",
        "blocks.0.attention.out.bias",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp.gate_up.weight",
        "blocks.0.mlp.gate_up.bias",
        "blocks.0.mlp.down.weight",
        "blocks.0.mlp.down.bias",
        "norm.weight",
        "head.weight",
    ]


def test_positions_shift_what_is_rotated_and_nothing_else() -> None:
    model = model_of(config_of()).eval()
    tokens = tokens_of(length=8)
    counted = torch.arange(8).expand(2, 8)
    with torch.no_grad():
        plain, same, moved = model(tokens), model(tokens, positions=counted), model(tokens, positions=counted + 9)
        stretched = model(tokens, positions=counted * 3)
    assert torch.equal(plain, same)
    # Rotary positions are relative: a shift of all changes nothing but rounding, a stretch does.
    torch.testing.assert_close(plain, moved, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, stretched, atol=1e-2)


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(SequenceTooLong, check=lambda each: (each.tokens, each.positions) == (33, 32)):
        model_of(config_of())(tokens_of(length=33))


def test_an_unnamed_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        GPT(config_of(vocab_size=None))
    assert GPT(config_of(vocab_size=None), 10).vocab_size == 10


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_a_stream_in_fp32_adds_up_without_rounding_and_products_stay_narrow(norm: str) -> None:
    seen: dict[str, set[torch.dtype]] = {"stream": set(), "products": set()}
    model = model_of(config_of(norm=norm, residual_dtype="fp32")).to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda _, __, out: seen["stream"].add(out.dtype))
        elif isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, taken, out: seen["products"].update({taken[0].dtype, out.dtype}))
    model(tokens_of(), labels=tokens_of())
    assert seen == {"stream": {torch.float32}, "products": {torch.bfloat16}}


@pytest.mark.parametrize("stream", ["fp32", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_the_bits_of_weights_cast_beforehand(dtype: torch.dtype, stream: str | None) -> None:
    config = config_of(use_bias=True, norm="layernorm", tie_word_embeddings=False, residual_dtype=stream)
    model, cast = model_of(config), model_of(config).to(dtype)
    tokens = tokens_of()
    with torch.autocast("cpu", dtype):
        under_autocast = model(tokens, labels=tokens)
        logits = model(tokens)
    assert torch.equal(logits, cast(tokens))
    assert torch.equal(under_autocast.total, cast(tokens, labels=tokens).total)
    assert logits.dtype == torch.float32


def test_gradients_under_autocast_have_the_dtype_of_the_weights_and_follow_the_loss_scale() -> None:
    model = model_of(config_of())
    tokens = tokens_of()
    found = []
    for scale in (1.0, 1024.0):
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(tokens, labels=tokens)
        (loss.total / loss.tokens * scale).backward()
        found.append(gradients_of(model))
    assert all(gradient.dtype == torch.float32 for gradient in found[0].values())
    for name, gradient in found[0].items():
        assert error(found[1][name] / 1024, gradient) < 1e-2, name


def test_a_change_of_dtype_and_an_empty_device_leave_the_angles_right() -> None:
    with torch.device("meta"):
        hollow = GPT(config_of())
    assert hollow.embedding.weight.is_meta
    filled = hollow.to_empty(device="cpu").to(torch.bfloat16)
    expected = GPT(config_of())
    assert torch.equal(filled.cosine, expected.cosine) and filled.cosine.dtype == torch.float32
    assert torch.equal(filled.sine, expected.sine)


@pytest.mark.skipif(torch_is_older(2, 8), reason="wrong gradients: the trainer refuses this torch")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_compiled_graph_gives_the_same_loss_and_gradients(backend: str) -> None:
    model = model_of(config_of(n_layer=1), chunk_logits=20 * VOCAB)
    tokens = tokens_of()
    model(tokens, labels=tokens).total.backward()
    expected = gradients_of(model)
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend=backend)(tokens, labels=tokens).total.backward()
    for name, gradient in gradients_of(model).items():
        assert error(gradient, expected[name]) < 1e-5, name


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # the compiler's own
def test_blocks_compiled_one_by_one_share_one_graph() -> None:
    model = model_of(config_of(n_layer=4, attention_mode="sdpa_mask"))
    tokens = tokens_of()
    doc_ids = (torch.arange(LENGTH) // 9).expand(2, LENGTH)
    model(tokens, doc_ids, labels=tokens).total.backward()
    expected = gradients_of(model)
    model.zero_grad()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    model(tokens, doc_ids, labels=tokens).total.backward()
    assert counter.frame_count == 1
    for name, gradient in gradients_of(model).items():
        assert error(gradient, expected[name]) < 1e-5, name
