"""A loop with Accelerate: what its edges save, what a resume restores, and what is refused. All in one process."""

import contextlib
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")

from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import (  # type: ignore[import-untyped]
    DataLoaderConfiguration,
    DistributedType,
    ProjectConfiguration,
    set_seed,
)

import unbroken
from tests.trackers.board import Board
from unbroken.errors import NotExact, UnsavedState, WeightsOnly
from unbroken.frameworks import accelerate as unbroken_acc
from unbroken.frameworks.accelerator_contents import Held, require_usable
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.state.audit import _live_objects, remember

QUIET: dict[str, Any] = {"console": False, "catch_signals": False}
BATCHES = 5


class Loop:
    """What a script makes, and the body of its loop."""

    def __init__(self, batch_size: int = 4, lr: float = 0.1, gamma: float = 0.9, **options: Any) -> None:  # noqa: ANN401
        set_seed(1)
        self.accelerator = Accelerator(cpu=True, **options)
        model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.4), torch.nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma)
        rows = TensorDataset(torch.arange(40.0).reshape(20, 2) / 40)
        loader = DataLoader(rows, batch_size=batch_size, shuffle=True)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def compute(self, batch: list[torch.Tensor]) -> torch.Tensor:
        with self.accelerator.accumulate(self.model):
            loss: torch.Tensor = self.model(batch[0]).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return loss

    def state(self) -> list[object]:
        weights = [value.detach().clone().tolist() for value in self.model.parameters()]
        return [weights, self.scheduler.get_last_lr(), torch.get_rng_state().tolist()]


def train(
    directory: Path,
    loop: Loop,
    epochs: int = 2,
    then: Callable[[Any], None] = lambda _: None,
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Train to the end, or to where ``then`` stops it after the computation of a batch."""
    with unbroken_acc.attach(loop.accelerator, directory, **{"save_steps": 3, **QUIET, **options}) as run:
        for _ in run.epochs(epochs):
            for batch in run.batches(loop.loader):
                run.log(loss=loop.compute(batch))
                then(run)
    return run


def stop_at(step: int) -> Callable[[Any], None]:
    def then(run: Any) -> None:  # noqa: ANN401
        if run.step + 1 == step:
            run.stop("by the test")

    return then


def steps_of(directory: Path) -> list[int | None]:
    return [each.step for each in unbroken.checkpoints(directory)]


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its state for the whole process."""
    from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.promise("C10")
@pytest.mark.parametrize(("step", "reread"), [(2, None), (5, True), (8, False)])
def test_stopped_at_a_step_it_ends_in_the_same_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int, reread: bool | None
) -> None:
    whole = Loop()
    train(tmp_path / "whole", whole)
    expected = whole.state()
    plain = Loop()
    for _ in range(2):
        for batch in plain.loader:
            plain.compute(batch)
    assert plain.state() == expected

    stopped = train(tmp_path / "run", Loop(), then=stop_at(step))
    assert stopped.is_stopped and stopped.step == step
    torch.manual_seed(99)
    loop = Loop()
    with caplog.at_level(logging.INFO):
        resumed = train(tmp_path / "run", loop, reread=reread)
    assert loop.state() == expected
    assert ("(read again)" in caplog.text) == bool(reread) != ("(skipped by index)" in caplog.text)
    assert not resumed.is_stopped and resumed.step == 2 * BATCHES
    assert "mismatch" not in [event.kind for event in read_history(Layout(tmp_path / "run")).events]


@pytest.mark.promise("C10", "G24")
def test_a_tracker_shows_each_step_once_in_one_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"tracker_mode": "committed", "tracker_run_name": "mine", "tracker_config": {"width": 4}}
    board = Board()
    train(tmp_path / "run", Loop(), then=stop_at(5), trackers=(board,), **options)
    train(tmp_path / "run", Loop(), trackers=(board,), **options)
    ((_, rows),) = board.runs.items()
    assert [step for step, _ in rows] == [*range(1, 2 * BATCHES + 1)]
    assert [(each.name, each.config, each.is_resumed) for each in board.started] == [
        ("mine", {"width": 4}, False),
        ("mine", {"width": 4}, True),
    ]
    pytest.importorskip("tensorboard")
    twice = Loop(log_with="tensorboard", project_dir=tmp_path)
    train(tmp_path / "twice", twice, trackers="tensorboard")
    assert "log_with" in caplog.text


