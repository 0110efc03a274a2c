"""Packed documents do not see each other; without documents, or in the mode causal, everything before is seen."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.unit.gpt.models import config_of, error, model_of, tokens_of
from unbroken.gpt.attention import ForwardContext, Kernel, _kernel_options, block_mask, cached_mask, dense_mask
from unbroken.gpt.rope import Angles

EDGES = (0, 5, 6, 19, 22)
PADDED = 24
KERNELS: list[tuple[str, Kernel]] = [("sdpa_mask", "sdpa"), ("flex", "sdpa"), ("flex", "flex"), ("sdpa_mask", "flex")]


def documents() -> Tensor:
    """Two rows: several documents with padding after them, and a single one."""
    doc_ids = torch.full((2, PADDED), -1, dtype=torch.int32)
    for number, (first, last) in enumerate(pairwise(EDGES)):
        doc_ids[0, first:last] = number
    doc_ids[1] = 0
    return doc_ids


@pytest.mark.promise("G16")
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize(("mode", "kernel"), KERNELS)
@pytest.mark.filterwarnings("ignore:flex_attention called without")  # a CPU has no compiled kernel for it
def test_a_packed_document_has_the_logits_it_has_alone(mode: str, kernel: Kernel, heads: int | None) -> None:
    model = model_of(config_of(attention_mode=mode, n_kv_head=heads), kernel=kernel).eval()
    tokens, doc_ids = tokens_of(length=PADDED), documents()
    positions = torch.arange(PADDED).expand(2, PADDED)
    with torch.no_grad():
        packed = model(tokens, doc_ids, positions)
        for first, last in pairwise(EDGES):
            alone = model(tokens[:1, first:last])
            assert error(packed[:1, first:last], alone) < 3e-6
        assert error(packed[1:], model(tokens[1:])) < 3e-6
    assert bool(packed.isfinite().all())


@pytest.mark.promise("G16")
@pytest.mark.parametrize(("mode", "has_documents", "is_plain"), [
    ("causal", True, True), ("causal", False, True), ("flex", True, False), ("flex", False, True)
])  # fmt: skip
def test_no_kernel_takes_a_mask_of_documents_as_plainly_causal(mode: str, has_documents: bool, is_plain: bool) -> None:
    model = model_of(config_of(attention_mode=mode)).eval()
    seen: list[ForwardContext] = []
    model.blocks[0].register_forward_pre_hook(lambda _module, given: seen.append(given[1]))
    model(tokens_of(length=PADDED), documents() if has_documents else None)
    options = _kernel_options(torch.empty(1, 1, 1, 64), seen[0])
    assert options["ROWS_GUARANTEED_SAFE"] == options["BLOCKS_ARE_CONTIGUOUS"] == is_plain


@pytest.mark.parametrize(("dtype", "width", "has_tiles"), [
    (torch.bfloat16, 64, True), (torch.float16, 64, True), (torch.float32, 64, False), (torch.bfloat16, 128, False)
])  # fmt: skip
def test_measured_tiles_are_for_the_type_and_width_that_were_measured(
    dtype: torch.dtype, width: int, has_tiles: bool
) -> None:
    context = ForwardContext(Angles(torch.empty(0), torch.empty(0)), None)
    options = _kernel_options(torch.empty(1, 1, 1, width, dtype=dtype), context)
    assert ("fwd_BLOCK_M" in options) == has_tiles


@pytest.mark.promise("G16")
@pytest.mark.parametrize("mode", ["sdpa_mask", "flex"])
def test_the_gradients_of_packed_documents_are_the_sum_of_each_ones(mode: str) -> None:
    model = model_of(config_of(attention_mode=mode))
    tokens, doc_ids = tokens_of(length=PADDED)[:1], documents()[:1]
    labels = torch.where(doc_ids < 0, -100, tokens)
    for first in EDGES[:-1]:
        labels[0, first] = -100
    packed = model(tokens, doc_ids, labels=labels)
    packed.total.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    total = torch.zeros(())
    for first, last in pairwise(EDGES):
        alone = model(tokens[:, first:last], labels=labels[:, first:last])
        alone.total.backward()
        total = total + alone.total.detach()
    torch.testing.assert_close(packed.total.detach(), total, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert error(found[name], parameter.grad) < 1e-5, name


def test_the_mode_causal_looks_across_documents() -> None:
    model = model_of(config_of(attention_mode="causal")).eval()
    tokens = tokens_of(length=PADDED)
    with torch.no_grad():
        assert torch.equal(model(tokens, documents()), model(tokens))


def test_both_masks_say_the_same() -> None:
    doc_ids = documents()
    tokens = tokens_of(length=PADDED)
    blocks = block_mask(tokens, doc_ids)
    row, head = torch.tensor(0), torch.tensor(0)
    dense = dense_mask(doc_ids)
    for query in range(PADDED):
        for key in range(PADDED):
            allowed = blocks.mask_mod(row, head, torch.tensor(query), torch.tensor(key))
            assert bool(allowed) == bool(dense[0, 0, query, key])


def test_the_mask_is_made_once_for_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(doc_ids: Tensor) -> Tensor:
        made.append(doc_ids)
        return dense_mask(doc_ids)

    monkeypatch.setattr("unbroken.gpt.attention.dense_mask", counted)
    model_of(config_of(attention_mode="sdpa_mask", n_layer=4))(tokens_of(length=PADDED), documents())
    assert len(made) == 1


def test_new_tokens_look_at_all_cached_ones() -> None:
    expected = [[True, True, True, False], [True, True, True, True]]
    assert cached_mask(2, 2, torch.device("cpu")).tolist() == expected
