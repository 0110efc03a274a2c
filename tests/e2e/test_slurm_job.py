"""``unbroken slurm`` where there is no SLURM: its commands are small scripts that note how they were called."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Tool
from tests.patience import PATIENCE_S
from unbroken.records.journal import Event, read_history
from unbroken.records.layout import Layout

TIMEOUT_S = PATIENCE_S

# A step as the loop makes one: it takes the run, waits to be asked, ends in words; or it is killed, or halts.
STEP = """
import os, sys, time, pathlib, signal
from unbroken.records.journal import Journal
from unbroken.records.layout import Layout
from unbroken.records.lease import acquire, release
from unbroken.records.outcome import conclude, record_outcome
from unbroken.records.process import process_of, this_holder
from unbroken.records.stop import StopReason, end_requests, read_request
from unbroken.errors import Halted
layout = Layout(pathlib.Path("r"))
if sys.argv[1] == "hang":
    pathlib.Path("ready").touch()
    time.sleep(600)
lease = acquire(layout.run, this_holder(), token="t", now_s=time.time(), process_of=process_of)
journal = Journal(layout, lease.number, clock=time.time)
journal.write("job-start", world_size=1)
signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path("hit").touch())
pathlib.Path("ready").touch()
ending = StopReason("done")
how = sys.argv[1]
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "halt":
    ending = Halted(run=layout.run, reason="odd", step=3)
while how == "wait" and ending.kind == "done":
    if read_request(layout) is not None:
        ending = StopReason("flag", read_request(layout).by)
        journal.write("stop", by="flag", reason=ending.sentence())
        journal.write("commit", name="checkpoint-3", step=3, seconds=1.0)
    time.sleep(0.02)
