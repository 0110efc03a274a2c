"""A job as a process that is watched from outside and ended: none of its processes is left, its records say how."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from unbroken.prove.job_process import JobProcess
from unbroken.records.process import process_started

SCRIPT = """
import sys, time, torch, unbroken
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
settings = unbroken.Settings(save_steps=10)
with unbroken.Run(sys.argv[1], model=model, optimizer=optimizer, settings=settings) as run:
    for step in run.steps(1_000_000):
        loss = model(torch.ones(1, 2)).sum() * 0
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        time.sleep(0.01)
"""
# A parent with a child in a session of its own, as torchrun has its workers; both ignore SIGTERM.
TREE = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"],
                         start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def started(command: Sequence[str], folder: Path) -> JobProcess:
    return JobProcess.started(command, env=os.environ, log=folder / "logs" / "job.log", run=folder / "run", cwd=folder)


def training(folder: Path) -> JobProcess:
    (folder / "train.py").write_text(SCRIPT)
    return started([sys.executable, "-m", "unbroken", "run", "--", "train.py", "run"], folder)


def first_word(job: JobProcess) -> str:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (said := job.said(1)):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return said[0]


def is_gone(pid: int) -> bool:
    """Whether a process has ended, or does so now; one that has not is not left behind by the test either."""
    deadline_s = time.monotonic() + PATIENCE_S
    while process_started(pid):
        if time.monotonic() > deadline_s:
            os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.02)
    return True


def test_a_kill_reaches_what_stands_in_a_session_of_its_own_and_leaving_does_the_same(tmp_path: Path) -> None:
    for is_killed in (True, False):
        folder = tmp_path / str(is_killed)
        folder.mkdir()
        with started([sys.executable, "-c", TREE], folder) as job:
            child = int(first_word(job))
            if is_killed:
                job.kill()
                assert job.wait(PATIENCE_S).code == 128 + signal.SIGKILL
        assert is_gone(child) and is_gone(job.pid)


def test_a_command_that_never_takes_the_run_has_a_code_and_no_outcome(tmp_path: Path) -> None:
    with started([sys.executable, "-c", "print('nothing'); raise SystemExit(7)"], tmp_path) as job:
        assert not job.wait_for_step(1, PATIENCE_S)
        ended = job.wait(PATIENCE_S)
    assert (ended.code, ended.outcome) == (7, None)
    assert job.said(5) == ("nothing",) and job.number() is None and not job.stop(0.0)


def test_a_job_is_killed_behind_a_step_and_the_next_one_is_asked_to_stop(tmp_path: Path) -> None:
    with training(tmp_path) as job:
        assert job.wait_for_step(12, PATIENCE_S), job.said(20)
        assert any(job.last_event("commit") for _ in job.steps(PATIENCE_S)), job.said(20)
        assert not job.has_lost_holder()
        job.kill()
        ended = job.wait(PATIENCE_S)
    assert ended.outcome is not None
    assert (ended.code, ended.outcome.status, ended.outcome.job) == (128 + signal.SIGKILL, "crashed", 1)
    assert job.has_lost_holder() and (job.step() or 0) >= 12

    with training(tmp_path) as job:
        assert job.step() is None, "what an earlier job wrote is not this one's"
        assert job.stop(PATIENCE_S)
        ended = job.wait(PATIENCE_S)
    assert ended.outcome is not None
    assert (ended.code, ended.outcome.status, ended.outcome.job) == (0, "stopped", 2)
    resumed = job.last_event("resume")
    assert resumed is not None and (resumed.whole("step") or 0) >= 10
    assert not job.has_lost_holder(), "it let the run go in order"


def test_a_program_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        started([str(tmp_path / "no-such-program")], tmp_path)
