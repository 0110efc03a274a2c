"""A script's own defaults: votes, copies and records stay on the CPU; a buffer that no state dict holds is named."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.torch_versions import torch_is_older
from tests.unit.state.tiny import bits, job, quietly, tiny
from unbroken import Run, Settings


@pytest.mark.skipif(torch_is_older(2, 11), reason="AdamW of older torch keeps its step count on the default device")
def test_another_default_device_moves_neither_votes_nor_copies(tmp_path: Path) -> None:
    first, again, whole = tiny(), tiny(1), tiny()
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(5)
    job(tmp_path / "whole", 4, **whole)
    torch.set_default_device("meta")
    try:
        torch.manual_seed(5)
        job(tmp_path / "run", 2, rng=generator, **first)
        job(tmp_path / "run", 4, rng=generator, **again)
    finally:
        torch.set_default_device(None)
    assert bits(again["model"]) == bits(whole["model"])


class Counting(nn.Module):
    """A module with a buffer that training changes and no state dict holds, and one that it does not change."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self) -> torch.Tensor:
        self.seen += 1
        return self.weight.sum()


def test_a_buffer_that_no_checkpoint_holds_and_training_changes_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(settings: Settings) -> str:
        caplog.clear()
        model = Counting()
        with Run(tmp_path / str(len(list(tmp_path.iterdir()))), settings=settings, model=model) as run:
            for _ in run.steps(6):
                model()
        return caplog.text

    said = train(quietly(audit="warn"))
    assert said.count("buffer model.seen is not persistent and has changed") == 1
    assert "model.mask" not in said
    assert "model.seen" not in train(quietly(audit="warn", audit_ignore=("model.seen",)))
