"""AdamW in one pass: torch's numbers, an element's bits from that element alone, and a factor inside the step."""

import pytest
import torch
from torch import Tensor, nn

from unbroken.gpt.optimizer import AdamW

STEPS, SIZE = 4, 5_003
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


def _drawn() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(SIZE, generator=generator) for _ in range(STEPS + 1)]


def _trained(device: str, *, first: int = 0, inside: float | None = None, by_hand: float = 1.0) -> Tensor:
    """The weights from ``first`` on, after some steps; gradients are scaled inside the step, or before it."""
    values, *gradients = _drawn()
    parameter = nn.Parameter(values[first:].to(device))
    optimizer = AdamW([{"params": [parameter], "weight_decay": 0.1}], lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for gradient in gradients:
        parameter.grad = (gradient[first:] * by_hand).to(device)
        if inside is not None:
            optimizer.scale_next(torch.tensor(inside, device=device, dtype=torch.float64))
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("device", DEVICES)
def test_it_moves_weights_as_torch_does(device: str) -> None:
    values, *gradients = _drawn()
    parameter = nn.Parameter(values.to(device))
    theirs = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for gradient in gradients:
        parameter.grad = gradient.to(device)
        theirs.step()
    torch.testing.assert_close(_trained(device), parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [1, 7, 907, 1_024, 4_999])
def test_an_elements_bits_do_not_depend_on_where_its_shard_begins(device: str, first: int) -> None:
    assert torch.equal(_trained(device)[first:], _trained(device, first=first))


@pytest.mark.parametrize("device", DEVICES)
def test_a_factor_inside_the_step_is_a_factor_before_it(device: str) -> None:
    scaled = _trained(device, inside=0.25)
    assert torch.equal(scaled, _trained(device, by_hand=0.25))
    assert not torch.equal(scaled, _trained(device))


@pytest.mark.parametrize("device", DEVICES)
def test_a_factor_serves_one_step(device: str) -> None:
    parameter = nn.Parameter(torch.zeros(3, device=device))
    optimizer = AdamW([{"params": [parameter]}], lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    optimizer.scale_next(torch.zeros((), device=device))
    moved = []
    for _ in range(2):
        parameter.grad = torch.ones(3, device=device)
        before = parameter.detach().clone()
        optimizer.step()
        moved.append(not torch.equal(before, parameter))
    assert moved == [False, True]


def test_it_keeps_its_state_under_torchs_names() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamW([{"params": [parameter]}], lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    parameter.grad = torch.ones(3)
    optimizer.step()
    theirs = torch.optim.AdamW([parameter], lr=1e-2)
    theirs.load_state_dict(optimizer.state_dict())
    assert set(theirs.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
