"""What only a GPU can show: the fused kernels, flex attention, and bits that repeat."""

import os
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from unbroken.config.sections import ModelConfig
from unbroken.gpt.build import initialize
from unbroken.gpt.loss import IGNORED, loss_sum
from unbroken.gpt.model import ACTIVATIONS, GPT

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # The compiler of some versions of torch warns of what it does itself.
    pytest.mark.filterwarnings("ignore"),
]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
CONFIG = ModelConfig(vocab_size=1000, n_embd=256, n_layer=2, n_head=4, n_kv_head=2, n_positions=512)


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def made(config: ModelConfig = CONFIG, **options: object) -> GPT:
    model = GPT(config, **options)  # type: ignore[arg-type]
    initialize(model, torch.Generator().manual_seed(3))
    return model.cuda()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("vocabulary", [97, 8192, 50304])
def test_the_loss_kernel_equals_double_precision(dtype: torch.dtype, tolerance: float, vocabulary: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(vocabulary)
    hidden = torch.randn(1, 300, 64, generator=generator, device="cuda", dtype=dtype, requires_grad=True)
    # Small weights: logits of about 1, whose rounding to bf16 is what is being looked at and not their size.
    weight = (0.1 * torch.randn(vocabulary, 64, generator=generator, device="cuda")).requires_grad_()
    targets = torch.randint(vocabulary, (1, 300), generator=generator, device="cuda")
    targets[0, ::7] = IGNORED
    found = loss_sum(hidden, weight, targets, chunk_logits=128 * vocabulary)
    gradients = torch.autograd.grad(found.total, (hidden, weight))
    wide = hidden.detach().double().requires_grad_(), weight.detach().to(dtype).double().requires_grad_()
    logits = (wide[0] @ wide[1].t())[0]
    expected = torch.nn.functional.cross_entropy(logits, targets[0], reduction="sum")
    assert found.tokens == (targets != IGNORED).sum()
    assert error(found.total, expected) < tolerance
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, wide), strict=True):
        assert error(mine, theirs) < tolerance


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_the_gated_kernel_equals_double_precision(activation: str) -> None:
    from unbroken.gpt.kernels import gated_backward

    gate_up = torch.randn(70, 2 * 1300, device="cuda")
    slope = torch.randn(70, 1300, device="cuda")
    wide = gate_up.double().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    product = ACTIVATIONS[activation](gate) * up
    (expected,) = torch.autograd.grad(product, wide, slope.double())
    found, remade = gated_backward(gate_up, slope, activation)
    assert error(found, expected) < 1e-6
    assert error(remade, product) < 1e-6


@pytest.mark.parametrize("activation", ["swish", "gelu", "relu"])
def test_gradients_on_the_gpu_are_those_of_the_cpu(activation: str) -> None:
    config = ModelConfig(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=64, activation=activation)  # type: ignore[arg-type]
    tokens = torch.randint(300, (2, 64))
    here, there = made(config).cpu(), made(config)
    here(tokens, labels=tokens).total.backward()
    there(tokens.cuda(), labels=tokens.cuda()).total.backward()
    for mine, theirs in zip(there.parameters(), here.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert error(mine.grad.cpu(), theirs.grad) < 1e-4


def test_initial_weights_have_the_bits_of_the_cpu() -> None:
    here, there = GPT(CONFIG), GPT(CONFIG).cuda()
    for model in (here, there):
        initialize(model, torch.Generator().manual_seed(5))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here.parameters(), there.parameters(), strict=True))


@pytest.mark.promise("G16")
@pytest.mark.parametrize("mode", ["flex", "sdpa_mask"])
def test_a_packed_document_has_the_logits_it_has_alone(mode: str) -> None:
    config = ModelConfig(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=256, attention_mode=mode)  # type: ignore[arg-type]
    model = made(config).eval()
    tokens = torch.randint(300, (2, 256), device="cuda")
    edges = (0, 37, 200, 240)
    doc_ids = torch.full((2, 256), -1, dtype=torch.int32, device="cuda")
    for number, (first, last) in enumerate(pairwise(edges)):
        doc_ids[:, first:last] = number
    with torch.no_grad():
        packed = model(tokens, doc_ids)
        for first, last in pairwise(edges):
            alone = model(tokens[:, first:last])
            torch.testing.assert_close(packed[:, first:last], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_two_trainings_with_deterministic_algorithms_end_in_the_same_bits(is_compiled: bool) -> None:
    ends = []
    tokens = torch.randint(1000, (4, 512), device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            model = made()
            call = torch.compile(model) if is_compiled else model
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for _ in range(3):
                with torch.autocast("cuda", torch.bfloat16):
                    total, count = call(tokens, labels=tokens)
                (total / count).backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append([p.detach().clone() for p in model.parameters()])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