@pytest.mark.promise("C10")
def test_hyperparameters_that_have_changed_are_named_and_those_of_the_checkpoint_are_used(tmp_path: Path) -> None:
    whole = Loop()
    train(tmp_path / "whole", whole)
    expected = whole.state()
    train(tmp_path / "run", Loop(), then=stop_at(4))
    train(tmp_path / "run", Loop(), then=stop_at(6))
    assert not read_history(Layout(tmp_path / "run")).of_kind("notice")
    for stop in (7, 99):
        changed = Loop(lr=0.2, gamma=0.5)
        train(tmp_path / "run", changed, then=stop_at(stop))
    assert changed.state() == expected
    notices = [str(event.values["text"]) for event in read_history(Layout(tmp_path / "run")).of_kind("notice")]
    # In both jobs: what the checkpoints keep is what the run began with.
    assert [each.partition(":")[0] for each in notices] == 2 * [
        "optimizer.lr was 0.1 when the checkpoint was saved and is 0.2 now",
        "scheduler.gamma was 0.9 when the checkpoint was saved and is 0.5 now",
    ]


def ends(directory: Path) -> list[tuple[str | None, str | None]]:
    events = read_history(Layout(directory)).of_kind("job-end")
    return [(event.text("status"), event.text("reason")) for event in events]


@pytest.mark.promise("C10")
def test_a_loop_that_an_exception_left_is_recorded_as_an_error_and_can_be_opened_again(tmp_path: Path) -> None:
    def fails(message: str) -> Callable[[Any], None]:
        def then(run: Any) -> None:  # noqa: ANN401
            if run.step == 6:
                raise ValueError(message)

        return then

    def without_with(then: Callable[[Any], None] = lambda _: None, *, leaves: bool = False) -> None:
        """Two cells of a notebook."""
        loop = Loop()
        run = unbroken_acc.attach(loop.accelerator, tmp_path / "run", save_steps=3, **QUIET)
        for _ in run.epochs(3):
            for batch in run.batches(loop.loader):
                loop.compute(batch)
                then(run)
            if leaves:
                break

    with pytest.raises(ValueError, match="odd"):
        train(tmp_path / "run", Loop(), then=fails("a batch is odd"))
    with contextlib.suppress(ValueError):
        without_with(fails("nobody will know"))
    try:
        without_with(fails("known where it is handled"))
    except ValueError:
        without_with(leaves=True)
    assert ends(tmp_path / "run") == [
        ("error", "ValueError: a batch is odd"),
        ("error", "TrainingLeft: an exception or sys.exit left the training at step 7"),
        ("error", "ValueError: known where it is handled"),
        ("completed", "the loop was left at step 10"),
    ]


@pytest.mark.promise("C10")
def test_only_whole_updates_are_steps(tmp_path: Path) -> None:
    loop = Loop(gradient_accumulation_steps=2)
    seen: list[tuple[int, int]] = []
    run = train(tmp_path, loop, then=lambda run: seen.append((run.step, run.batch)), save_steps=1)
    # Five batches: two updates of two, and one of the last.
    assert run.step == 6 and seen[:5] == [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5)]
    # By hand, without accumulate: an update is what the optimizer makes.
    loop = Loop()
    with unbroken_acc.attach(loop.accelerator, tmp_path / "hand", save_steps=1, **QUIET) as by_hand:
        for _ in by_hand.epochs(1):
            for number, batch in enumerate(by_hand.batches(loop.loader)):
                loop.accelerator.backward(loop.model(batch[0]).square().mean())
                if number % 2:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
    assert by_hand.step == 2 and steps_of(tmp_path / "hand") == [2, 1]


