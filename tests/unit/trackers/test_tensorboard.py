"""TensorBoard's event files."""

from pathlib import Path

import pytest

pytest.importorskip("tensorboard")

from unbroken.records.metrics import Row
from unbroken.trackers.tensorboard import TensorBoardTracker
from unbroken.trackers.tracker import TrackedRun


@pytest.mark.promise("G24")
def test_a_step_that_a_kill_cuts_is_sent_again_with_all_its_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    run = TrackedRun("id", "a", tmp_path)
    names = [f"metric {number}" for number in range(40)]
    rows = [Row(step, 1, dict.fromkeys(names, float(step)), {}) for step in (1, 2, 3)]
    tracker = TensorBoardTracker("")
    tracker.start(run)
    tracker.log(rows[:2])
    tracker.finish("failed")
    (file,) = tmp_path.glob("tensorboard/a-id/*")
    # The kernel has got a part of what the process wrote.
    file.write_bytes(file.read_bytes()[:-100])
    again = TensorBoardTracker("")
    again.start(run)
    last = again.last_step()
    assert last == 1
    again.log([row for row in rows if row.step > last])
    again.finish("completed")
    shown = EventAccumulator(str(file.parent), size_guidance={"scalars": 0})
    shown.Reload()
    assert {name: [point.step for point in shown.Scalars(name)] for name in names} == {
        name: [1, 2, 3] for name in names
    }
