"""A loop with one step per micro-batch: no save falls between a backward pass and its optimizer step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.state.tiny import adam, bits, model, quietly
from unbroken import Run
from unbroken.loop.step_body import LEAST_PATIENCE_STEPS
from unbroken.store.directory import Store

pytestmark = pytest.mark.promise("U3")


class Killed(Exception):
    """Ends a job as a kill would: nothing more is saved."""


def train(
    directory: Path,
    total: int,
    every: int,
    at: Callable[[Run, int], None] = lambda run, step: None,
    **settings: Any,  # noqa: ANN401
) -> tuple[dict[str, bytes], list[int]]:
    """One ``steps`` per micro-batch, an optimizer step every few of them; the bits, and which steps were saved."""
    module = model()
    optimizer = adam(module)
    with Run(directory, settings=quietly(**settings), model=module, optimizer=optimizer) as run:
        for step in run.steps(total):
            at(run, step)
            (module(torch.randn(2, 3)).square().mean() / every).backward()
            if (step + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    return bits(module), saved(directory)


def saved(directory: Path) -> list[int]:
    store = Store(directory / "checkpoints")
    if not store.root.exists():
        return []
    names = [path.name for path in store.root.iterdir() if (path / "manifest.json").exists()]
    return sorted({store.read_manifest(name).step for name in names if name != "latest"})


def kill_at(number: int) -> Callable[[Run, int], None]:
    def at(run: Run, step: int) -> None:
        if step == number:
            raise Killed

    return at


def stop_at(number: int) -> Callable[[Run, int], None]:
    def at(run: Run, step: int) -> None:
        if step == number:
            run.stop()

    return at


@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("how", [kill_at, stop_at], ids=["kill", "stop"])
def test_interrupted_at_every_edge_it_ends_with_the_same_bits(tmp_path: Path, number: int, how: Any) -> None:  # noqa: ANN401
    whole, _ = train(tmp_path / "whole", 8, every=2)
    try:
        _, steps = train(tmp_path / "run", 8, 2, how(number), save_steps=1, keep_last_k=None)
    except Killed:
        steps = saved(tmp_path / "run")
    assert all(step % 2 == 0 for step in steps)
    assert train(tmp_path / "run", 8, every=2)[0] == whole


def test_a_save_that_waits_too_long_takes_the_gradients_along(tmp_path: Path) -> None:
    every = 3 * LEAST_PATIENCE_STEPS
    whole, _ = train(tmp_path / "whole", 2 * every, every)
    with pytest.raises(Killed):
        train(tmp_path / "run", 2 * every, every, kill_at(every - 2), save_steps=1)
    resumed_at = max(saved(tmp_path / "run"))
    assert 0 < resumed_at < every
    tensors = Store(tmp_path / "run" / "checkpoints").read_manifest(f"checkpoint-{resumed_at}").tensors
    assert "gradients.optimizer.0.weight" in tensors
    ended, steps = train(tmp_path / "run", 2 * every, every)
    assert ended == whole
    # Where the optimizer has stepped there is nothing pending, and nothing of it is stored.
    assert not any(
        name.startswith("gradients") for name in Store(tmp_path / "run" / "checkpoints").read_manifest("final").tensors
    )
    assert steps[-1] == 2 * every


def test_the_last_step_is_saved_with_its_gradients(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "whole", 8, every=4)
    train(tmp_path / "run", 6, every=4)
    assert train(tmp_path / "run", 8, every=4)[0] == whole


def test_a_step_that_a_loss_scaler_skips_counts(tmp_path: Path) -> None:
    module = nn.Linear(3, 1)
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = scaler.step
    with Run(tmp_path / "run", settings=quietly(save_steps=1), model=module, optimizer=optimizer, scaler=scaler) as run:
        for step in run.steps(6):
            optimizer.zero_grad()
            scale = float("inf") if step == 3 else 1.0
            scaler.scale(module(torch.ones(1, 3)).sum() * scale).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 3:
                break
    assert saved(tmp_path / "run")[-1] == 4
    assert scaler.step == before


def test_optimizers_that_take_turns_do_not_hold_up_saves(tmp_path: Path) -> None:
    one, two = model(), model(1)
    first, second = adam(one), adam(two)
    settings = quietly(save_steps=2, keep_last_k=None)
    with Run(tmp_path / "run", settings=settings, one=one, two=two, first=first, second=second) as run:
        for step in run.steps(12):
            module, optimizer = (two, second) if step % 3 == 2 else (one, first)
            optimizer.zero_grad()
            module(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    assert saved(tmp_path / "run") == [2, 4, 6, 8, 10, 12]
