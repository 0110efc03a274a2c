"""The trainer and the Trainer of Transformers under trackers: one run, each step once."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb")
pytest.importorskip("tensorboard")
pytest.importorskip("transformers")

from tests.exact.gpt_world import tiny, tokenize_text, write_text
from tests.frameworks.forking import Jobs, forking
from tests.trackers.readers import tensorboard_points, wandb_points
from unbroken.gpt.train import train
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.tracker_marks import known_ids

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tracked_loop.py"
KILLED = -int(signal.SIGKILL)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with forking(tmp_path_factory.mktemp("jobs")) as started:
        yield started


@pytest.mark.promise("G24")
def test_the_project_in_a_config_is_one_run_over_two_jobs(tmp_path: Path) -> None:
    data = tokenize_text(write_text(tmp_path / "text"), tmp_path / "data")
    config = tiny(data, tmp_path / "run", max_steps=6, save_steps=2)
    training = replace(config.training, wandb_project="p", wandb_run_name="mine", trackers="tensorboard")
    train(replace(config, training=replace(training, max_steps=4)))
    train(replace(config, training=training), accept=("training.max_steps",))
    (in_wandb,) = wandb_points(tmp_path / "run").values()
    ((name, on_board),) = tensorboard_points(tmp_path / "run").items()
    assert name.startswith("mine-")
    assert [step for step, _ in in_wandb] == [step for step, _ in on_board] == [1, 2, 3, 4, 5, 6]


@pytest.mark.promise("G24")
def test_the_trainer_of_transformers_killed_is_one_run_in_the_tracker(jobs: Jobs, tmp_path: Path) -> None:
    run, options = tmp_path / "run", {"trackers": "tensorboard", "tracker_mode": "committed"}
    kill = [{"step": 7, "number": int(signal.SIGKILL), "inside": True}]
    arguments: dict[str, Any] = {"max_steps": 12}
    plain = {"plain": True, "arguments": {**arguments, "report_to": ["tensorboard"]}}
    environ = {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "tensorboard" / "plain")}
    assert jobs.run(tmp_path / "plain", environ, interrupts=kill, **plain).code == KILLED
    assert jobs.run(tmp_path / "plain", environ, resume=True, **plain).code == 0
    # By the Trainer's own tracker the steps since the last save are there twice.
    (doubled,) = tensorboard_points(tmp_path, "train/loss").values()
    assert [step for step, _ in doubled] == [1, 2, 3, 4, 5, 6, *range(5, 13)]

    assert jobs.run(run, arguments=arguments, options=options, interrupts=kill).code == KILLED
    (before,) = tensorboard_points(run).values()
    assert [step for step, _ in before] in ([], [1, 2, 3, 4])
    resumed = jobs.run(run, arguments=arguments, options=options)
    assert resumed.code == 0, resumed.said
    (shown,) = tensorboard_points(run).values()
    assert [step for step, _ in shown] == [*range(1, 13)]
    assert len(read_history(Layout(run)).of_kind("tracker")) == 2
    assert list(known_ids(read_history(Layout(run)).events)) == ["tensorboard"]


@pytest.mark.promise("G24")
def test_a_loop_of_accelerate_killed_is_one_run_in_the_tracker(tmp_path: Path) -> None:
    kill = [{"step": 14, "number": int(signal.SIGKILL)}]
    with forking(tmp_path, "tests.frameworks.accelerate_trainings") as jobs:
        project = {"automatic_checkpoint_naming": True, "logging_dir": str(tmp_path / "tensorboard")}
        plain: dict[str, Any] = {"plain": True, "project": project, "log_with": "tensorboard"}
        assert jobs.run(tmp_path / "plain", interrupts=kill, **plain).code == KILLED
        assert jobs.run(tmp_path / "plain", resume=3, **plain).code == 0
        # By Accelerate's own tracker the steps since the last save are there twice.
        doubled = tensorboard_points(tmp_path)["plain"]
        assert [step for step, _ in doubled] == [*range(1, 15), *range(13, 34)]

        options = {"trackers": "tensorboard", "tracker_mode": "committed"}
        assert jobs.run(tmp_path / "run", interrupts=kill, options=options).code == KILLED
        assert jobs.run(tmp_path / "run", options=options).code == 0
    (shown,) = tensorboard_points(tmp_path / "run").values()
    assert [step for step, _ in shown] == [*range(1, 34)]


@pytest.mark.promise("G24")
def test_the_example_started_twice_is_one_run(tmp_path: Path) -> None:
    for steps in ("30", "50"):
        command = [sys.executable, str(EXAMPLE), steps, str(tmp_path / "run")]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    (shown,) = tensorboard_points(tmp_path / "run").values()
    assert [step for step, _ in shown] == [*range(1, 51)]