record_outcome(conclude(ending, step=3, job=lease.number), journal, lambda outcome: None)
end_requests(layout)
release(layout.run, lease, now_s=time.time())
"""


class Site:
    """A folder with a step, and with SLURM's commands as scripts before all others."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bin = path / "bin"
        self.bin.mkdir()
        (path / "step.py").write_text(STEP)
        self.command("squeue", "echo RUNNING")
        self.command("scontrol", "")
        self.command("sbatch", "echo 99")
        self.started: subprocess.Popen[str] | None = None

    def command(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {self.path}/calls\n{text}\n')
        (self.bin / name).chmod(0o755)

    def environ(self, **more: str) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **more}

    def start(self, how: str, *options: str, **environ: str) -> "subprocess.Popen[str]":
        step = [sys.executable, "step.py", how]
        self.started = subprocess.Popen(
            [sys.executable, "-m", "unbroken", "slurm", "job", "r", *options, "--", *step],
            cwd=self.path,
            env=self.environ(**environ),
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.started

    def end(self) -> tuple[int, str]:
        assert self.started is not None
        _, said = self.started.communicate(timeout=TIMEOUT_S)
        return self.started.returncode, said

    def wait_for_step(self) -> None:
        until = time.monotonic() + TIMEOUT_S
        while not (self.path / "ready").exists():
            assert time.monotonic() < until
            time.sleep(0.02)

    def of_kind(self, kind: str) -> list[Event]:
        """The events of a kind in the journal of the run."""
        return read_history(Layout(self.path / "r")).of_kind(kind)

    @property
    def calls(self) -> list[str]:
        noted = self.path / "calls"
        return noted.read_text().splitlines() if noted.exists() else []


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    here = Site(tmp_path)
    yield here
    if here.started is not None and here.started.poll() is None:
        here.started.kill()
        here.started.communicate()


@pytest.mark.promise("G23")
def test_the_warning_reaches_the_run_through_its_directory_and_the_job_is_queued_again(site: Site) -> None:
    job = site.start("wait")
    site.wait_for_step()
    job.send_signal(signal.SIGUSR1)
    code, said = site.end()
    assert code == 0, said
    [stop] = site.of_kind("stop")
    assert stop.text("by") == "flag" and "SIGUSR1" in str(stop.text("reason"))
    assert not (site.path / "hit").exists(), "no process of the step was signalled"
    assert site.calls == ["squeue -h -j 7 -o %T %r", "scontrol requeue 7"]


def test_of_an_array_only_the_task_itself_is_queued_again(site: Site) -> None:
    job = site.start("wait", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    site.wait_for_step()
    job.send_signal(signal.SIGUSR1)
    assert site.end()[0] == 0
    assert site.calls[-1] == "scontrol requeue 7_3", "7 alone would be all tasks of the array"


def test_a_job_that_was_killed_is_queued_again_and_three_in_a_row_are_enough(site: Site) -> None:
    for _ in range(2):
        site.start("kill")
        assert site.end()[0] == 0
    site.start("kill", SLURM_RESTART_COUNT="2")
    assert site.end()[0] == 137
    assert len([call for call in site.calls if call.startswith("scontrol")]) == 2


@pytest.mark.promise("G10")
def test_a_halted_run_is_left_to_a_user_now_and_by_every_link_behind(site: Site) -> None:
    site.start("halt")
    assert site.end()[0] == 4
    site.start("wait", "--link")
    assert site.end()[0] == 4
    site.start("wait", SLURM_RESTART_COUNT="1")
    assert site.end()[0] == 4, "a job that was queued again by somebody has not been looked at either"
    assert site.calls == [] and len(site.of_kind("job-start")) == 1, "neither was started"
    site.start("done")
    assert site.end()[0] == 0, "who submits it has looked"


def test_a_job_that_slurm_is_ending_itself_is_left_to_slurm(site: Site) -> None:
    site.command("squeue", "echo COMPLETING None")
    job = site.start("wait")
    site.wait_for_step()
    job.send_signal(signal.SIGTERM)
    assert site.end()[0] == 0
    assert site.calls == ["squeue -h -j 7 -o %T %r"]


def test_a_job_whose_last_save_outlasts_its_time_limit_is_queued_again(site: Site) -> None:
    site.command("squeue", "echo COMPLETING TimeLimit")
    job = site.start("wait")
    site.wait_for_step()
    job.send_signal(signal.SIGUSR1)
    assert site.end()[0] == 0
    assert site.calls[-1] == "scontrol requeue 7"


def test_where_slurm_queues_nothing_again_a_follower_is_submitted_with_what_saves_have_taught(site: Site) -> None:
    site.command("scontrol", "echo 'Requested operation is presently disabled for job 7' >&2; exit 1")
    script = site.path / "a.sbatch"
    script.write_text(f"#!/bin/bash\n#UNBROKEN learns from {site.path}/r\n")
    job = site.start("wait", "--script", str(script))
    site.wait_for_step()
    job.send_signal(signal.SIGUSR1)
    code, said = site.end()
    assert code == 0 and "presently disabled" in said, "SLURM's own words"
    assert site.calls[-1] == f"sbatch --parsable --signal=B:USR1@60 --dependency=afterany:7 {script} --link"


def test_jobs_that_never_take_their_run_in_time_are_counted_from_follower_to_follower(site: Site) -> None:
    site.command("scontrol", "exit 1")
    script = site.path / "a.sbatch"
    script.write_text("#!/bin/bash\n")
    for results, code in (("1", 0), ("2", 138)):
        (site.path / "ready").unlink(missing_ok=True)
        job = site.start("hang", "--script", str(script), "--in-vain", results)
        site.wait_for_step()
        job.send_signal(signal.SIGUSR1)
        assert site.end()[0] == code
    submitted = [call for call in site.calls if call.startswith("sbatch")]
    assert submitted == [f"sbatch --parsable --dependency=afterany:7 {script} --link --in-vain 2"]


def test_a_link_of_a_chain_queues_nothing(site: Site) -> None:
    job = site.start("wait", "--chained")
    site.wait_for_step()
    job.send_signal(signal.SIGUSR1)
    assert site.end()[0] == 0
    assert site.calls == [] and len(site.of_kind("stop")) == 1


def test_a_step_that_cannot_begin_is_reported_and_not_queued_again(site: Site) -> None:
    command = [sys.executable, "-m", "unbroken", "slurm", "job", "r", "--", "no-such-srun"]
    ended = subprocess.run(command, cwd=site.path, env=site.environ(), capture_output=True, text=True, check=False)
    assert ended.returncode == 127
    assert "no-such-srun" in ended.stderr
    assert site.calls == []


def test_a_run_that_another_job_holds_is_waited_for_and_then_left_alone(site: Site) -> None:
    job = site.start("wait")
    site.wait_for_step()
    program = (
        "import time; from pathlib import Path; from unbroken.launch.slurm.job import *;"
        "context = JobContext({'SLURM_JOB_ID': '8'}, time.monotonic, time.sleep, print, 0.2);"
        "print(run_job(JobOptions(Path('r'), ('touch', 'began')), context))"
    )
    said = subprocess.check_output([sys.executable, "-c", program], cwd=site.path, text=True)
    assert said.splitlines()[-1] == "7" and not (site.path / "began").exists()
    job.send_signal(signal.SIGUSR1)
    assert site.end()[0] == 0


def test_init_writes_a_script_once_and_every_mistake_is_reported(tmp_path: Path, unbroken: Tool) -> None:
    (tmp_path / "train.py").touch()
    words = ("slurm", "init", "--run-dir", "runs/a", "--time", "1:00:00", "--gpus-per-node", "8")
    wrote = unbroken(*words, "--", "train.py", "--lr", "3")
    assert wrote.returncode == 0, wrote.stderr
    text = (tmp_path / "a.sbatch").read_text()
    assert "--nproc-per-node 8" in text and text.rstrip().endswith("train.py --lr 3")
    assert unbroken(*words, "--", "train.py").stderr.startswith("error[would-overwrite]")
    assert unbroken(*words, "--force", "--", "train.py").returncode == 0
    assert (tmp_path / "a.sbatch").read_text().rstrip().endswith("train.py")
    # What the complaint must name, of all that was given.
    for mistake, named in (
        ((), "CONFIG"),
        (("missing.yaml",), "missing.yaml"),
        ((*words[2:], "--force", "-o", ".", "--", "train.py"), "-o"),
        (("--run-dir", "r", "--", "no.py"), "no.py"),
        (("--run-dir", "r", "--time", "soon", "--", "train.py"), "--time soon"),
        (("--run-dir", "r", "--time", "1", "--walltime-reserve", "90", "--", "train.py"), "--walltime-reserve"),
        (("--run-dir", "r", "--walltime-reserve", "20h", "--", "train.py"), "from 1 to 65535 seconds"),
        (("--run-dir", "r", "--walltime-reserve", "soon", "--", "train.py"), "is not a duration"),
        (("--run-dir", "r", "--nodes", "two", "--", "train.py"), "--nodes two"),
        (("--run-dir", "r", "--nproc-per-node", "all", "--", "train.py"), "--nproc-per-node all"),
        (("--run-dir", "r", "--array", "0-3", "--", "train.py"), "%a"),
        (("--run-dir", "r-%a", "--", "train.py"), "--array"),
        (("--", "train.py"), "--run-dir"),
        (("--run-dir", "r", "--gpus-per-node", "none", "--", "train.py"), "--gpus-per-node none"),
        (("--run-dir", "r", "--sbatch", "signal=1", "--", "train.py"), "--walltime-reserve"),
        (("--run-dir", "r", "--resume", "5", "--", "train.py"), "CONFIG"),
        (("--walltime", "3", "run.yaml"), "--walltime"),
        (("--run-dir", "", "--time", "", "--partition", "", "--output", "", "--", "train.py"), "--partition"),
        (("--run-dir", "r", "--nodes", "4-1", "--", "train.py"), "--nodes 4-1"),
        (("--run-dir", "r", "--output", "logs/%j.out", "--", "train.py"), "logs"),
        (("--run-dir", "r", "--name", "a/b", "--", "train.py"), "'a/b'"),
        (("--run-dir", "r" * 201, "--", "train.py"), "201"),
    ):
        refused = unbroken("slurm", "init", "--json", *mistake)
        complaint = json.loads(refused.stdout)
        assert refused.returncode == 2 and named in complaint["message"] + complaint["at"], (mistake, complaint)
    assert not list(tmp_path.glob("r*.sbatch"))
    for verb in (("submit", "."), ("chain", ".", "--links", "2")):
        assert unbroken("slurm", *verb).stderr.startswith("error[bad-usage]")


def test_resume_is_an_option_of_init_as_of_train(tmp_path: Path, unbroken: Tool) -> None:
    assert unbroken("init", "--preset", "tiny", "-o", "a.yaml").returncode == 0
    wrote = unbroken("slurm", "init", "a.yaml", "--time", "60", "--resume", "1000", "-o", "a.sbatch")
    assert wrote.returncode == 0, wrote.stderr
    assert "training.resume=1000" in (tmp_path / "a.sbatch").read_text()


def test_several_configs_are_an_array_of_runs(tmp_path: Path, unbroken: Tool) -> None:
    for name in ("a", "b"):
        assert unbroken("init", "--preset", "tiny", "-o", f"{name}.yaml").returncode == 0
    same = unbroken("slurm", "init", "a.yaml", "b.yaml")
    assert same.returncode == 2 and "training.output_dir" in same.stderr
    text = (tmp_path / "b.yaml").read_text()
    (tmp_path / "b.yaml").write_text(text.replace("runs/tiny", "runs/other"))
    results = json.loads(unbroken("slurm", "init", "a.yaml", "b.yaml", "training.max_steps=900", "--json").stdout)
    assert results["runs"] == ["runs/tiny", "runs/other"]
    assert "#SBATCH --array=0-1" in results["text"] and "training.max_steps=900" in results["text"]


def test_without_slurm_nothing_is_submitted_and_what_helps_is_reported(tmp_path: Path, unbroken: Tool) -> None:
    (tmp_path / "a.sbatch").write_text("#!/bin/bash\n")
    results = unbroken("slurm", "submit", "a.sbatch", env={"PATH": str(tmp_path)})
    assert results.returncode == 2 and "error[slurm-missing]" in results.stderr
    assert unbroken("slurm", "chain", "no.sbatch", "--links", "2").returncode == 2
    outside = unbroken("slurm", "job", "r", "--", "true", env={"SLURM_JOB_ID": ""})
    assert outside.returncode == 2 and "SLURM_JOB_ID" in outside.stderr


def test_a_job_that_would_be_warned_as_it_begins_is_never_submitted(site: Site, unbroken: Tool) -> None:
    (site.path / "train.py").touch()
    script = site.path / "a.sbatch"
    words = ("slurm", "init", "--run-dir", "runs/a", "-o", "a.sbatch")
    longer = unbroken(*words, "--time", "3:00", "--sbatch", "time=1:00", "--", "train.py")
    assert longer.returncode == 2 and "--time" in longer.stderr
    assert unbroken(*words, "--time", "3:00", "--", "train.py").returncode == 0
    assert unbroken(*words, "--time", "0", "--force", "--", "train.py").returncode == 0, "0 is no limit"
    assert unbroken(*words, "--time", "3:00", "--force", "--", "train.py").returncode == 0
    # One save of 88 s is on record: twice that and a margin, which is more than the three minutes of a job.
    (site.path / "runs/a/journal").mkdir(parents=True)
    saved = {"kind": "commit", "at": time.time(), "seconds": 88.0}
    (site.path / "runs/a/journal/job-0001.jsonl").write_text(json.dumps(saved) + "\n")
    for verb in (("submit", "a.sbatch"), ("chain", "a.sbatch", "--links", "2")):
        refused = json.loads(unbroken("slurm", *verb, "--json", env=site.environ()).stdout)
        assert (refused["kind"], refused["at"]) == ("bad-usage", f"unbroken slurm {verb[0]}"), refused
    assert site.calls == []
    assert unbroken("slurm", "submit", "a.sbatch", "--sbatch", "time=30", env=site.environ()).returncode == 0
    assert unbroken("slurm", "submit", "a.sbatch", env=site.environ(SBATCH_TIMELIMIT="30")).returncode == 0
    # What the script itself says counts too, however it came there.
    script.write_text("#!/bin/bash\n#SBATCH -t 1\n\n#SBATCH --signal=B:USR1@90\ntrue\n#SBATCH --time=60\n")
    assert unbroken("slurm", "submit", "a.sbatch", env=site.environ()).stderr.startswith("error[bad-usage]")
    assert len(site.calls) == 2


def test_a_chain_that_breaks_names_the_links_that_stand(site: Site, unbroken: Tool) -> None:
    (site.path / "a.sbatch").write_text("#!/bin/bash\n")
    limit = "sbatch: error: QOSMaxSubmitJobPerUserLimit"
    site.command(
        "sbatch", f'test "$(grep -c sbatch {site.path}/calls)" = 3 && {{ echo "{limit}" >&2; exit 1; }}; echo 99'
    )
    results = unbroken("slurm", "chain", "a.sbatch", "--links", "5", env=site.environ())
    assert results.returncode == 2 and limit in results.stderr
    assert results.stderr.startswith("error[slurm-refused]") and "99, 99" in results.stderr
    script = site.path / "a.sbatch"
    assert site.calls[0] == f"sbatch --parsable --no-requeue {script} --chained"
    assert site.calls[1] == f"sbatch --parsable --dependency=afterany:99 --no-requeue {script} --link --chained"