@pytest.mark.promise("C10")
def test_a_stop_leaves_the_block_past_what_follows_the_batches(tmp_path: Path) -> None:
    loop, followed = Loop(), []
    with unbroken_acc.attach(loop.accelerator, tmp_path, save_steps=None, **QUIET) as run:
        for epoch in run.epochs(3):
            for batch in run.batches(loop.loader):
                loop.compute(batch)
                if run.step == 6:
                    run.stop()
            followed.append(epoch)
    assert followed == [0] and run.is_stopped and steps_of(tmp_path) == [7]
    # Without `with` the loops end.
    run = unbroken_acc.attach(loop.accelerator, tmp_path, save_steps=None, **QUIET)
    for epoch in run.epochs(3):
        for batch in run.batches(loop.loader):
            loop.compute(batch)
            run.stop()
        if run.is_stopped:
            break
        followed.append(epoch)
    assert followed == [0] and run.is_stopped and run.step == 8


@pytest.mark.promise("C10")
def test_an_epochs_end_is_saved_when_it_is_requested_and_not_done_again(tmp_path: Path) -> None:
    def job(stops: bool) -> list[int]:
        loop, followed = Loop(), []
        with unbroken_acc.attach(loop.accelerator, tmp_path, save_steps=None, keep_best="score:max", **QUIET) as run:
            for epoch in run.epochs(3):
                for batch in run.batches(loop.loader):
                    if stops and epoch == 1:
                        raise KeyboardInterrupt
                    loop.compute(batch)
                followed.append(epoch)
                run.log(score=epoch)
                run.save()
        return followed

    with pytest.raises(KeyboardInterrupt):
        job(stops=True)
    assert steps_of(tmp_path) == [5]
    assert unbroken.checkpoints(tmp_path)[0].metrics["score"] == 0
    assert job(stops=False) == [1, 2]
    assert job(stops=False) == []


@pytest.mark.promise("C10")
@pytest.mark.parametrize("step", [3, 7, 10, 13])
def test_several_passes_of_an_epoch_are_continued_each_where_it_was(tmp_path: Path, step: int) -> None:
    def job(name: str, stop: int = 0) -> list[object]:
        loop = Loop()
        with unbroken_acc.attach(loop.accelerator, tmp_path / name, save_steps=None, **QUIET) as run:
            for _ in run.epochs(2):
                for _ in range(2):
                    for batch in run.batches(loop.loader):
                        loop.compute(batch)
                        if run.step + 1 == stop:
                            run.stop()
                torch.rand(3)
        return loop.state()

    whole = job("whole")
    job("run", stop=step)
    assert job("run") == whole


@pytest.mark.promise("C10")
def test_a_number_of_steps_ends_the_training_inside_an_epoch(tmp_path: Path) -> None:
    computed = 0
    for _ in range(2):
        loop = Loop()
        with unbroken_acc.attach(loop.accelerator, tmp_path, save_steps=None, **QUIET) as run:
            for _ in run.epochs(100, max_steps=7):
                for batch in run.batches(loop.loader):
                    loop.compute(batch)
                    computed += 1
    assert run.step == 7 and computed == 7 and not run.is_stopped
    # Left by `break`, it is done, too.
    loop = Loop()
    with unbroken_acc.attach(loop.accelerator, tmp_path / "left", save_steps=None, **QUIET) as run:
        for _ in run.epochs(100):
            for batch in run.batches(loop.loader):
                loop.compute(batch)
                break
            break
    assert not run.is_stopped and steps_of(tmp_path / "left") == [1]


