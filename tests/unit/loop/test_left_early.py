"""A loop that is left early, by every way Python has, loses no completed step."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.patience import PATIENCE_S
from tests.unit.state.tiny import adam, bits, job, learn, quietly, tiny
from unbroken import Run
from unbroken.errors import LeftMidStep, NotExact
from unbroken.records.journal import read_journal
from unbroken.records.layout import Layout

pytestmark = pytest.mark.promise("U1")


def outcome(directory: Path) -> tuple[str | None, str | None, str | None]:
    [*_, last] = [fact for fact in read_journal(Layout(directory)) if fact.kind == "job-end"]
    return last.text("status"), last.text("class"), last.text("reason")


def resumed(directory: Path, **settings: Any) -> tuple[int, dict[str, bytes]]:  # noqa: ANN401
    objects = tiny(seed=9)
    with Run(directory, settings=quietly(**settings), **objects) as run:
        return run.step, bits(objects["model"])


def after(steps: int) -> dict[str, bytes]:
    """The weights after so many steps without an interruption."""
    objects = tiny()
    torch.manual_seed(1)
    for _ in range(steps):
        learn(objects)
    return bits(objects["model"])


def leave(directory: Path, at: str, how: str) -> None:
    """Five steps, and the sixth left at the start, in the middle or at the end of its body."""
    objects = tiny()
    with Run(directory, settings=quietly(save_steps=None), **objects) as run:
        torch.manual_seed(1)
        for step in run.steps(100):
            if step == 5 and at == "start":
                break
            learn(objects)
            if step == 5 and at == "end":
                if how == "finish":
                    run.finish("converged")
                if how == "return":
                    return
                if how != "finish":
                    break
        # What follows the loop belongs to no step.
        for parameter in objects["model"].parameters():
            nn.init.zeros_(parameter)


@pytest.mark.parametrize(
    ("at", "how", "steps"),
    [("start", "break", 5), ("end", "break", 6), ("end", "return", 6), ("end", "finish", 6)],
)
def test_the_last_completed_step_is_saved_and_the_run_is_done(tmp_path: Path, at: str, how: str, steps: int) -> None:
    leave(tmp_path / "run", at, how)
    assert resumed(tmp_path / "run") == (steps, after(steps))


def test_the_outcome_says_who_ended_it(tmp_path: Path) -> None:
    leave(tmp_path / "a", "end", "break")
    assert outcome(tmp_path / "a") == ("completed", "done", "ended by the loop at step 6 of 100")
    leave(tmp_path / "b", "end", "finish")
    assert outcome(tmp_path / "b") == ("completed", "done", "converged")


def test_a_stop_before_the_break_means_another_job(tmp_path: Path) -> None:
    objects = tiny()
    with Run(tmp_path / "run", settings=quietly(save_steps=None), **objects) as run:
        for _ in run.steps(100):
            learn(objects)
            if run.step == 3:
                run.stop("own time limit")
                break
    assert outcome(tmp_path / "run")[:2] == ("stopped", "again")
    assert resumed(tmp_path / "run")[0] == 4


def test_an_exception_is_no_break(tmp_path: Path) -> None:
    def fail(run: Run, step: int) -> None:
        if step == 5:
            raise LookupError("no such sample")

    with pytest.raises(LookupError):
        job(tmp_path / "run", 100, quietly(save_steps=None), fail, **tiny())
    assert outcome(tmp_path / "run")[:2] == ("error", "look")
    assert not (tmp_path / "run" / "checkpoints" / "final").exists()


def test_a_body_left_between_two_optimizer_steps_is_refused(tmp_path: Path) -> None:
    def train() -> None:
        one, two = nn.Linear(2, 2), nn.Linear(2, 2)
        first, second = adam(one), adam(two)
        with Run(tmp_path / "run", settings=quietly(), one=one, two=two, first=first, second=second) as run:
            for step in run.steps(9):
                learn({"optimizer": first})
                if step == 2:
                    break
                learn({"optimizer": second})

    with pytest.raises(LeftMidStep, check=lambda each: each.step == 3):
        train()
    assert outcome(tmp_path / "run")[1] == "look"


def test_a_generator_around_the_loop_may_be_left_and_an_exception_beside_it_is_no_break(tmp_path: Path) -> None:
    def train(directory: Path, fails: bool) -> None:
        objects = tiny()
        run = Run(directory, settings=quietly(save_steps=None), **objects)

        def around() -> Iterator[int]:
            for step in run.steps(9):
                learn(objects)
                yield step

        for step in around():
            if step == 3 and fails:
                raise LookupError("no such sample")
            if step == 3:
                break

    train(tmp_path / "left", fails=False)
    assert outcome(tmp_path / "left")[:2] == ("completed", "done")
    with pytest.raises(LookupError):
        train(tmp_path / "failed", fails=True)
    assert not (tmp_path / "failed" / "checkpoints" / "final").exists()


def test_a_script_that_ends_itself_inside_the_loop_loses_no_completed_step(tmp_path: Path) -> None:
    def leave(run: Run, step: int) -> None:
        if step == 3:
            sys.exit()

    with pytest.raises(SystemExit):
        job(tmp_path / "run", 9, quietly(save_steps=None), leave, **tiny())
    assert outcome(tmp_path / "run")[:2] == ("stopped", "again")
    assert resumed(tmp_path / "run")[0] == 4


def test_a_completed_run_that_is_only_opened_stays_completed(tmp_path: Path) -> None:
    job(tmp_path / "run", 3, **tiny())
    with Run(tmp_path / "run", settings=quietly(), **tiny()):
        pass
    assert outcome(tmp_path / "run")[:2] == ("completed", "done")


def test_one_loop_at_a_time(tmp_path: Path) -> None:
    def nest(run: Run, step: int) -> None:
        next(run.steps(2))

    with pytest.raises(RuntimeError, match="one loop at a time"):
        job(tmp_path / "run", 3, body=nest, **tiny())


def batches() -> DataLoader[torch.Tensor]:
    return DataLoader([torch.tensor([float(i)]) for i in range(12)], batch_size=2, shuffle=True)  # type: ignore[arg-type]


def served(directory: Path, total: int, leave_at: int | None = None, touch: Callable[[], object] = int) -> list[float]:
    """What a loop draws and computes with; left after its draw in one body."""
    objects = tiny()
    seen: list[float] = []
    if not directory.exists():
        torch.manual_seed(7)
    with Run(directory, settings=quietly(save_steps=None), data=batches(), **objects) as run:
        for step in run.steps(total):
            batch = next(run.data)
            noise = torch.rand(())
            if step == leave_at:
                touch()
                break
            learn(objects)
            seen.append(float(batch.sum() + noise))
    return seen


def test_a_step_that_was_given_up_is_computed_again_from_its_start(tmp_path: Path) -> None:
    whole = served(tmp_path / "whole", 8)
    before = served(tmp_path / "run", 8, leave_at=5)
    assert before + served(tmp_path / "run", 8) == whole


def test_what_cannot_be_put_back_is_refused_until_accepted(tmp_path: Path) -> None:
    served(tmp_path / "run", 8, leave_at=5, touch=np.random.rand)
    with pytest.raises(NotExact) as refused:
        served(tmp_path / "run", 8)
    assert "numpy RNG state" in str(refused.value.differences)
    objects = tiny()
    with Run(tmp_path / "run", settings=quietly(accept=("unfinished-step",)), data=batches(), **objects) as run:
        assert run.step == 5


SCRIPT = """
import sys
import torch, unbroken
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters())
run = unbroken.Run(sys.argv[1], model=model, optimizer=optimizer)
if "no threads" in sys.argv[2]:
    import threading
    def over():
        def start(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        threading.Thread.start = start
    threading._register_atexit(over)

def train():
    steps = run.steps(10)
    if sys.argv[2].startswith("break, iterator kept"):
        sys.kept = steps
    for step in steps:
        optimizer.zero_grad(); model(torch.randn(4, 3)).sum().backward(); optimizer.step()
        if step == 6 and sys.argv[2].startswith("break"):
            break
        if step == 6 and sys.argv[2] == "return":
            return
        if step == 6 and sys.argv[2] == "raise":
            raise LookupError("no such sample")
        if step == 6 and sys.argv[2] == "exit":
            sys.exit(3)

train()
print("after the loop", run.step)
"""


@pytest.mark.parametrize(
    ("how", "code", "status"),
    [
        *(("", 0, "completed"), ("break", 0, "completed"), ("return", 0, "completed"), ("raise", 1, "error")),
        # Python ends it at exit, where thread pools start nothing more.
        ("break, iterator kept", 0, "completed"),
        # As Python 3.12 does it: no thread at all.
        ("break, iterator kept, no threads", 0, "completed"),
    ],
)
def test_without_with_the_job_ends_when_the_loop_does(tmp_path: Path, how: str, code: int, status: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run"), how]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert ended.returncode == code, ended.stderr
    assert outcome(tmp_path / "run")[0] == status
    if status == "completed":
        # While somebody holds the iterator, nobody knows that the loop was left.
        assert f"after the loop {6 if 'kept' in how else 7 if how else 10}" in ended.stdout
        assert resumed_step(tmp_path / "run") == (7 if how else 10)


def test_a_loop_that_failed_without_with_can_be_started_again_in_the_same_process(tmp_path: Path) -> None:
    def train(is_failing: bool) -> None:
        objects = tiny()
        run = Run(tmp_path / "run", settings=quietly(), **objects)
        for step in run.steps(8):
            learn(objects)
            if step == 5 and is_failing:
                raise LookupError("no such sample")

    with pytest.raises(LookupError):
        train(is_failing=True)
    train(is_failing=False)
    assert outcome(tmp_path / "run")[0] == "completed"
    assert [fact.job for fact in read_journal(Layout(tmp_path / "run")) if fact.kind == "job-end"] == [1, 2]


def resumed_step(directory: Path) -> int:
    model = nn.Linear(3, 1)
    with Run(directory, settings=quietly(), model=model, optimizer=torch.optim.AdamW(model.parameters())) as run:
        return run.step


def test_a_run_that_was_ended_by_the_loop_continues_to_a_later_target(tmp_path: Path) -> None:
    leave(tmp_path / "run", "end", "break")
    assert job(tmp_path / "run", 8, **tiny()).step == 8


def test_a_loader_worker_that_exits_does_not_end_the_run_of_its_parent(tmp_path: Path) -> None:
    objects = tiny()
    loader = DataLoader(TensorDataset(torch.zeros(4)), batch_size=2, num_workers=1)
    for _ in Run(tmp_path / "run", settings=quietly(save_steps=1), **objects).steps(5):
        learn(objects)
        # A worker that exits while the run trains on.
        list(loader)
    ends = [fact.text("reason") for fact in read_journal(Layout(tmp_path / "run")) if fact.kind == "job-end"]
    assert ends == ["the target is reached"]
    assert resumed(tmp_path / "run")[0] == 5
