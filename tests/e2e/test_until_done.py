"""``unbroken launch``: job after job until a run is done, and when it is given up."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Tool
from tests.e2e.launching import OUTCOMES, Launch, Start, launching, write_script
from tests.e2e.test_supervise_restarts import COUNTING, starts_of
from tests.e2e.test_train import SHORT, SMALL, Folder, folder, wait_for
from tests.patience import PATIENCE_S
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout

__all__ = ["folder"]

# A run of 12 steps that saves every other one, and what a job does before a step.
TRAINS = f"""{COUNTING}
import signal, time, torch, unbroken
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
settings = unbroken.Settings(save_steps=2, max_runtime_seconds=LIMIT, walltime_reserve_seconds=1000.0)
with unbroken.Run("runs/a", model=model, optimizer=optimizer, settings=settings) as run:
    for step in run.steps(12):
        DOES
        loss = model(torch.randn(4, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
"""
QUICK = ("--restart-delay", "0")


def training(does: str, limit: str = "None") -> str:
    return TRAINS.replace("DOES", does).replace("LIMIT", limit)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a launcher on a script's text, until its run is done."""
    with launching(tmp_path, "launch") as begin:
        yield begin


@pytest.mark.promise("G23")
def test_a_run_whose_jobs_are_killed_and_run_out_of_time_is_brought_to_its_end(unbroken: Tool, tmp_path: Path) -> None:
    # The first job is killed, the second one has to keep all its time for a last save, the others have all they need.
    does = "os.kill(os.getpid(), 9) if started == 1 and step == 5 else None"
    script = write_script(tmp_path, training(does, "None if started != 2 else 1000.0"))
    ended = unbroken("launch", *QUICK, "--json", "--", script)
    assert ended.returncode == 0, ended.stderr
    facts = json.loads(ended.stdout)
    assert (facts["schema"], facts["class"], facts["jobs"]) == ("unbroken.launch/1", "done", 3), ended.stderr
    stopped = read_history(Layout(tmp_path / "runs/a")).of_kind("stop")
    assert [(each.job, each.text("by")) for each in stopped] == [(2, "walltime")]


@pytest.mark.promise("G23")
def test_a_step_that_kills_every_job_is_named_and_the_run_given_up(unbroken: Tool, tmp_path: Path) -> None:
    # A save in flight may or may not be committed when the kill comes; the first one always has been.
    does = "time.sleep(0.3) if step == 4 else os.kill(os.getpid(), 9) if step == 7 else None"
    ended = unbroken("launch", *QUICK, "--", write_script(tmp_path, training(does)))
    assert ended.returncode == 137, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert "step 8;" in last
    assert starts_of(tmp_path) in (4, 5, 6), "three restarts brought nothing"


def test_a_run_that_every_job_brings_a_bit_further_is_never_given_up(unbroken: Tool, tmp_path: Path) -> None:
    # Each job dies in its fourth step, as soon as the save of its second is committed.
    text = training("dies(run, step)").replace(
        "with unbroken.Run",
        "begun = []\n"
        "def dies(run, step):\n"
        "    begun.append(step)\n"
        "    if len(begun) == 4:\n"
        "        while not any(pathlib.Path('runs/a/checkpoints').glob(f'checkpoint-{begun[0] // 2 * 2 + 2}')):\n"
        "            time.sleep(0.01)\n"
        "        os.kill(os.getpid(), 9)\n"
        "with unbroken.Run",
    )
    ended = unbroken("launch", *QUICK, "--", write_script(tmp_path, text))
    assert ended.returncode == 0, ended.stderr
    assert starts_of(tmp_path) > 4, "more jobs than a run without progress gets"


@pytest.mark.parametrize(("status", "code", "kind"), [each for each in OUTCOMES if each[2] != "again"])
def test_what_a_user_must_look_at_ends_it(unbroken: Tool, tmp_path: Path, status: str, code: int, kind: str) -> None:
    script = write_script(tmp_path, f"{COUNTING}\ntell({status!r}, {code}, {kind!r})")
    ended = unbroken("launch", *QUICK, "--", script)
    assert (ended.returncode, starts_of(tmp_path)) == (code, 1)


def test_a_script_that_dies_before_it_names_its_run_is_given_up(unbroken: Tool, tmp_path: Path) -> None:
    ended = unbroken("launch", *QUICK, "--", write_script(tmp_path, f"{COUNTING}\nos._exit(1)"))
    assert (ended.returncode, starts_of(tmp_path)) == (1, 4)


@pytest.mark.parametrize("way", ["signal to the launcher", "signal to the job", "unbroken stop"])
def test_on_a_stop_request_it_stops(start: Start, unbroken: Tool, tmp_path: Path, way: str) -> None:
    begun = "(time.sleep(0.1), os.write(1, b'ready %d\\n' % os.getpid()) if step == 1 else None)"
    launch: Launch = start(training(begun).replace("steps(12)", "steps(100000)"), "--stopped-exit-code", "75", *QUICK)
    job = launch.ready()[0]
    if way == "unbroken stop":
        assert unbroken("stop", "runs/a").returncode == 0
    elif way == "signal to the job":
        os.kill(job, signal.SIGTERM)
    else:
        launch.process.send_signal(signal.SIGTERM)
    assert (launch.end(), starts_of(tmp_path)) == (75, 1), launch.said


@pytest.mark.promise("G23")
def test_a_config_file_that_is_edited_while_a_job_runs_does_not_change_its_restart(folder: Folder) -> None:
    options = ("training.max_steps=300", "data.epochs=null", "training.save_steps=50", "training.eval_steps=300")
    process = folder.start("train", "run.yaml", *SMALL, *options, "--max-restarts", "1", "--restart-delay", "0")
    said = wait_for(process, "saved checkpoint-50 ")
    # The next experiment is prepared in the same file.
    config = (folder.path / "run.yaml").read_text()
    edited = config.replace("runs/tiny", "runs/next").replace("seed: 1234", "seed: 99")
    assert edited != config
    (folder.path / "run.yaml").write_text(edited)
    os.kill(json.loads((folder.run / ".run_state.json").read_text())["pid"], signal.SIGKILL)
    rest, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and (folder.of_kind("resume")[-1].whole("step") or 0) >= 50, said + rest
    assert folder.query("outcome", "runs/tiny")["status"] == "completed"
    assert not (folder.path / "runs/next").exists()


@pytest.mark.promise("G23", "U9")
def test_the_trainer_resumes_until_it_is_done_and_back_to_a_step_once(folder: Folder) -> None:
    code, said = folder.call("train", "run.yaml", *SHORT, "--until-done", "--resume", "scratch")
    assert code == 2 and "--force" in said, said
    # All of its time is kept for a last save: each job stops cleanly after one step, and the next one resumes.
    hurried = ("training.max_steps=3", "training.max_runtime_seconds=1000", "training.walltime_reserve_seconds=999.99")
    code, said = folder.call("train", "run.yaml", *SHORT, *hurried, "--until-done", "--restart-delay", "0")
    assert code == 0, said
    assert [each.text("by") for each in folder.of_kind("stop")] == ["walltime", "walltime"]
    # Each restart repeats the command: only the first job goes back, and the others come to the end.
    code, said = folder.call(
        "train", "run.yaml", *SHORT, *hurried, "--until-done", "--restart-delay", "0", "--resume", "1"
    )
    resumed = folder.of_kind("resume")
    assert code == 0 and [each.whole("step") for each in resumed] == [0, 1, 2, 1, 2], said
    assert [each.text("carried_out_by") is not None for each in resumed] == [False, False, False, False, True]
    assert len(list((folder.run / "checkpoints" / ".rewinds").glob("*.json"))) == 1