@pytest.mark.promise("C10", "X6")
def test_accelerates_own_naming_and_limit_are_kept(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    loop = Loop(project_config=project)
    own = tmp_path / "checkpoints"
    with unbroken_acc.attach(loop.accelerator, save_steps=2, **QUIET) as run:
        for _ in run.epochs(1):
            for batch in run.batches(loop.loader):
                loop.compute(batch)
                if run.step == 3:
                    # The script's own: a folder beside those of the run.
                    loop.accelerator.save_state()
    assert steps_of(tmp_path) == [5, 4] and [each.name for each in own.iterdir()] == ["checkpoint_0"]
    # The next job continues their count, where Accelerate would find that the folder exists: also one that a job made
    # which was killed before its next checkpoint.
    (own / "checkpoint_1").mkdir()
    again = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    loop = Loop(project_config=again)
    train(tmp_path, loop, epochs=2)
    loop.accelerator.save_state()
    assert {each.name for each in own.iterdir()} == {"checkpoint_1", "checkpoint_2"}
    # And Accelerate reads the folders of the run.
    expected, reader = loop.state()[:2], Loop()
    reader.accelerator.load_state(str(tmp_path / "checkpoint-10"))
    assert reader.state()[:2] == expected


@pytest.mark.promise("C10")
def test_unsaved_state_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Earlier tests in this process may have left optimizers that something still holds.
    remember(each for _, each in _live_objects())
    loop = Loop()
    plain = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    decay = torch.optim.lr_scheduler.StepLR(plain, 1)
    with caplog.at_level(logging.WARNING), contextlib.suppress(RuntimeError):
        train(tmp_path / "named", loop)
    assert "StepLR" in caplog.text and "`decay`" in caplog.text
    with pytest.raises(UnsavedState, check=lambda unsaved: len(unsaved.found) == 2):
        train(tmp_path / "strict", loop, audit="error")
    ignored = ("plain", "decay")
    train(tmp_path / "ignored", loop, audit="error", audit_ignore=ignored)
    loop = Loop()
    loop.accelerator.register_for_checkpointing(decay)
    loop.accelerator.register_for_checkpointing(plain)
    train(tmp_path / "registered", loop, audit="error")


class Average:
    """A mean of the weights that the script keeps."""

    def __init__(self) -> None:
        self.average = torch.zeros(2, 4)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


@pytest.mark.promise("C10")
def test_tensors_that_the_script_changes_and_has_not_registered_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remember(each for _, each in _live_objects())
    loop, mean, registered = Loop(), Average(), Average()
    loop.accelerator.register_for_checkpointing(registered)
    table, teacher = {"weight": torch.zeros(3)}, torch.nn.Linear(2, 2)
    fixed = {"mask": teacher.weight}
    options = {"save_steps": 3, **QUIET, "audit_ignore": ("table",)}
    for directory, more in ((tmp_path / "one", {}), (tmp_path / "two", options)):
        caplog.clear()
        with unbroken_acc.attach(loop.accelerator, directory, **{**options, "audit_ignore": (), **more}) as run:
            for _ in run.epochs(2):
                for batch in run.batches(loop.loader):
                    loop.compute(batch)
                    for each in (mean.average, registered.average, table["weight"]):
                        each.add_(1)
        named = [record.getMessage() for record in caplog.records if "not saved by Accelerate" in record.getMessage()]
        found = {each.partition("starts it over: ")[2].partition(" ")[0] for each in named}
        assert found == ({"mean"} if more else {"mean", "table"})
    assert fixed


@pytest.mark.promise("C10")
def test_what_would_not_be_exact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing is prepared yet"):
        unbroken_acc.attach(Accelerator(cpu=True), tmp_path, **QUIET)
    train(tmp_path, Loop(), then=stop_at(4))
    with pytest.raises(NotExact, match="batch_sizes"):
        train(tmp_path, Loop(batch_size=5))
    end = read_history(Layout(tmp_path)).last("job-end")
    assert end is not None and end.text("status") == "halted" and end.whole("step") == 4
    changed = Loop()
    changed.accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))
    with pytest.raises(NotExact, match="registered_objects"):
        train(tmp_path, changed)
    late = Loop()
    with unbroken_acc.attach(late.accelerator, tmp_path, **QUIET) as run:
        late.accelerator.prepare(torch.nn.Linear(1, 1))
        with pytest.raises(RuntimeError, match="attach comes after"):
            next(iter(run.epochs(2)))
    loaded = Loop()
    with (
        pytest.raises(RuntimeError, match="would replace the state of the run"),
        unbroken_acc.attach(loaded.accelerator, tmp_path, **QUIET),
    ):
        loaded.accelerator.load_state(str(tmp_path / "checkpoint-3"))
    weights = tmp_path / "weights"
    loop = Loop()
    loop.accelerator.save_model(loop.model, weights)
    with pytest.raises(WeightsOnly):
        train(tmp_path / "other", loop, resume=weights)


