"""What every framework shares: drafts become checkpoints by one rename, and the newest usable one is chosen."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import unbroken
from unbroken.errors import NoRoom, NoUsableCheckpoint, OtherFramework, RunHeld, StartsOver
from unbroken.frameworks.folders import Folder
from unbroken.frameworks.framework_run import FrameworkRun, Published, ResumePoint, open_framework_run
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.stop import StopReason
from unbroken.store.keep import LastK

SETTINGS = unbroken.Settings(save_steps=None, keep_last_k=None, console=False, catch_signals=False)
DONE = StopReason("done")


def anything(path: Path) -> None:
    """Every folder is taken."""


def write(folder: Path, step: int) -> None:
    """What a framework writes."""
    (folder / f"checkpoint-{step}" / "sub").mkdir(parents=True)
    (folder / f"checkpoint-{step}" / "weights.bin").write_bytes(bytes(range(256)) * step)
    (folder / f"checkpoint-{step}" / "sub" / "state.json").write_text("{}")


def save(run: FrameworkRun, step: int, origin: str = "some tool", **more: object) -> Published:
    staged = run.stage(step, coming_bytes=0)
    assert isinstance(staged, Path)
    write(staged, step)
    return run.publish(Folder(step, origin, **more), is_staged=True)  # type: ignore[arg-type]


def save_three(run: FrameworkRun) -> None:
    for step in (1, 2, 3):
        save(run, step)


def in_run(directory: Path, action: Callable[[FrameworkRun], None]) -> None:
    run = open_framework_run(directory, SETTINGS, origin="some tool")
    try:
        action(run)
    finally:
        run.close(DONE, step=0)


def found(run: FrameworkRun, asked: str | None = None) -> ResumePoint:
    return run.find_resume_point(asked, anything)


@pytest.mark.promise("C9", "X6")
def test_a_checkpoint_has_its_name_only_once_it_is_complete(tmp_path: Path) -> None:
    def job(run: FrameworkRun) -> None:
        staged = run.stage(5, coming_bytes=0)
        assert isinstance(staged, Path)
        write(staged, 5)
        assert unbroken.checkpoints(tmp_path) == [] and not (tmp_path / "checkpoint-5").exists()
        assert run.publish(Folder(5, "some tool", metrics={"loss": 2.5}), is_staged=True).name == "checkpoint-5"
        with pytest.raises(RunHeld):
            open_framework_run(tmp_path, SETTINGS, origin="some tool")

    in_run(tmp_path, job)
    (saved,) = unbroken.checkpoints(tmp_path)
    assert saved.is_usable and saved.step == 5 and saved.metrics == {"loss": 2.5}
    assert sorted(each.name for each in saved.path.iterdir()) == ["manifest.json", "sub", "weights.bin"]
    assert not list(tmp_path.glob(".tmp-*"))
    in_run(tmp_path, lambda run: assert_from(found(run), "checkpoint-5"))


def assert_from(point: ResumePoint, name: str, *skipped: str) -> None:
    assert point.path is not None and point.path.name == name
    assert [each for each, _ in point.skipped] == list(skipped)


@pytest.mark.promise("C9", "X6")
def test_damaged_and_unsealed_newer_ones_are_set_aside_and_logged(tmp_path: Path) -> None:
    in_run(tmp_path, save_three)
    flipped = tmp_path / "checkpoint-3" / "weights.bin"
    data = bytearray(flipped.read_bytes())
    data[7] ^= 1
    flipped.write_bytes(data)
    write(tmp_path, 4)
    in_run(tmp_path, lambda run: assert_from(found(run), "checkpoint-2", "checkpoint-3", "checkpoint-4"))
    assert {each.name for each in (tmp_path / "quarantine").iterdir()} >= {"checkpoint-3", "checkpoint-4"}
    skipped = read_history(Layout(tmp_path)).of_kind("checkpoint-skipped")
    assert [event.text("name") for event in skipped] == ["checkpoint-3", "checkpoint-4"]

    # Its name is free again for the step when it comes.
    def again(run: FrameworkRun) -> None:
        found(run)
        assert save(run, 4).name == "checkpoint-4"

    in_run(tmp_path, again)


@pytest.mark.promise("C9")
def test_checkpoints_from_before_the_run_are_not_thrown_away(tmp_path: Path) -> None:
    write(tmp_path, 4)

    def job(run: FrameworkRun) -> None:
        with pytest.raises(NoUsableCheckpoint):
            found(run)

    in_run(tmp_path, job)
    in_run(tmp_path, job)
    assert (tmp_path / "checkpoint-4").is_dir()


@pytest.mark.promise("C9")
def test_a_request_for_an_older_one_is_carried_out_once(tmp_path: Path) -> None:
    in_run(tmp_path, save_three)

    def back(run: FrameworkRun) -> None:
        point = found(run, "1")
        assert_from(point, "checkpoint-1")
        assert set(point.abandoned) == {"checkpoint-2", "checkpoint-3"}
        assert save(run, 2).name == "checkpoint-2"

    in_run(tmp_path, back)
    in_run(tmp_path, lambda run: assert_from(found(run, "1"), "checkpoint-2"))


@pytest.mark.promise("C9")
def test_a_loop_that_starts_before_its_checkpoints_is_refused(tmp_path: Path) -> None:
    def job(run: FrameworkRun) -> None:
        save(run, 3)
        with pytest.raises(StartsOver):
            run.begin(0, ResumePoint(), is_comparable=True, origin="some tool")
        run.begin(3, ResumePoint(), is_comparable=True, origin="some tool")

    in_run(tmp_path, job)


@pytest.mark.promise("C9")
def test_without_room_nothing_is_staged_and_old_ones_are_swept_after_a_commit(tmp_path: Path) -> None:
    def job(run: FrameworkRun) -> None:
        refused = run.stage(1, coming_bytes=1 << 60)
        assert isinstance(refused, NoRoom)
        for step in (1, 2, 3):
            done = save(run, step, policies=(LastK(2),))
        assert done.removed == ("checkpoint-1",)

    in_run(tmp_path, job)
    assert [each.step for each in unbroken.checkpoints(tmp_path)] == [3, 2]
    failed = read_history(Layout(tmp_path)).of_kind("save-failed")
    assert [event.text("error") for event in failed] == ["no-room"]


def files_in(directory: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in sorted(directory.rglob("*")) if each.is_file()}


def opened_with(origin: str, directory: Path, *, saves: bool, settings: unbroken.Settings = SETTINGS) -> None:
    """One job of a run of a framework, or of ``unbroken.Run``."""
    if origin == "unbroken":
        with unbroken.Run(directory, settings=settings, model=torch.nn.Linear(2, 2)) as run:
            for _ in run.steps(1 if saves else 0):
                pass
        return
    opened = open_framework_run(directory, settings, origin=origin)
    try:
        opened.find_resume_point(None, anything)
        if saves:
            save(opened, 1, origin)
    finally:
        opened.close(DONE, step=1)


PAIRS = [("transformers", "lightning"), ("accelerate", "unbroken"), ("unbroken", "torch-dcp")]


@pytest.mark.promise("X6")
@pytest.mark.parametrize(("first", "then"), PAIRS)
def test_a_run_of_another_framework_is_refused_and_left_as_it_is(tmp_path: Path, first: str, then: str) -> None:
    run = tmp_path / "run"
    opened_with(first, run, saves=True)
    before = files_in(run)
    with pytest.raises(OtherFramework) as refused:
        opened_with(then, run, saves=True)
    assert refused.value.made_with == first and refused.value.opened_with == then
    # Not even in its records: `status` says of a run that is done that it is done.
    assert files_in(run) == before
    opened_with(first, run, saves=False)


@pytest.mark.promise("X6")
def test_checkpoints_of_another_framework_in_a_mirror_are_refused_too(tmp_path: Path) -> None:
    mirrored = dataclasses.replace(SETTINGS, mirror=f"file://{tmp_path}/mirror")
    opened_with("transformers", tmp_path / "run", saves=True, settings=mirrored)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(OtherFramework):
        opened_with("lightning", tmp_path / "run", saves=True, settings=mirrored)


@pytest.mark.promise("C9")
def test_a_flag_file_is_answered_at_the_edge_and_an_error_is_recorded(tmp_path: Path) -> None:
    run = open_framework_run(tmp_path, SETTINGS, origin="some tool")
    run.begin(0, found(run), is_comparable=True, origin="some tool")
    Layout(tmp_path).stop_request.touch()
    reason = run.step_done(1)
    assert reason is not None and reason.kind == "flag"
    run.close(KeyError("loss"), step=1)
    end = read_history(Layout(tmp_path)).last("job-end")
    assert end is not None and end.text("status") == "error" and end.whole("step") == 1


@pytest.mark.promise("C9")
def test_changed_hyperparameters_are_named_and_the_run_resumes(tmp_path: Path) -> None:
    then = {"learning_rate": 0.1, "optim": "adamw", "max_grad_norm": 1.0}
    in_run(tmp_path, lambda run: run.name_changes(then, {"learning_rate": 0.1, "max_grad_norm": 0.5, "new": 3}))
    in_run(tmp_path, lambda run: run.name_changes(None, then))
    (notice,) = read_history(Layout(tmp_path)).of_kind("notice")
    assert str(notice.values["text"]).startswith("max_grad_norm was 1.0 when the checkpoint was saved and is 0.5 now")
    now = {"learning_rate": 0.2, "optim": "sgd", "max_grad_norm": 1.0}
    in_run(tmp_path, lambda run: run.name_changes(then, now, restored=("learning_rate",)))
    texts = [str(each.values["text"]) for each in read_history(Layout(tmp_path)).of_kind("notice")]
    assert texts[1].endswith("so 0.1 is used") and texts[2].endswith("not restored: sgd is used from here on")


def test_a_save_is_reported_as_every_run_reports_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        in_run(tmp_path, save_three)
    assert re.search(r"saved checkpoint-3 in \d+\.\d s \(training paused \d+\.\d s\)", caplog.text)


def test_a_request_is_carried_out_once_though_the_disk_is_wiped_between_jobs(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = dataclasses.replace(SETTINGS, mirror=f"file://{tmp_path}/mirror")

    def job(expected: str | None, saved_step: int, asked: str | None = "1") -> None:
        run = open_framework_run(directory, settings, origin="some tool")
        try:
            point = found(run, asked)
            assert (point.path.name if point.path else None) == expected
            save(run, saved_step)
        finally:
            run.close(DONE, step=saved_step)

    for step, before in ((1, None), (2, "checkpoint-1")):
        job(before, step, asked=None)
    # A scheduler repeats the same command, on a node whose disk is empty.
    for before, step in (("checkpoint-1", 3), ("checkpoint-3", 4), ("checkpoint-4", 5)):
        job(before, step)
        shutil.rmtree(directory)
