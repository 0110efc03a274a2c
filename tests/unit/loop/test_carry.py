"""What a loop takes over a step's edge is carried, or said to be carried without a word."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.unit.state.tiny import adam, bits, model, quietly
from unbroken import Run
from unbroken.errors import NeedsPickle, NotExact

pytestmark = pytest.mark.promise("U2")


def rows() -> DataLoader[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader([torch.rand(3, generator=generator) for _ in range(10)], batch_size=2, shuffle=True)  # type: ignore[arg-type]


def fetch() -> tuple[torch.Tensor, int]:
    """nanoGPT's way: no loader, only the RNG."""
    return torch.rand(2, 3), int(torch.randint(9, ()))


class Killed(Exception):
    """Ends a job as a kill would."""


def train(directory: Path, total: int, *, data: bool, kill_at: int | None = None, carries: bool = True) -> list[float]:
    """A batch fetched before the loop, and the next one prefetched inside; the losses, and the weights' bits."""
    module = model()
    optimizer = adam(module)
    objects: dict[str, Any] = {"data": rows()} if data else {}
    losses = []
    with Run(directory, settings=quietly(save_steps=2), model=module, optimizer=optimizer, **objects) as run:

        def batch() -> Any:  # noqa: ANN401
            make = (lambda: next(run.data)) if data else fetch
            return run.carry("batch", make) if carries else make()

        now = batch()
        for step in run.steps(total):
            if step == kill_at:
                raise Killed
            rows_now, extra = (now, 0) if data else now
            loss = module(rows_now).square().mean() + extra
            now = batch()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().item())
    return [*losses, float(sum(map(sum, bits(module).values())))]


@pytest.mark.parametrize("data", [False, True], ids=["RNG", "loader"])
def test_a_prefetched_batch_is_used_after_a_resume(tmp_path: Path, data: bool) -> None:
    torch.manual_seed(5)
    whole = train(tmp_path / "whole", 9, data=data)
    torch.manual_seed(5)
    with pytest.raises(Killed):
        train(tmp_path / "run", 9, data=data, kill_at=5)
    assert train(tmp_path / "run", 9, data=data) == whole[4:]


@pytest.mark.parametrize("data", [False, True], ids=["RNG", "loader"])
def test_a_batch_fetched_before_the_loop_and_not_carried_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bool
) -> None:
    train(tmp_path / "run", 4, data=data, carries=False)
    [said] = [record.message for record in caplog.records if "run.carry" in record.message]
    assert ("run.data" in said) == data


def test_a_carried_batch_needs_no_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "run", 4, data=True)
    train(tmp_path / "run", 6, data=True)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def loop(directory: Path, draw: Any, **settings: Any) -> None:  # noqa: ANN401
    module = model()
    optimizer = adam(module)
    loader = rows()
    with Run(directory, settings=quietly(**settings), model=module, optimizer=optimizer, data=loader) as run:
        for step in run.steps(4):
            draw(run, loader, step)
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()


def test_data_that_is_iterated_elsewhere_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop(tmp_path / "run", lambda run, loader, step: next(iter(loader)))
    assert [record for record in caplog.records if "batch = next(run.data)" in record.message]


def test_a_batch_more_than_steps_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop(tmp_path / "run", lambda run, loader, step: [next(run.data) for _ in range(2 if step == 0 else 1)])
    [said] = [record.message for record in caplog.records if "run.carry" in record.message]
    assert "run.data" in said


def test_one_draw_a_step_is_nothing_to_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop(tmp_path / "run", lambda run, loader, step: next(run.data))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_random_numbers_drawn_before_the_loop_do_not_change_a_resumed_run(tmp_path: Path) -> None:
    def job(directory: Path, total: int) -> list[float]:
        module = model()
        optimizer = adam(module)
        seen = []
        with Run(directory, settings=quietly(), model=module, optimizer=optimizer) as run:
            torch.rand(7)
            for _ in run.steps(total):
                seen.append(float(torch.rand(())))
                for parameter in module.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
        return seen

    torch.manual_seed(1)
    whole = job(tmp_path / "whole", 6)
    torch.manual_seed(1)
    assert job(tmp_path / "run", 4) + job(tmp_path / "run", 6) == whole


def test_a_value_that_cannot_be_stored_is_refused_at_the_call(tmp_path: Path) -> None:
    with Run(tmp_path / "run", settings=quietly(), model=model()) as run, pytest.raises(NeedsPickle):
        run.carry("odd", object)


def test_a_value_carried_only_inside_the_loop_is_reported_and_refused_at_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(run: Run, loader: object, step: int) -> None:
        next(run.data)
        run.carry("hidden", torch.ones(1) * step)

    loop(tmp_path / "run", body)
    assert "'hidden'" in caplog.text
    with pytest.raises(NotExact) as refused:
        loop(tmp_path / "run", body)
    assert "hidden" in str(refused.value.differences)


def test_a_batch_fetched_between_making_the_run_and_its_loop_is_reported_without_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = model()
    optimizer = adam(module)
    run = Run(tmp_path / "run", settings=quietly(), model=module, optimizer=optimizer)
    torch.rand(3)
    for _ in run.steps(2):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert "run.carry" in caplog.text


def test_a_loop_over_all_data_inside_one_step_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body(run: Run, loader: object, step: int) -> None:
        for number, _ in enumerate(run.data):
            if number == 4 * len(run.data):
                break

    loop(tmp_path / "run", body)
    assert "`for batch in run.data` never ends" in caplog.text


def test_a_part_that_is_frozen_during_the_run_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = model()
    optimizer = adam(module)
    with Run(tmp_path / "run", settings=quietly(), model=module, optimizer=optimizer) as run:
        for step in run.steps(6):
            module[0].requires_grad_(step < 3)
            optimizer.zero_grad()
            module(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    [said] = [record.message for record in caplog.records if "requires_grad" in record.message]
    assert said.startswith("requires_grad or train/eval mode of model.0 changed during the run")
