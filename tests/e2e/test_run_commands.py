"""``status``, ``stop`` and ``outcome`` as processes, beside a job that really runs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tool
from tests.patience import PATIENCE_S
from unbroken.records.journal import Journal
from unbroken.records.layout import Layout
from unbroken.records.lease import Holder, acquire, release
from unbroken.records.process import this_holder

# A job as the loop makes one: it takes the run, works step by step, and ends in words when it is asked to.
JOB = """
import os, sys, time
from dataclasses import asdict
from pathlib import Path
from unbroken.records.journal import Journal
from unbroken.records.layout import Layout
from unbroken.records.lease import acquire, release
from unbroken.records.metrics import MetricsWriter
from unbroken.records.outcome import conclude, record_outcome
from unbroken.records.process import process_of, this_holder
from unbroken.records.snapshot import RunState, RunStateWriter
from unbroken.records.stop import StopReason, StopSources, clear_requests, end_requests

layout, holder = Layout(Path(sys.argv[1])), this_holder()
lease = acquire(layout.run, holder, token="t", now_s=time.time(), process_of=process_of)
journal = Journal(layout, lease.number, clock=time.time)
journal.write("job-start", processes=[asdict(holder)], deadline_s=time.time() + 3600)
clear_requests(layout, job=lease.number)
snapshot = RunStateWriter(layout, scratch=".scratch-s", clock=time.time)
snapshot.write(RunState("running", pid=os.getpid(), step=0, max_steps=1000, job=lease.number), durable=True)
ending = StopReason("done")
with StopSources(layout, job=lease.number, clock=time.time) as sources:
    print("ready", flush=True)
    for step in range(int(sys.argv[2])):
        if reason := sources.look():
            ending = reason
            break
        time.sleep(0.02)
outcome = conclude(ending, step=step, job=lease.number)
end_requests(layout)
record_outcome(outcome, journal, lambda o: snapshot.write(RunState(o.status, step=o.step, job=o.job), durable=True))
release(layout.run, lease, now_s=time.time())
"""

Start = Callable[..., "subprocess.Popen[str]"]

ENDED: dict[str, Any] = {"class": "done"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a job on ``run``; what is left of it is killed."""
    jobs: list[subprocess.Popen[str]] = []

    def begin(steps: int = 10_000) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", JOB, str(tmp_path / "run"), str(steps)]
        job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        jobs.append(job)
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        return job

    (tmp_path / "run").mkdir()
    yield begin
    for job in jobs:
        job.kill()
        job.communicate()


