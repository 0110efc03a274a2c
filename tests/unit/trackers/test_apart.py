"""Trackers whose library is in a process of its own."""

import os
import signal
from pathlib import Path

import pytest

from unbroken.records.metrics import Row
from unbroken.trackers.apart import TrackerApart, TrackerError
from unbroken.trackers.named import TrackerName, load_tracker, parse_tracker
from unbroken.trackers.tracker import TrackedRun


@pytest.mark.promise("G24")
@pytest.mark.parametrize("name", ["wandb:p", "trackio", "mlflow:e"])
def test_a_library_that_draws_random_numbers_gets_a_process_of_its_own(name: str) -> None:
    tracker = load_tracker(parse_tracker(name))
    assert isinstance(tracker, TrackerApart) and tracker.name == name


def row(step: int) -> Row:
    return Row(step, 1, {"loss": 1.0 / step}, {})


def test_a_tracker_process_that_ends_is_replaced_and_its_errors_are_reported(tmp_path: Path) -> None:
    tracker = TrackerApart(TrackerName("tensorboard", str(tmp_path / "shown")))
    with pytest.raises(TrackerError, match="its process has ended"):
        tracker.log([row(1)])
    (tmp_path / "shown").write_text("a file where the directory should be")
    with pytest.raises(TrackerError, match="Error: "):
        tracker.start(TrackedRun("id", "a", tmp_path))
    (tmp_path / "shown").unlink()
    tracker.start(TrackedRun("id", "a", tmp_path, {"odd": Path("x")}))
    tracker.log([row(1), row(2)])
    assert tracker._process is not None
    os.kill(tracker._process.pid, signal.SIGKILL)
    tracker._process.wait()
    tracker.log([row(3)])
    assert tracker.last_step() == 2, "as far as it had come when it was started again"
    tracker.finish("completed")
    assert tracker._process is None
