"""The emergency path of a loop: when it is taken, what it leaves, and what later jobs make of that."""

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import unbroken
from unbroken.errors import Halted, NoEmergencyArea, NonFiniteLoss
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.store.directory import Store
from unbroken.store.dumps import read_pointers
from unbroken.store.scan import scan


class Lost(Exception):
    """What ends a job without a word."""


def job(
    root: Path,
    total: int,
    *,
    dump_at: int = 0,
    lost_at: int = 0,
    signal_at: int = 0,
    stop_at: int = 0,
    halt_at: int = 0,
    loss: float = 0.0,
    **settings: Any,  # noqa: ANN401 - whatever the settings have
) -> int:
    """One job; returns the step it went on from. Its weight counts the steps."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    chosen = {"save_steps": None, "audit": "off", "emergency_dir": str(root / "scratch"), **settings}
    began = -1
    try:
        with unbroken.Run(root / "run", settings=unbroken.Settings(**chosen), model=model) as run:
            began = run.step
            for step in run.steps(total):
                assert model.weight.item() == step
                if step + 1 == lost_at:
                    raise Lost
                with torch.no_grad():
                    model.weight += 1
                if step + 1 == dump_at:
                    run.save_emergency()
                if step + 1 == signal_at:
                    os.kill(os.getpid(), signal.SIGTERM)
                if step + 1 == stop_at:
                    run.stop()
                if step + 1 == halt_at:
                    run.halt("the data ran dry")
                run.log(loss=loss)
    except Lost:
        pass
    return began


def facts(root: Path, kind: str) -> list[dict[str, Any]]:
    return [dict(fact.values) for fact in read_history(Layout(root / "run")).of_kind(kind)]


def committed(root: Path) -> set[str]:
    return set(scan(Store(root / "run/checkpoints")).committed)


@pytest.mark.promise("M11")
def test_a_dump_that_was_requested_is_what_the_next_job_resumes_from(tmp_path: Path) -> None:
    assert job(tmp_path, 9, dump_at=5, lost_at=7) == 0
    (pointer,) = read_pointers(tmp_path / "run")
    assert Path(pointer.path).name.startswith("emergency_step_5_")
    assert Path(pointer.path, "manifest.json").exists()
    assert Path(pointer.path).with_name("latest").resolve() == Path(pointer.path).resolve()
    assert job(tmp_path, 9) == 5
    assert committed(tmp_path) == {"checkpoint-5-shutdown", "final"}


def test_without_a_directory_it_is_refused_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(NoEmergencyArea):
        job(tmp_path, 9, dump_at=5, emergency_dir=None)


def test_a_directory_that_takes_no_dump_is_reported_at_the_start_and_the_window_used_for_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "scratch").write_text("no directory")
    assert job(tmp_path, 9, dump_at=3, signal_at=5, grace_seconds=5) == 0
    first = next(record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert str(tmp_path / "scratch") in first
    assert committed(tmp_path) == {"checkpoint-5-shutdown"}, "asked for by the script it is tried, told, and no end"
    (tmp_path / "scratch").unlink()
    assert job(tmp_path, 9, signal_at=7, grace_seconds=0.5) == 5
    assert [node.name for node in (tmp_path / "scratch").iterdir() if node.name.startswith(".")] == []


@pytest.mark.promise("M11")
def test_a_window_of_nothing_lets_the_run_go_and_a_window_for_a_save_saves(tmp_path: Path) -> None:
    assert job(tmp_path / "none", 9, signal_at=4, grace_seconds=0.0) == 0
    assert committed(tmp_path / "none") == set()
    assert [fact["step"] for fact in facts(tmp_path / "none", "grace-too-short")] == [4]
    (ended,) = facts(tmp_path / "none", "job-end")
    assert (ended["status"], ended["class"]) == ("stopped", "again")
    # What a save takes was measured by the job before.
    job(tmp_path / "long", 2)
    job(tmp_path / "long", 9, signal_at=4, grace_seconds=120.0)
    assert committed(tmp_path / "long") == {"final", "checkpoint-4-shutdown"}
    assert facts(tmp_path / "long", "emergency-save") == []


def test_a_stop_with_hours_to_go_saves_as_always_though_no_save_was_measured(tmp_path: Path) -> None:
    job(tmp_path, 9, stop_at=4, max_runtime_seconds=36_000.0)
    assert committed(tmp_path) == {"checkpoint-4-shutdown"}
    assert facts(tmp_path, "emergency-save") == []


def test_a_halt_in_a_window_too_small_for_a_save_is_dumped_and_stays_a_halt(tmp_path: Path) -> None:
    with pytest.raises(Halted):
        job(tmp_path, 9, signal_at=4, halt_at=4, grace_seconds=30.0)
    (ended,) = facts(tmp_path, "job-end")
    assert (ended["status"], ended["class"]) == ("halted", "look")
    assert [fact["step"] for fact in facts(tmp_path, "emergency-save")] == [4]


@pytest.mark.promise("C4")
@pytest.mark.parametrize("obstacle", ["a file", "no permission"])
def test_a_copy_that_was_refused_is_never_called_one_and_the_dump_counts_all_the_same(
    tmp_path: Path, obstacle: str, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shared"
    if obstacle == "a file":
        shared.write_text("in the way")
    elif os.geteuid() == 0:
        # Nothing is forbidden to root but a file system that is read-only.
        shared = Path("/proc/unbroken")
    else:
        shared.mkdir(mode=0o500)
    job(tmp_path, 9, dump_at=5, lost_at=7, persistent_dir=str(shared))
    (pointer,) = read_pointers(tmp_path / "run")
    assert pointer.copy is None
    assert facts(tmp_path, "emergency-copy") == []
    (failed,) = facts(tmp_path, "emergency-failed")
    assert (failed["what"], failed["error"]) == ("copy", "storage-failed")
    assert job(tmp_path, 9) == 5


@pytest.mark.promise("M12")
def test_the_dump_of_a_job_that_a_later_one_has_left_behind_is_not_used(tmp_path: Path) -> None:
    job(tmp_path, 2)
    assert job(tmp_path, 9, dump_at=7, lost_at=9) == 2
    hidden = (tmp_path / "scratch").rename(tmp_path / "hidden")
    # Another job cannot see it, resumes from 2 and commits: that is the run's history from then on.
    assert job(tmp_path, 4, emergency_dir=None) == 2
    hidden.rename(tmp_path / "scratch")
    assert job(tmp_path, 9) == 4


def test_a_run_that_goes_back_leaves_its_dumps_behind(tmp_path: Path) -> None:
    job(tmp_path, 2)
    job(tmp_path, 9, dump_at=7, lost_at=9)
    assert job(tmp_path, 9, lost_at=4, resume="2") == 2
    assert job(tmp_path, 9) == 2
    # And the commit at its end has swept them.
    assert list((tmp_path / "scratch").rglob("manifest.json")) == []


@pytest.mark.promise("M12")
def test_a_dump_that_cannot_be_used_is_reported_and_the_next_older_checkpoint_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path, 2)
    job(tmp_path, 9, dump_at=7, lost_at=9)
    monkeypatch.setattr("unbroken.loop.emergency.host_name", lambda: "elsewhere/1")
    with caplog.at_level(logging.WARNING):
        assert job(tmp_path, 9) == 2
    assert "emergency_step_7" in caplog.text
    assert [fact["name"] for fact in facts(tmp_path, "checkpoint-skipped")] == ["emergency_step_7"]


def test_a_window_too_small_for_a_save_and_a_deadline_within_the_reserve_are_reported_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings(total: int, **settings: Any) -> list[str]:  # noqa: ANN401
        caplog.clear()
        job(tmp_path, total, **settings)
        return [record.message for record in caplog.records if record.name == "unbroken.loop.emergency"]

    assert "window" in "".join(warnings(1, grace_seconds=0.0))
    assert len(warnings(2, max_runtime_seconds=100.0, walltime_reserve_seconds=200.0)) == 1
    assert warnings(3, grace_seconds=120.0, max_runtime_seconds=1_000.0) == []


def test_a_state_with_a_loss_that_is_nan_is_not_dumped(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss):
        job(tmp_path, 3, dump_at=2, loss=float("nan"))
    assert not list((tmp_path / "scratch").iterdir())
