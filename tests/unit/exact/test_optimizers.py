"""An optimizer rounds an element alike wherever it stands in its shard, or it is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from unbroken import exact
from unbroken.errors import CannotFold


def after_steps(cuts: tuple[int, ...], **options: Any) -> torch.Tensor:  # noqa: ANN401
    generator = torch.Generator().manual_seed(0)
    numel = 1003
    whole = torch.randn(numel, generator=generator)
    gradients = [torch.randn(numel, generator=generator) for _ in range(6)]
    spans = list(zip((0, *cuts), (*cuts, numel), strict=True))
    parts = [nn.Parameter(whole[start:end].clone()) for start, end in spans]
    optimizer = torch.optim.AdamW(parts, lr=1e-2, weight_decay=0.1, **options)
    for gradient in gradients:
        for part, (start, end) in zip(parts, spans, strict=True):
            part.grad = gradient[start:end].clone()
        optimizer.step()
    kept = [optimizer.state[part][name] for name in ("exp_avg", "exp_avg_sq") for part in parts]
    return torch.cat([part.detach() for part in parts] + kept)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {}], ids=str)
@pytest.mark.parametrize("cuts", [(3,), (101, 555), (7, 9, 500, 777)], ids=str)
def test_adamw_gives_the_same_bits_however_its_parameters_are_cut(cuts: tuple[int, ...], options: Any) -> None:  # noqa: ANN401
    assert torch.equal(after_steps(cuts, **options), after_steps((), **options))


def test_one_that_is_fused_on_the_cpu_does_not_and_is_refused() -> None:
    assert not torch.equal(after_steps((3,), fused=True), after_steps((), fused=True))
    model = nn.Linear(2, 2)
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(CannotFold, match="use foreach=True"):
        exact.Reducer(model, fused, lanes=1, seed=0)
