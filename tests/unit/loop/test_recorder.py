"""What a job writes down about itself, and where it stops writing."""

import itertools
import time
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.launch import job_files
from unbroken.loop.recorder import MOST_MISMATCHES, Recorder, SilentRecorder
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.lease import acquire
from unbroken.records.metrics import MetricsWriter
from unbroken.records.outcome import conclude
from unbroken.records.process import this_holder
from unbroken.records.stop import StopReason


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
    [results] = history.of_kind("recomputed")
    assert (results.values["compared"], results.values["agreeing"]) == (len(steps), 1)


def test_a_rank_waits_for_the_word_of_the_first_one_but_not_of_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(job_files.ENVIRONMENT, str(tmp_path / "outcome.json"))
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    gone = replace(this_holder(), process_started="1")
    SilentRecorder(gone).end(conclude(RuntimeError("a peer is lost")))
    assert not waits
    SilentRecorder(this_holder()).end(conclude(RuntimeError("a peer is lost")))
    assert waits
