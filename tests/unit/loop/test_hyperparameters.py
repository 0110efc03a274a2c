"""Values that a script constructs differently than at the start of its run: logged, and used if the settings say so."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from tests.unit.state.tiny import learn, model, quietly
from unbroken import Run
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import read_metrics

Make = Callable[[torch.optim.Optimizer], Any]
DECAY = 0.5


def warmup(step: int, *, steps: int) -> float:
    return min(1.0, (step + 1) / steps)


def script(make: Make | None = None, *, lr: float = 0.1, **options: Any) -> dict[str, Any]:  # noqa: ANN401
    """What a script constructs, with two parameter groups and momentum."""
    module = model()
    matrices, others = ([p for p in module.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=lr, **{"momentum": 0.9, "weight_decay": 0.01, **options})
    return {"model": module, "optimizer": optimizer, **({} if make is None else {"scheduler": make(optimizer)})}


def train(run: Path, total: int, objects: dict[str, Any], *, kill_at: int | None = None, **settings: Any) -> float:  # noqa: ANN401
    """One job; returns the learning rate after it."""
    with Run(run, settings=quietly(**settings), **objects) as held:
        for step in held.steps(total):
            learn(objects)
            scheduler = objects.get("scheduler")
            if isinstance(scheduler, schedules.ReduceLROnPlateau):
                scheduler.step(1.0)
            elif scheduler is not None:
                scheduler.step()
            elif step == 3:
                objects["optimizer"].param_groups[0]["lr"] = 1e-3
            held.log(loss=float(objects["optimizer"].param_groups[0]["lr"]))
            if step == kill_at:
                raise RuntimeError("killed")
    return float(objects["optimizer"].param_groups[0]["lr"])


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [line for line in caplog.messages if " in the script and was " in line]
    caplog.clear()
    return found


SCHEDULES: dict[str, Make | None] = {
    "the loop": None,
    "warmup": lambda o: schedules.LambdaLR(o, partial(warmup, steps=4)),
    "one cycle": lambda o: schedules.OneCycleLR(o, max_lr=0.3, total_steps=50),
    "cosine after warmup": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=3), schedules.CosineAnnealingLR(o, T_max=20)], milestones=[3]
    ),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0),
    "steps": lambda o: schedules.MultiStepLR(o, milestones=[2, 4], gamma=0.1),
}


@pytest.mark.promise("U8")
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # torch 2.6 warns of its own SequentialLR
@pytest.mark.parametrize("by", SCHEDULES)
def test_a_schedule_that_moves_the_rate_is_no_change(by: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    objects = script(SCHEDULES[by])
    train(tmp_path, 5, objects)
    train(tmp_path, 7, script(SCHEDULES[by]))
    # The same objects once more, as a notebook has them: their values have moved.
    train(tmp_path, 9, objects)
    assert warnings_in(caplog) == []


@pytest.mark.promise("U8")
def test_each_changed_value_is_reported_in_one_line_and_the_checkpoints_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = partial(schedules.StepLR, step_size=2, gamma=0.5)
    reached = train(tmp_path, 5, script(make))
    changed = partial(schedules.StepLR, step_size=3, gamma=0.5)
    for target in (6, 7):
        objects = script(changed, lr=0.2, weight_decay=0.05)
        assert train(tmp_path, target, objects) == pytest.approx(0.1 * DECAY ** (target // 2))
        assert objects["optimizer"].param_groups[0]["weight_decay"] == 0.01
        lines = warnings_in(caplog)
        assert [line.split(" is ")[0] for line in lines] == [
            "optimizer.param_groups[0].weight_decay",
            "optimizer.lr",
            "scheduler.step_size",
        ]
    assert reached == pytest.approx(0.025)
    [_, fact] = read_history(Layout(tmp_path)).of_kind("hyperparameters")
    assert fact.values["step"] == 6 and {change["used"] for change in fact.values["changes"]} == {"checkpoint"}


@pytest.mark.promise("U8")
@pytest.mark.parametrize("total", [5, 6])
def test_the_scripts_values_are_put_in_place_as_if_the_schedule_had_them_from_the_start(
    total: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = partial(schedules.CosineAnnealingLR, T_max=20)
    new = partial(schedules.CosineAnnealingLR, T_max=9, eta_min=1e-3)
    train(tmp_path / "run", total, script(old))
    objects = script(new, lr=0.2, weight_decay=0.05, momentum=0.8)
    reached = train(tmp_path / "run", 8, objects, hyperparameters="script")
    assert reached == train(tmp_path / "other", 8, script(new, lr=0.2))
    assert [group["weight_decay"] for group in objects["optimizer"].param_groups] == [0.05, 0.0]
    assert objects["optimizer"].param_groups[1]["momentum"] == 0.8
    history = read_history(Layout(tmp_path / "run"))
    assert set(history.of_kind("resume")[-1].values["changed"]) == {
        *("optimizer.lr", "optimizer.momentum", "optimizer.param_groups[0].weight_decay"),
        *("scheduler.T_max", "scheduler.eta_min"),
    }
    # They are the run's values now: the same script says nothing, and the old one is told again.
    caplog.clear()
    train(tmp_path / "run", 9, script(new, lr=0.2, weight_decay=0.05, momentum=0.8))
    assert warnings_in(caplog) == []
    train(tmp_path / "run", 10, script(old))
    assert "optimizer.lr" in {line.split(" is ")[0] for line in warnings_in(caplog)}


@pytest.mark.promise("U8")
def test_a_function_of_the_script_is_used_in_any_case_and_its_numbers_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(optimizer: torch.optim.Optimizer, steps: int) -> schedules.LambdaLR:
        floor = 0.5 if steps == 4 else 0.25
        return schedules.LambdaLR(optimizer, [partial(warmup, steps=steps), lambda step: max(floor, DECAY**step)])

    train(tmp_path, 2, script(partial(make, steps=4)))
    train(tmp_path, 4, script(partial(make, steps=8)))
    lines = warnings_in(caplog)
    assert [line.split(" is ")[0] for line in lines] == [
        "scheduler.lr_lambdas[0].steps",
        "scheduler.lr_lambdas[1].floor",
    ]
    monkeypatch.setitem(globals(), "DECAY", 0.4)
    train(tmp_path, 6, script(partial(make, steps=8)))
    assert [line.split(" is ")[0] for line in warnings_in(caplog)] == ["scheduler.lr_lambdas[1].DECAY"]


@pytest.mark.promise("U8", "X3")
def test_steps_are_compared_only_with_steps_of_the_same_hyperparameters(tmp_path: Path) -> None:
    def killed(lr: float, kill_at: int, **settings: Any) -> None:  # noqa: ANN401
        with pytest.raises(RuntimeError, match="killed"):
            train(tmp_path, 20, script(lr=lr), kill_at=kill_at, save_steps=5, logging_steps=1, **settings)

    def compared() -> tuple[int, int]:
        found = read_metrics(Layout(tmp_path)).recomputed
        return found.compared, found.agreeing

    killed(0.1, 8)
    killed(0.2, 8, hyperparameters="script")
    assert compared() == (0, 0), "another learning rate gives other numbers, and is no corruption"
    killed(0.2, 8, hyperparameters="script")
    assert compared() == (3, 3), "changed once more, for its checkpoint has the first rate, and compared with its like"
    killed(0.1, 7)
    assert compared() == (3, 3), "the checkpoint's own rate again"
