"""The live snapshot as it is written: the names that tools know, no NaN, at most once a second, no waiting."""

import json
import math
from pathlib import Path

import pytest

from unbroken.files import Files
from unbroken.records.layout import Layout
from unbroken.records.snapshot import RunState, RunStateWriter, encode, read_run_state
from unbroken.testing import FaultyDisk, MemoryDisk, crash_states

FULL = RunState(
    status="running",
    pid=7,
    step=5,
    max_steps=9,
    tokens=99,
    loss=2.5,
    error="e",
    updated_at_s=None,
    started_at_s=1_700_000_000.0,
    learning_rate=3e-4,
    tokens_per_s=1e5,
    latest_checkpoint="checkpoint-4",
    config_path="run.yaml",
    job=3,
    exit_code=0,
)
SEED_NAMES = (
    *("status", "pid", "started_at", "updated_at", "global_step", "max_steps", "loss", "learning_rate"),
    *("tokens_trained", "tokens_per_sec", "error", "latest_checkpoint", "config_path"),
)


def test_the_names_that_tools_around_training_read_are_there() -> None:
    written = json.loads(encode(FULL, 1_700_000_001.5))
    assert set(SEED_NAMES) <= set(written)
    assert written["started_at"] == "2023-11-14T22:13:20.000+00:00"
    assert written["updated_at"] == "2023-11-14T22:13:21.500+00:00"


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    writer = RunStateWriter(Layout(tmp_path), scratch=".scratch-a", clock=lambda: 1_700_000_001.5)
    assert writer.write(FULL)
    found = read_run_state(Layout(tmp_path))
    assert found is not None and found.updated_at_s == 1_700_000_001.5
    assert {**vars(found), "updated_at_s": None} == vars(FULL)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_nan_is_null_and_its_name(tmp_path: Path, loss: float) -> None:
    text = encode(RunState(loss=loss, learning_rate=loss, tokens_per_s=loss), 0.0).decode()
    written = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert written["loss"] is None and written["learning_rate"] is None and written["tokens_per_sec"] is None
    assert written["loss_text"] == repr(loss)
    (tmp_path / ".run_state.json").write_text(text)
    found = read_run_state(Layout(tmp_path))
    assert found is not None and found.loss is not None and repr(found.loss) == repr(loss)


def test_it_is_written_at_most_once_a_second_and_the_end_at_once(tmp_path: Path) -> None:
    now = [10.0]
    writer = RunStateWriter(Layout(tmp_path), scratch=".scratch-a", clock=lambda: now[0])
    assert writer.write(RunState("running", step=1))
    now[0] = 10.9
    assert not writer.write(RunState("running", step=2))
    now[0] = 11.0
    assert writer.write(RunState("running", step=3))
    assert writer.write(RunState("stopped", step=4), durable=True)
    now[0] = 5.0
    assert writer.write(RunState("running", step=5)), "a clock set back must not silence it"
    assert [path.name for path in tmp_path.iterdir()] == [".run_state.json"]


def test_a_step_never_waits_for_the_disk_and_the_end_does() -> None:
    disk = FaultyDisk(MemoryDisk(["/run"]))
    writer = RunStateWriter(Layout(Path("/run")), scratch=".s", clock=lambda: 0.0, files=Files(disk))
    writer.write(RunState("running"))
    assert not {"sync_file", "sync_directory"} & set(disk.names)
    writer.write(RunState("stopped"), durable=True)
    assert {"sync_file", "sync_directory"} <= set(disk.names)


def test_whatever_a_power_cut_leaves_of_it_is_read_or_is_nothing() -> None:
    disk, layout = MemoryDisk(["/run"]), Layout(Path("/run"))
    now = [0.0]
    writer = RunStateWriter(layout, scratch=".s", clock=lambda: now[0], files=Files(disk))
    writer.write(RunState("running", step=1), durable=True)
    now[0] = 2.0
    writer.write(RunState("running", step=2))
    found = {
        state.step if state else None for state in (read_run_state(layout, Files(d)) for _, d in crash_states(disk))
    }
    assert 1 in found and found <= {None, 1, 2}
