"""MLflow: what it would refuse is shown under another name."""

import math
from pathlib import Path

import pytest

pytest.importorskip("mlflow")

from unbroken.records.metrics import Row
from unbroken.trackers.mlflow import MlflowTracker
from unbroken.trackers.tracker import TrackedRun

ODD = (
    "loss",
    "train/loss",
    "a//b",
    "/a",
    "b/",
    "..",
    "a/../b",
    "100%",
    "a?",
    "a!",
    "L" * 300,
    "L" * 301,
    "\u00fc \u2713",
)


@pytest.mark.promise("G24")
def test_no_name_keeps_the_steps_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracker = MlflowTracker("odd")
    tracker.start(TrackedRun("id", "a", tmp_path, {**dict.fromkeys(ODD, 1), "nested": {"a//b?": math.inf}}))
    tracker.log([Row(step, 1, {name: float(at) for at, name in enumerate(ODD)}, {}) for step in (1, 2)])
    assert tracker.last_step() == 2
    tracker.finish("completed")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("odd")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert sorted(run.data.metrics.values()) == [float(at) for at in range(len(ODD))]
    assert run.data.metrics["loss"] == 0.0 and run.data.metrics["train/loss"] == 1.0
    for name in run.data.metrics:
        assert [each.step for each in client.get_metric_history(run.info.run_id, name)] == [1, 2]
    assert len(run.data.params) == len(ODD) + 1
