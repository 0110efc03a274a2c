"""One run in every tracker over all jobs, however they end: read back from the trackers' own files."""

import math
import signal
from pathlib import Path

import pytest

pytest.importorskip("wandb")
pytest.importorskip("tensorboard")
pytest.importorskip("trackio")
pytest.importorskip("mlflow")

import unbroken
from tests.trackers import jobs
from tests.trackers.readers import Points, mlflow_points, tensorboard_points, trackio_points, wandb_points
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import read_metrics
from unbroken.records.tracker_marks import known_ids
from unbroken.testing.worlds import Ended, logs, preload, spawn

preload("tests.trackers.jobs")
ALL = "wandb:p, tensorboard, trackio:p, mlflow:p"
EVERY = list(range(1, jobs.TOTAL + 1))
KILLED = -int(signal.SIGKILL)


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)


def job(function: object, *values: object, **named: object) -> Ended:
    # Called by a module that imports no tracker: the child reads the variables of this test before it imports them.
    (ended,) = spawn(1, jobs.call, function, values, named, is_plain=True)
    return ended


def steps(points: Points) -> list[int]:
    return [step for step, _ in points]


def ids(run: Path) -> dict[str, str]:
    return known_ids(read_history(Layout(run)).events)


@pytest.mark.promise("G24")
def test_after_a_kill_every_tracker_shows_each_step_once_in_one_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    killed = job(jobs.train, str(run), ALL, kill_at=7, sent=6)
    assert killed.exit_code == KILLED, killed.log
    before = ids(run)
    resumed = job(jobs.train, str(run), ALL)
    assert resumed.is_good, logs([resumed])
    assert ids(run) == before
    shown = {
        "wandb": (wandb_points(run), before["wandb:p"]),
        "tensorboard": (tensorboard_points(run), f"run-{before['tensorboard']}"),
        "trackio": (trackio_points(tmp_path / "trackio/p.db"), f"run-{before['trackio:p']}"),
    }
    truth = dict(read_metrics(Layout(run)).series("loss"))
    for tracker, (found, name) in shown.items():
        assert list(found) == [name], tracker
        assert steps(found[name]) == EVERY, tracker
        assert all(math.isclose(loss, truth[step], rel_tol=1e-6) for step, loss in found[name]), tracker
    (in_mlflow,) = mlflow_points(tmp_path / "mlruns").values()
    assert steps(in_mlflow) == EVERY
    # And no tracker drew from a generator of the training.
    alone = job(jobs.train, str(tmp_path / "alone"), "")
    assert alone.value == resumed.value


@pytest.mark.promise("G24")
def test_without_unbroken_steps_are_doubled_or_lost(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    assert job(jobs.train_plainly, str(folder), kill_at=7).exit_code == KILLED
    resumed = job(jobs.train_plainly, str(folder))
    assert resumed.is_good, logs([resumed])
    doubled = [*range(1, 8), *range(5, 13)]
    assert steps(tensorboard_points(folder)["plain"]) == doubled
    assert steps(trackio_points(tmp_path / "trackio/plain.db")["plain"]) == doubled
    (in_mlflow,) = mlflow_points(tmp_path / "mlruns").values()
    assert steps(in_mlflow) == doubled
    # wandb had returned from `log` for seven steps, and the file has fewer; what it has of the last ones is doubled.
    in_wandb = steps(wandb_points(folder)["plain"])
    assert in_wandb != EVERY and in_wandb[-8:] == list(range(5, 13))


@pytest.mark.promise("G24")
def test_committed_never_shows_a_step_that_is_computed_again(tmp_path: Path) -> None:
    run, trackers = tmp_path / "run", "tensorboard, wandb:p"

    def shown() -> list[int]:
        (found,) = tensorboard_points(run).values()
        return steps(found)

    for kill_at, committed in ((7, 4), (11, 8)):
        killed = job(jobs.train, str(run), trackers, mode="committed", kill_at=kill_at, sent=committed)
        assert killed.exit_code == KILLED, killed.log
        assert shown() == list(range(1, committed + 1))
        assert unbroken.checkpoints(run)[0].step == committed
    resumed = job(jobs.train, str(run), trackers, mode="committed")
    assert resumed.is_good, logs([resumed])
    assert shown() == EVERY
    assert [steps(found) for found in wandb_points(run).values()] == [EVERY]
