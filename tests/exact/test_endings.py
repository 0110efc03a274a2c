"""Every way a job can be asked to end, every disk it can meet: the state is saved whole, or not at all."""

import json
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tool
from tests.exact import jobs
from tests.exact.forks import forked, forked_each
from tests.exact.training import Case, facts, logged, train
from tests.patience import PATIENCE_S
from unbroken.testing import compare_runs


def checkpoints(directory: str) -> set[str]:
    names = (path.name for path in Path(directory, "checkpoints").iterdir())
    return {name for name in names if not name.startswith(".") and name != "latest"}


def saved_step(directory: str, name: str) -> int:
    found: int = json.loads(Path(directory, "checkpoints", name, "trainer_state.json").read_text())["step"]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = str(tmp_path_factory.mktemp("whole") / "run")
    found: dict[str, Any] = forked(jobs.signalled, directory, signal.SIGCONT).required()
    assert found["step"] == 12
    return found


def test_each_signal_saves_at_the_edge_of_its_step_and_the_same_command_resumes(
    tmp_path: Path, whole: dict[str, Any]
) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    runs = [(str(tmp_path / number.name), int(number)) for number in numbers]
    for (directory, number), ended in zip(runs, forked_each(jobs.signalled, runs), strict=True):
        found = ended.required()
        assert (found["step"], found["is_stopped"]) == (4, True)
        assert checkpoints(directory) == {"checkpoint-4-shutdown"}
        [fact] = facts(directory, "job-end")
        assert (fact["status"], fact["exit_code"], fact["class"]) == ("stopped", 0, "again")
        assert signal.Signals(number).name in fact["reason"]
    again = forked_each(jobs.signalled, [(directory, int(signal.SIGCONT)) for directory, _ in runs])
    assert {ended.required()["digest"] for ended in again} == {whole["digest"]}


def test_a_save_that_is_due_and_a_signal_at_once_make_one_checkpoint_of_the_step(
    tmp_path: Path, whole: dict[str, Any]
) -> None:
    directory = str(tmp_path / "run")
    assert forked(jobs.signalled_when_due, directory).required()["step"] == 4
    assert checkpoints(directory) == {"checkpoint-4-shutdown"}
    assert forked(jobs.signalled, directory, int(signal.SIGCONT)).required()["digest"] == whole["digest"]


