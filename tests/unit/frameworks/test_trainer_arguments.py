"""Arguments of the Trainer: those that do not go with a run are refused, and those that weaken a resume are named."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

import unbroken
from tests.frameworks.trainings import Sequences, make_model
from unbroken.errors import NotExact, StateDiffers
from unbroken.frameworks import transformers as unbroken_hf
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout

QUIET: dict[str, Any] = {"console": False, "catch_signals": False}


def make_trainer(directory: Path, **arguments: Any) -> Trainer:  # noqa: ANN401
    usual = {"max_steps": 2, "save_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    options = TrainingArguments(output_dir=str(directory), **{**usual, **arguments})
    data = Sequences()
    return Trainer(make_model(), options, train_dataset=data, eval_dataset=data)


def train(trainer: Trainer, **options: Any) -> None:  # noqa: ANN401
    trainer.add_callback(unbroken_hf.Callback(**{**QUIET, **options}))
    trainer.train(resume_from_checkpoint=unbroken_hf.resume(trainer))


REFUSED: dict[str, Any] = {
    "save_only_model": True,
    "ignore_data_skip": True,
    "enable_jit_checkpoint": True,
    "use_seedable_sampler": False,
}


@pytest.mark.promise("C9")
@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_does_not_go_with_a_run_is_refused_before_anything_is_written(
    tmp_path: Path, name: str
) -> None:
    given = {name: REFUSED[name]}
    arguments = {"accelerator_config": given} if name == "use_seedable_sampler" else given
    trainer = make_trainer(tmp_path / "run", **arguments)
    with pytest.raises(ValueError, match=name):
        train(trainer)
    assert not (tmp_path / "run" / "journal").exists()


@pytest.mark.promise("C9")
def test_a_hyperparameter_search_is_refused_by_name(tmp_path: Path) -> None:
    state = TrainerState(is_hyper_param_search=True)
    arguments = TrainingArguments(str(tmp_path / "run"), use_cpu=True)
    with pytest.raises(ValueError, match="hyperparameter_search"):
        unbroken_hf.Callback(**QUIET).on_train_begin(arguments, state, TrainerControl())
    assert not (tmp_path / "run").exists()


@pytest.mark.promise("C9")
@pytest.mark.parametrize(("is_restored", "is_named"), [(False, True), (True, False)])
def test_a_callback_whose_state_the_trainer_does_not_restore_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_restored: bool, is_named: bool
) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": False}
    trainer = make_trainer(tmp_path, restore_callback_states_from_checkpoint=is_restored, max_steps=1, **best)
    trainer.eval_dataset = None
    trainer.add_callback(EarlyStoppingCallback(5))
    callback = unbroken_hf.Callback(**QUIET)
    trainer.add_callback(callback)
    unbroken_hf.resume(trainer)
    state = TrainerState(max_steps=1, stateful_callbacks=list(trainer.callback_handler.callbacks[-2:-1]))
    with caplog.at_level(logging.WARNING):
        callback.on_train_begin(trainer.args, state, TrainerControl())
    assert ("EarlyStoppingCallback starts over after a resume" in caplog.text) is is_named
    callback.on_train_end(trainer.args, state, TrainerControl())


@pytest.mark.promise("C9", "G24")
@pytest.mark.parametrize("reported", [["tensorboard"], []])
def test_a_tracker_that_report_to_shows_too_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reported: list[str]
) -> None:
    pytest.importorskip("tensorboard")
    train(make_trainer(tmp_path, report_to=reported), trackers="tensorboard")
    assert ("report_to" in caplog.text) is bool(reported)


@pytest.mark.promise("C9")
def test_with_push_to_hub_the_folder_that_is_uploaded_has_its_final_name_and_is_sealed(tmp_path: Path) -> None:
    trainer: Any = make_trainer(tmp_path)
    trainer.args.push_to_hub = True
    uploaded: list[str] = []
    # No network: what the Trainer would upload.
    trainer._push_from_checkpoint = uploaded.append
    trainer._finish_current_push = lambda: None
    train(trainer)
    assert uploaded == [str(tmp_path / "checkpoint-1"), str(tmp_path / "checkpoint-2")]
    assert [(each.step, each.is_usable) for each in unbroken.checkpoints(tmp_path)] == [(2, True), (1, True)]


@pytest.mark.promise("C9")
def test_another_precision_is_refused_by_name_and_the_job_ends_at_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    train(make_trainer(tmp_path, bf16=True))
    with pytest.raises(NotExact, match="precision") as refused:
        train(make_trainer(tmp_path, max_steps=3))
    assert refused.value.differences == (("precision", "bf16 before, no now"),)
    end = read_history(Layout(tmp_path)).last("job-end")
    assert end is not None and end.text("status") == "halted" and end.whole("step") == 2
    train(make_trainer(tmp_path, max_steps=3), accept=("precision",))


@pytest.mark.promise("C9")
def test_another_optimizer_is_refused_by_name_and_another_build_of_it_is_not(tmp_path: Path) -> None:
    train(make_trainer(tmp_path, optim="adamw_torch"))
    with pytest.raises(StateDiffers, match="do not match") as refused:
        train(make_trainer(tmp_path, max_steps=3, optim="adafactor"))
    assert refused.value.changed == ("optimizer: AdamW saved, Adafactor now (optim=adafactor)",)
    with pytest.raises(StateDiffers, match="do not match"):
        train(make_trainer(tmp_path, max_steps=3, optim="lion_32bit"))
    given = make_trainer(tmp_path, max_steps=3)
    assert given.model is not None
    given.optimizer = torch.optim.SGD(given.model.parameters(), lr=0.1)
    with pytest.raises(StateDiffers, match="do not match"):
        train(given)
    train(make_trainer(tmp_path, max_steps=3, optim="adamw_torch_fused"))


@pytest.mark.promise("C9")
def test_a_changed_schedule_is_named_with_what_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cosine = {"lr_scheduler_type": "cosine_with_restarts", "warmup_steps": 1}
    train(make_trainer(tmp_path, lr_scheduler_kwargs={"num_cycles": 2}, learning_rate=1e-2, **cosine))
    train(make_trainer(tmp_path, lr_scheduler_kwargs={"num_cycles": 2}, learning_rate=1e-2, max_steps=3, **cosine))
    assert "lr_scheduler_kwargs was" not in caplog.text and "warmup_steps was" not in caplog.text
    other: dict[str, Any] = {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 3}}
    train(make_trainer(tmp_path, warmup_steps=2, optim_args="a=1", max_steps=4, **other))
    said = [record.getMessage() for record in caplog.records if " when the checkpoint was saved" in record.getMessage()]
    names = {each.partition(" ")[0] for each in said}
    assert names >= {"lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim_args", "learning_rate"}
    used = {each.partition(" ")[0]: each.rpartition(": ")[2] for each in said}
    assert used["learning_rate"] == "the checkpoint restores the old value, so 0.01 is used"
    assert used["warmup_steps"] == "2 is used from here on"


class Average(TrainerCallback):
    """A mean of the weights; beside it what is no state."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.teacher, self.last = torch.nn.Linear(2, 2), torch.zeros(())
        self.model: Any = None

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        self.model = kwargs["model"]
        self.last += 1
        for name, value in self.model.named_parameters():
            self.average.setdefault(name, value.detach().clone()).lerp_(value.detach(), 0.1)


class SavedAverage(Average, ExportableState):
    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {}}


@pytest.mark.promise("C9")
@pytest.mark.parametrize("kind", [Average, SavedAverage])
def test_an_average_that_a_callback_keeps_and_no_checkpoint_has_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[Average]
) -> None:
    trainer = make_trainer(tmp_path, max_steps=4, save_steps=2)
    trainer.add_callback(kind())
    train(trainer)
    found = [record.getMessage() for record in caplog.records if "not saved by the Trainer" in record.getMessage()]
    assert ["Average.average" in each for each in found] == ([True] if kind is Average else [])