@pytest.mark.promise("C10")
def test_a_data_set_that_draws_from_a_global_rng_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    rows = TensorDataset(torch.zeros(12, 2))
    noisy = DataLoader(rows, batch_size=2, collate_fn=lambda rows: [torch.rand(2, 2) for _ in rows[:1]])
    loop.loader = loop.accelerator.prepare(noisy)
    with caplog.at_level(logging.WARNING):
        train(tmp_path, loop, epochs=1)
    assert caplog.text.count("draws from a global RNG") == 1


@pytest.mark.promise("C10")
def test_workers_that_are_kept_over_epochs_end_with_the_job(tmp_path: Path) -> None:
    loop = Loop()
    rows = TensorDataset(torch.zeros(4, 2))
    kept = DataLoader(rows, batch_size=2, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    loop.loader = loop.accelerator.prepare(kept)
    train(tmp_path, loop, epochs=1)
    # The exit of the interpreter would kill them, and torch print that a worker was killed.
    assert not [each for each in multiprocessing.active_children() if "_worker_loop" in repr(each._target)]  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.promise("C10")
def test_with_a_stateful_loader_no_batch_is_skipped_twice(tmp_path: Path) -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    whole = Loop(dataloader_config=config)
    train(tmp_path / "whole", whole)
    expected = whole.state()
    train(tmp_path / "run", Loop(dataloader_config=config), then=stop_at(3))
    loop = Loop(dataloader_config=config)
    train(tmp_path / "run", loop)
    assert loop.state() == expected


class Count:
    """A registered object that a loop counts its epochs with."""

    def __init__(self) -> None:
        self.epochs = 0

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.promise("C10")
@pytest.mark.parametrize("step", [3, 5, 7])
def test_what_stands_before_the_batches_of_an_epoch_is_not_done_twice(tmp_path: Path, step: int) -> None:
    def job(name: str, stop: int = 0) -> list[object]:
        loop, count = Loop(), Count()
        loop.accelerator.register_for_checkpointing(count)
        with unbroken_acc.attach(loop.accelerator, tmp_path / name, save_steps=None, **QUIET) as run:
            for _ in run.epochs(2):
                loop.scheduler.step()
                count.epochs += 1
                for group in loop.optimizer.param_groups:
                    group["weight_decay"] *= 0.5
                for batch in run.batches(loop.loader):
                    loop.compute(batch)
                    if run.step + 1 == stop:
                        run.stop()
        decays = [group["weight_decay"] for group in loop.optimizer.param_groups]
        return [*loop.state(), count.epochs, decays]

    whole = job("whole")
    job("run", stop=step)
    assert job("run") == whole


@pytest.mark.promise("C10")
def test_a_pass_inside_a_pass_is_refused_and_one_that_is_held_ends_with_its_epoch(tmp_path: Path) -> None:
    def nest() -> None:
        loop = Loop()
        with unbroken_acc.attach(loop.accelerator, tmp_path / "nested", **QUIET) as run:
            for _ in run.epochs(1):
                for _ in run.batches(loop.loader):
                    next(iter(run.batches(loop.loader)))

    with pytest.raises(RuntimeError, match=r"inside another run\.batches"):
        nest()

    def job(name: str, stop: int = 0) -> list[object]:
        loop = Loop()
        with unbroken_acc.attach(loop.accelerator, tmp_path / name, save_steps=None, **QUIET) as run:
            for epoch in run.epochs(3):
                held = iter(run.batches(loop.loader))
                while run.batch < 3:
                    loop.compute(next(held))
                if epoch + 1 == stop:
                    run.save()
                    run.stop()
        return loop.state()

    whole = job("whole")
    job("run", stop=1)
    assert job("run") == whole


@pytest.mark.promise("C10")
def test_updates_that_no_step_would_count_are_refused(tmp_path: Path) -> None:
    def job() -> None:
        loop = Loop()
        with unbroken_acc.attach(loop.accelerator, tmp_path, **QUIET) as run:
            for _ in run.epochs(1):
                for batch in loop.loader:
                    loop.compute(batch)

    with pytest.raises(RuntimeError, match=r"outside of run\.batches"):
        job()


@pytest.mark.promise("C10")
def test_ranks_that_update_their_weights_apart_are_refused(tmp_path: Path) -> None:
    loop, other = Loop(), torch.nn.Linear(1, 1)
    waiting = loop.accelerator.prepare(other)
    # As DDP has it inside no_sync, where LocalSGD stays for several steps.
    waiting.require_backward_grad_sync = False
    with unbroken_acc.attach(loop.accelerator, tmp_path, **QUIET) as run:
        for _ in run.epochs(1):
            for batch in run.batches(loop.loader):
                loop.compute(batch)
    assert run.step == 5, "a model that this optimizer does not update may wait"

    loop.model.require_backward_grad_sync = False

    def job() -> None:
        with unbroken_acc.attach(loop.accelerator, tmp_path / "apart", **QUIET) as run:
            for _ in run.epochs(1):
                for batch in run.batches(loop.loader):
                    loop.compute(batch)

    with pytest.raises(ValueError, match="LocalSGD"):
        job()


@pytest.mark.promise("C10")
def test_a_second_loader_in_the_middle_and_other_workers_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def job(name: str, *, holds: bool, workers: int = 0, stop: int = 0) -> list[str]:
        caplog.clear()
        loop = Loop()
        rows = TensorDataset(torch.zeros(40, 2))
        second = loop.accelerator.prepare(DataLoader(rows, batch_size=2, num_workers=workers))
        held = iter(second)
        with (
            caplog.at_level(logging.WARNING),
            unbroken_acc.attach(loop.accelerator, tmp_path / name, save_steps=2, **QUIET) as run,
        ):
            for _ in run.epochs(1):
                for batch in run.batches(loop.loader):
                    next(held if holds else iter(second))
                    loop.compute(batch)
                    if run.step + 1 == stop:
                        run.stop()
        return [record.message for record in caplog.records if record.name.startswith("unbroken.")]

    assert len(job("held", holds=True)) == 1
    assert job("left", holds=False, stop=3) == []
    assert any("num_workers" in said and "[0, 1]" in said for said in job("left", holds=False, workers=1))


@pytest.mark.promise("C10")
@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA", "FSDP"])
def test_what_saves_by_itself_or_was_never_tested_is_refused_by_name(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop()
    held = Held.of(loop.accelerator)
    require_usable(loop.accelerator, held)
    monkeypatch.setattr(type(loop.accelerator), "distributed_type", DistributedType[kind])
    with pytest.raises(ValueError, match=f"attach does not work with {kind}"):
        require_usable(loop.accelerator, held)


@pytest.mark.promise("C10")
def test_save_steps_auto_saves_after_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def ten_seconds(_: Any) -> None:  # noqa: ANN401
        nonlocal now_s
        now_s += 10.0

    monkeypatch.setattr("unbroken.loop.opening._monotonic", lambda: now_s)
    train(tmp_path, Loop(), then=ten_seconds, save_steps="auto")
    # At the last edge before the minute is over, and at the end.
    assert steps_of(tmp_path) == [10, 6]
