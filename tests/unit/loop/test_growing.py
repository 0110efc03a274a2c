"""Models and optimizers that get parameters during a run: named at the next save, with what a resume needs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.state.tiny import bits, quietly
from unbroken import Run, checkpoints
from unbroken.errors import StateDiffers, TensorUnsupported

pytestmark = pytest.mark.promise("C18")
GROWS_AT = 4


class Killed(Exception):
    """Ends a job as a kill would."""


def grow(model: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> None:
    model["second"] = nn.Linear(2, 2)
    optimizer.add_param_group({"params": model["second"].parameters(), "lr": 0.02})


def train(directory: Path, *, follows: bool = True, kill_at: int | None = None) -> dict[str, bytes]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = checkpoints(directory) if directory.exists() else []
    if follows and any(each.is_usable and (each.step or 0) >= GROWS_AT for each in found):
        grow(model, optimizer)
    with Run(directory, settings=quietly(save_steps=1), model=model, optimizer=optimizer) as run:
        for step in run.steps(8):
            if step == kill_at:
                raise Killed
            if step + 1 == GROWS_AT:
                grow(model, optimizer)
            rows: Any = torch.randn(2, 3)
            for layer in model.values():
                rows = layer(rows)
            optimizer.zero_grad()
            rows.square().mean().backward()
            optimizer.step()
    return bits(model)


def changed(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if "second.weight" in each.message]


def test_a_model_that_grows_is_named_once_and_resumes_grown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = train(tmp_path / "whole")
    caplog.clear()
    for kill_at in (2, 5, 7):
        with pytest.raises(Killed):
            train(tmp_path / "run", kill_at=kill_at)
    model, optimizer = changed(caplog)
    assert "second.weight" in model and "second.weight" in optimizer and str(GROWS_AT) in model
    with pytest.raises(StateDiffers):
        train(tmp_path / "run", follows=False)
    assert train(tmp_path / "run") == whole


def test_a_parameter_of_no_module_fails_the_save_and_not_the_training(tmp_path: Path) -> None:
    model, stranger = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(tmp_path / "run", settings=quietly(save_steps=2), model=model, optimizer=optimizer)

    def loop() -> None:
        for step in run.steps(6):
            if step == 2:
                optimizer.add_param_group({"params": stranger.parameters()})
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

    with pytest.raises(TensorUnsupported):
        loop()
    assert run.step == 6
    assert [found.step for found in checkpoints(tmp_path / "run")] == [2]
