"""What a job writes down about itself, and where it stops writing."""

import time
from pathlib import Path

from unbroken.recorder import MOST_MISMATCHES, Recorder
from unbroken.run.journal import read_history
from unbroken.run.layout import Layout
from unbroken.run.lease import acquire
from unbroken.run.metrics import MetricsWriter
from unbroken.run.outcome import conclude
from unbroken.run.process import this_holder
from unbroken.run.stop import StopReason


def test_so_many_steps_that_differ_are_written_one_by_one_and_all_are_counted(tmp_path: Path) -> None:
    layout, steps = Layout(tmp_path), range(1, MOST_MISMATCHES + 51)
    before = MetricsWriter(layout, 0, start=0)
    for step in steps:
        before.write(step, {"loss": 1.0})
    before.close()
    lease = acquire(tmp_path, this_holder(), token="a", now_s=time.time())
    recorder = Recorder(layout, lease, clock=time.time)
    recorder.begin_metrics(0, is_comparable=True)
    for step in steps:
        recorder.metrics(step, {"loss": 1.0 if step == 1 else 2.0})
    recorder.end(conclude(StopReason("done")))
    history = read_history(layout)
    assert [fact.values["step"] for fact in history.of_kind("mismatch")] == list(range(2, MOST_MISMATCHES + 2))
    [told] = history.of_kind("recomputed")
    assert (told.values["compared"], told.values["agreeing"]) == (len(steps), 1)