def _json(ended: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert ended.stderr == ""
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.promise("G9", "G10")
def test_a_job_that_is_asked_to_stop_ends_with_a_reason_and_the_outcome_is_reported(
    unbroken: Tool, start: Start
) -> None:
    job = start()
    running = unbroken("outcome", "run", "--json")
    assert (running.returncode, _json(running)["class"]) == (7, "held")
    stopped = _json(unbroken("stop", "run", "--wait", str(int(PATIENCE_S)), "--json"))
    assert stopped["has_ended"] and job.wait() == 0
    found = _json(unbroken("outcome", "run", "--json"))
    assert (found["schema"], found["class"], found["status"], found["exit_code"], found["job"]) == (
        *("unbroken.outcome/1", "again", "stopped", 0, 1),
    )
    assert unbroken("outcome", "run", "--stopped-exit-code", "75").returncode == 75
    assert start(steps=1).wait() == 0
    assert _json(unbroken("outcome", "--output_dir", "run", "--json"))["class"] == "done"


def test_a_request_without_a_wait_returns_at_once_and_the_status_shows_it(
    unbroken: Tool, start: Start, tmp_path: Path
) -> None:
    job = start()
    os.kill(job.pid, signal.SIGSTOP)
    assert unbroken("stop", "--output_dir", "run").returncode == 0
    status = _json(unbroken("status", "run", "--json"))
    assert status["is_stop_requested"] and status["status"] == "running" and status["deadline"] is not None
    late = unbroken("stop", "run", "--wait", "0.2")
    assert late.returncode == 7 and "error[still-running]" in late.stderr
    os.kill(job.pid, signal.SIGCONT)
    assert job.wait() == 0
    assert not (tmp_path / "run" / ".shutdown_requested").exists()


@pytest.mark.promise("G9", "G10")
def test_force_kills_the_job_at_once_and_it_counts_as_crashed(unbroken: Tool, start: Start) -> None:
    job = start()
    os.kill(job.pid, signal.SIGSTOP)
    killed = _json(unbroken("stop", "run", "--force", "--json"))
    assert killed["killed"] == [job.pid] and killed["has_ended"]
    assert job.wait() == -signal.SIGKILL
    assert _json(unbroken("status", "run", "--json"))["status"] == "crashed"
    ended = unbroken("outcome", "run", "--json")
    assert ended.returncode == 137
    assert (_json(ended)["class"], _json(ended)["status"]) == ("again", "crashed")


def test_force_kills_the_launcher_that_the_job_named_too(unbroken: Tool, start: Start, tmp_path: Path) -> None:
    job = start()
    launcher = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
    try:
        assert launcher.stdout is not None and launcher.stdout.readline()
        started = _holder_of(launcher.pid)
        other = {**vars(started), "process_started": "1"}
        processes = [vars(started), {**vars(this_holder()), "process_started": "1"}, other, "nonsense", {"pid": 1}]
        Journal(Layout(tmp_path / "run"), 1, clock=time.time).write("job-start", processes=processes)
        killed = _json(unbroken("stop", "run", "--force", "--json"))
        assert killed["killed"] == [launcher.pid, job.pid]
        assert launcher.wait() == -signal.SIGKILL
    finally:
        launcher.kill()
        launcher.communicate()


def _holder_of(pid: int) -> Holder:
    from unbroken.records.process import holder_of

    return holder_of(pid)


def test_a_job_on_another_host_is_not_killed_and_the_error_says_where_it_runs(unbroken: Tool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    acquire(run, Holder("node-7/abcd", os.getpid(), "1"), token="a", now_s=time.time())
    ended = unbroken("stop", "run", "--force")
    assert ended.returncode == 7 and "error[runs-elsewhere]" in ended.stderr and "node-7" in ended.stderr
    assert not (run / ".shutdown_requested").exists()
    asked = unbroken("stop", "run")
    assert asked.returncode == 0 and json.loads((run / ".shutdown_requested").read_text())["job"] == 1


def test_a_reused_process_number_is_not_killed(unbroken: Tool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    acquire(run, replace(this_holder(), process_started="1"), token="a", now_s=time.time())
    ended = _json(unbroken("stop", "run", "--force", "--json"))
    assert (ended["was_running"], ended["killed"]) == (False, [])


def test_stopping_what_does_not_run_is_no_error_and_leaves_no_request(unbroken: Tool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    lease = acquire(run, this_holder(), token="a", now_s=time.time())
    release(run, lease, now_s=time.time())
    ended = unbroken("stop", "run")
    assert ended.returncode == 0
    assert not (run / ".shutdown_requested").exists()


@pytest.mark.parametrize("command", ["stop", "outcome", "status"])
def test_a_path_that_is_no_run_is_reported(unbroken: Tool, tmp_path: Path, command: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert "error[not-a-store]" in unbroken(command, "file").stderr
    assert "error[path-missing]" in unbroken(command, "nowhere").stderr
    assert "error[not-a-store]" in unbroken(command, "empty").stderr
    assert "error[bad-usage]" in unbroken(command).stderr
    assert "error[bad-usage]" in unbroken(command, "a", "--output-dir", "b").stderr
    assert unbroken(command, "nowhere").returncode == 2


def test_a_run_in_which_no_job_has_started_has_no_outcome(unbroken: Tool, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    ended = unbroken("outcome", "run")
    assert ended.returncode == 2 and "error[no-outcome]" in ended.stderr


@pytest.mark.promise("X3")
def test_the_status_shows_jobs_saves_and_the_proof_by_steps_computed_twice(unbroken: Tool, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "run")
    for job in (1, 2, 3):
        journal = Journal(layout, job, clock=time.time)
        journal.write("job-start", world_size=1)
        journal.write("recomputed", compared=100, agreeing=100)
        journal.write("recomputed", compared=240 * (job > 1), agreeing=240 * (job > 1))
        journal.write("commit", step=job * 100, name=f"checkpoint-{job * 100}", seconds=1.5)
    journal.write("job-end", status="completed", exit_code=0, reason="the target is reached", step=300, **ENDED)
    facts = _json(unbroken("status", "run", "--json"))
    assert facts["recomputed"] == {"agreeing": 480, "compared": 480, "mismatches": []}
    assert (facts["status"], facts["class"], facts["last_commit"]["step"], facts["jobs"]) == (
        "completed",
        "done",
        300,
        3,
    )
    mismatch = {"step": 77, "metric": "loss", "first_job": 2, "first_bits": "0x1p+0", "second_bits": "0x1p-1"}
    journal.write("mismatch", durable=None, **mismatch)
    assert _json(unbroken("status", "run", "--json"))["recomputed"]["mismatches"][0]["second_job"] == 3