def test_a_second_interrupt_leaves_at_once_and_loses_only_what_was_not_committed(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    # Waiting for the save that hangs is what a second interrupt must not do.
    assert forked(jobs.interrupted_twice, directory).required()
    [fact] = facts(directory, "job-end")
    assert (fact["status"], fact["exit_code"], fact["class"]) == ("stopped", 130, "again")
    assert checkpoints(directory) == set()
    assert forked(jobs.signalled, directory, int(signal.SIGTERM)).required()["step"] == 4


def test_a_flag_file_stops_the_job_it_names_and_is_gone_afterwards(tmp_path: Path) -> None:
    cases = [(str(tmp_path / "by-hand"), None), (str(tmp_path / "by-command"), 1)]
    for (directory, _), ended in zip(cases, forked_each(jobs.flagged, cases), strict=True):
        found = ended.required()
        assert found["is_stopped"]
        assert 3 <= found["step"] < 60
        assert checkpoints(directory) == {f"checkpoint-{found['step']}-shutdown"}
        assert not Path(directory, ".shutdown_requested").exists()


def test_the_stop_command_waits_until_the_job_has_saved(tmp_path: Path, unbroken: Tool) -> None:
    directory = str(tmp_path / "run")
    results = []
    thread = threading.Thread(target=lambda: results.append(forked(jobs.until_stopped, directory)))
    thread.start()
    while not Path(directory, ".run_state.json").exists():
        time.sleep(0.05)
    reported = unbroken("stop", directory, "--wait", str(int(PATIENCE_S)))
    assert reported.returncode == 0, reported.stdout + reported.stderr
    # When the command returns, the job has ended and its checkpoint stands.
    [name] = checkpoints(directory)
    thread.join()
    assert name == f"checkpoint-{results[0].required()['step']}-shutdown"
    assert json.loads(unbroken("outcome", directory, "--json").stdout)["status"] == "stopped"


@pytest.mark.promise("G7")
def test_with_slow_storage_a_job_stops_early_enough_before_its_deadline_to_commit(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    found = forked(jobs.until_walltime, directory, 60.0, 0.25).required()
    assert found["is_stopped"]
    assert found["remaining_s"] > 0
    assert f"checkpoint-{found['step']}-shutdown" in checkpoints(directory)
    assert [fact["by"] for fact in facts(directory, "stop")] == ["walltime"]
    # What it learned: a save takes at least six syncs.
    assert all(commit["seconds"] > 6 * 0.25 for commit in facts(directory, "commit"))


def test_a_stop_that_arrives_during_a_save_finishes_it_and_saves_the_last_step_too(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    found = forked(jobs.stopped_while_it_saves, directory).required()
    assert found["in_flight"] == [True]
    assert found["step"] == 3
    assert checkpoints(directory) == {"checkpoint-2", "checkpoint-3-shutdown"}
    assert saved_step(directory, "checkpoint-3-shutdown") == 3


def test_a_save_that_fails_is_reported_moves_nothing_and_lets_training_continue(
    tmp_path: Path, whole: dict[str, Any]
) -> None:
    directory = str(tmp_path / "run")
    found = forked(jobs.with_a_full_disk, directory, 5, 9).required()
    assert (found["error"], found["step"], found["digest"]) == (None, 12, whole["digest"])
    failed = facts(directory, "save-failed")
    assert [fact["step"] for fact in failed] == [4, 6, 8]
    assert {fact["error"] for fact in failed} == {"storage-failed"}
    assert "No space left" in failed[0]["reason"] or "write" in failed[0]["reason"]
    # While the disk is full, the link stays where the last commit is.
    assert set(found["links"][4:9]) == {"checkpoint-2"}
    assert checkpoints(directory) == {"checkpoint-2", "checkpoint-10", "final"}
    assert forked(train, Case(directory, total=13)).required()["began"] == 12


def test_a_last_save_that_fails_ends_the_job_with_its_error(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    found = forked(jobs.with_a_full_disk, directory, 11, 12).required()
    assert found["error"] == "storage-failed"
    [fact] = facts(directory, "job-end")
    assert (fact["status"], fact["exit_code"], fact["class"]) == ("error", 74, "again")
    # The save of step 10 may or may not have been through when the disk was full.
    newest = max(int(name.removeprefix("checkpoint-")) for name in checkpoints(directory))
    assert newest in (8, 10)
    assert forked(train, Case(directory)).required()["began"] == newest


def test_a_loss_that_is_nan_ends_the_job_and_is_never_saved(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    assert forked(jobs.with_a_bad_loss, directory).required() == {"step": 5, "exit_code": 8, "kept": 4}
    assert checkpoints(directory) == {"checkpoint-2", "checkpoint-4"}
    [fact] = facts(directory, "job-end")
    assert (fact["exit_code"], fact["class"]) == (8, "look")


@pytest.mark.promise("X3")
def test_steps_computed_twice_agree_and_one_poisoned_gradient_is_reported_loudly(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    assert forked(train, Case(directory, save_steps=6, die_at=(11, "forward"), settles=True)).is_killed
    assert max(logged(directory)) == 10
    clean, bad = str(tmp_path / "clean"), str(tmp_path / "bad")
    for copy in (clean, bad):
        shutil.copytree(directory, copy, symlinks=True)
    forked(train, Case(clean, save_steps=6)).required()
    [proof] = facts(clean, "recomputed")
    assert (proof["compared"], proof["agreeing"]) == (4, 4)
    forked(jobs.poisoned, bad, 8).required()
    reported = facts(bad, "mismatch")
    assert reported[0]["step"] == 9
    assert {fact["metric"] for fact in reported} == {"loss"}
    [proof] = facts(bad, "recomputed")
    assert (proof["compared"], proof["agreeing"]) == (4, 2)
    # Whoever compares two runs hears of it too, whatever else is equal.
    assert compare_runs(clean, clean).is_equal
    assert [each.step for each in compare_runs(clean, bad).corrupt] == [9, 10]
    assert not compare_runs(bad, bad).is_equal


def test_a_second_job_is_refused_while_the_first_lives_and_takes_over_when_it_is_dead(tmp_path: Path) -> None:
    directory, ready = str(tmp_path / "run"), str(tmp_path / "ready")
    results = []
    first = threading.Thread(target=lambda: results.append(forked(jobs.hold, directory, ready)))
    first.start()
    while not Path(ready).exists():
        time.sleep(0.05)
    assert forked(jobs.second_job, directory).required() == "run-held 7"
    Path(ready).unlink()
    first.join()
    assert results[0].is_killed
    assert forked(train, Case(directory)).required()["step"] == 12
