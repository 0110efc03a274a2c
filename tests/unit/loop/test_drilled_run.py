"""A run under a drill: it goes elsewhere, and nothing of the directory that was asked for is touched."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.state.tiny import disk, job, quietly, tiny
from unbroken import Run
from unbroken.disk import LocalDisk
from unbroken.errors import DrillUnreadable, StorageFailed
from unbroken.files import LOCAL
from unbroken.records.drill import ENVIRONMENT, Drill, Fault, write_drill
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import read_metrics


@pytest.fixture(autouse=True)
def own_disk() -> Iterator[None]:
    with disk(LocalDisk()):
        yield


def drilled(folder: Path, drill: Drill, monkeypatch: pytest.MonkeyPatch) -> None:
    write_drill(folder / "drill.json", drill)
    monkeypatch.setenv(ENVIRONMENT, str(folder / "drill.json"))


def names(run: Path) -> set[str]:
    return {each.name for each in (run / "checkpoints").iterdir() if not each.name.startswith(".")} - {"latest"}


def test_a_drilled_run_writes_elsewhere_and_leaves_the_real_one_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path / "real", 4, **tiny())
    before = {path: os.stat(path).st_mtime_ns for path in (tmp_path / "real").rglob("*")}
    drilled(tmp_path, Drill(directory=tmp_path / "elsewhere"), monkeypatch)
    run = job(tmp_path / "real", 6, **tiny())
    assert run.directory == tmp_path / "elsewhere"
    assert names(tmp_path / "elsewhere") == {"checkpoint-2", "checkpoint-4", "final"}
    assert {path: os.stat(path).st_mtime_ns for path in (tmp_path / "real").rglob("*")} == before


def test_a_directory_that_is_requested_under_a_drill_is_not_even_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drilled(tmp_path, Drill(directory=tmp_path / "elsewhere"), monkeypatch)
    job(tmp_path / "real", 3, **tiny())
    assert not (tmp_path / "real").exists()


def test_the_journal_says_that_it_was_a_drill_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path / "real", 3, **tiny())
    drilled(tmp_path, Drill(directory=tmp_path / "elsewhere", save_steps=1), monkeypatch)
    job(tmp_path / "real", 3, **tiny())
    first = read_history(Layout(tmp_path / "elsewhere")).events[0]
    assert first.kind == "drill"
    assert first.values["directory"] == str(tmp_path / "elsewhere")
    assert not read_history(Layout(tmp_path / "real")).of_kind("drill")


def test_a_drill_saves_as_often_as_it_says_and_stops_where_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drilled(tmp_path, Drill(save_steps=3, stop_at=7), monkeypatch)
    run = job(tmp_path / "run", 20, quietly(save_steps=None), **tiny())
    assert run.is_stopped
    assert names(tmp_path / "run") == {"checkpoint-3", "checkpoint-6", "checkpoint-7-shutdown"}
    end = read_history(Layout(tmp_path / "run")).last("job-end")
    assert end is not None
    assert (end.text("status"), end.whole("step")) == ("stopped", 7)


def test_a_drill_that_ends_where_the_script_continues_calls_its_last_save_as_the_script_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drilled(tmp_path, Drill(save_steps=3, stop_at=6, stops_as="periodic"), monkeypatch)
    assert job(tmp_path / "run", 20, quietly(save_steps=None), **tiny()).is_stopped
    assert names(tmp_path / "run") == {"checkpoint-3", "checkpoint-6"}
    # Stopped by somebody else at another step, it is a shutdown all the same.
    job(tmp_path / "other", 20, quietly(save_steps=None), lambda run, step: run.stop() if step == 4 else None, **tiny())
    assert names(tmp_path / "other") == {"checkpoint-3", "checkpoint-5-shutdown"}


def test_a_drill_writes_the_metrics_of_every_step_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def look(run: Run, step: int) -> None:
        seen.append(len(read_metrics(Layout(tmp_path / "run")).kept))

    drilled(tmp_path, Drill(), monkeypatch)
    job(tmp_path / "run", 4, quietly(save_steps=None), look, **tiny())
    assert seen == [0, 1, 2, 3]


def test_a_job_whose_drill_cannot_be_read_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "gone.json"))
    with pytest.raises(DrillUnreadable):
        job(tmp_path / "real", 3, **tiny())
    assert not (tmp_path / "real").exists()


def test_a_real_job_keeps_the_disk_it_has(tmp_path: Path) -> None:
    before = LOCAL.disk
    job(tmp_path / "run", 2, **tiny())
    assert LOCAL.disk is before


@pytest.mark.parametrize("do", ["enospc", "eio"])
@pytest.mark.parametrize("phase", ["parts", "manifest", "rename"])
def test_a_save_that_a_drill_refuses_fails_once_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, do: str
) -> None:
    drilled(tmp_path, Drill(save_steps=2, faults=(Fault(phase, do, when=2),)), monkeypatch)

    def settle(run: Run, step: int) -> None:
        # A save that is still being written at the next one would make it wait, not fail.
        run._open.opened.saver.wait()

    job(tmp_path / "run", 7, quietly(), settle, **tiny())
    failed = read_history(Layout(tmp_path / "run")).of_kind("save-failed")
    assert [fact.whole("step") for fact in failed] == [4]
    assert names(tmp_path / "run") == {"checkpoint-2", "checkpoint-6", "final"}


def test_a_fault_of_another_rank_is_not_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drilled(tmp_path, Drill(save_steps=2, faults=(Fault("parts", "eio", rank=1),)), monkeypatch)
    job(tmp_path / "run", 4, **tiny())
    assert not read_history(Layout(tmp_path / "run")).of_kind("save-failed")


def test_a_last_save_that_is_refused_ends_the_job_with_the_error_of_a_real_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drilled(tmp_path, Drill(save_steps=100, faults=(Fault("parts", "enospc"),)), monkeypatch)
    with pytest.raises(StorageFailed, match="No space left"):
        job(tmp_path / "run", 4, **tiny())
