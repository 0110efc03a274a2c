"""Who holds a run, across real PID namespaces and real wrong clocks: nobody alive is robbed, nobody dead blocks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import Tool
from tests.patience import PATIENCE_S
from unbroken.errors import RunHeld
from unbroken.records.lease import Lease, Standing, acquire, read_current, release
from unbroken.records.process import host_name, process_of, this_holder
from unbroken.records.takeover import LeaseWatch, take_over
from unbroken.store.names import DraftName

# A time to live in which four renewals fit, on a busy machine too, and which a test can wait for.
TTL_S = 12.0

HOLDER = f"""
import sys, time
from pathlib import Path
from unbroken.records.lease import acquire
from unbroken.records.process import process_of, this_holder
from unbroken.records.lease import Renewal
run = Path(sys.argv[1])
clock = lambda: time.time() + float(sys.argv[2])
lease = acquire(run, this_holder(), token="t", now_s=clock(), ttl_s={TTL_S}, process_of=process_of)
Renewal(run, lease, clock=clock)
print("holds", flush=True)
time.sleep(600)
"""
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@contextmanager
def holding(run: Path, *prefix: str, ahead_s: float = 0.0) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds a run and renews its lease; its clock may be ahead of ours."""
    command = [*prefix, sys.executable, "-c", HOLDER, str(run), str(ahead_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.kill()


def taken(run: Path) -> Lease:
    return take_over(
        run,
        this_holder(),
        token="n",
        clock=time.time,
        monotonic=time.monotonic,
        wait=time.sleep,
        process_of=process_of,
    )


def draft_of(run: Path, lease: Lease) -> Path:
    """A checkpoint that a job is just writing."""
    draft = run / "checkpoints" / str(DraftName(lease.job, 5, 1))
    draft.mkdir(parents=True)
    (draft / "part").write_bytes(b"x")
    return draft


# How far the holder's clock is ahead of ours.
@pytest.mark.parametrize("ahead_s", [0.0, -90.0, 86_400.0])
@pytest.mark.needs("root")
@pytest.mark.promise("U6")
def test_a_job_in_another_pid_namespace_keeps_its_run_until_it_is_gone(
    unbroken: Tool, tmp_path: Path, ahead_s: float
) -> None:
    run = tmp_path / "run"
    with holding(run, *NAMESPACE, ahead_s=ahead_s) as job:
        lease = read_current(run)
        assert lease is not None and lease.holder.host == host_name() and lease.standing(process_of) is Standing.UNKNOWN
        draft = draft_of(run, lease)
        assert json.loads(unbroken("status", "run", "--json").stdout)["job"]["liveness"] == "unknown"
        with pytest.raises(RunHeld, check=lambda each: each.proof == "renewed"):
            taken(run)
        assert unbroken("prune", "run").returncode == 0 and draft.exists()
        if not ahead_s:
            refused = unbroken("release", "run")
            assert refused.returncode == 7 and "error[run-held]" in refused.stderr
            assert unbroken("stop", "run", "--force").stderr.startswith("error[runs-elsewhere]")
        job.kill()
    # Dead, and nobody here can see it: what remains is to watch.
    assert unbroken("prune", "run").returncode == 0 and not draft.exists()
    began_s = time.monotonic()
    assert taken(run).number == 2
    assert time.monotonic() - began_s >= TTL_S


@pytest.mark.needs("root")
@pytest.mark.promise("U6")
def test_a_job_that_was_killed_here_is_replaced_at_once(tmp_path: Path) -> None:
    with holding(tmp_path) as job:
        with pytest.raises(RunHeld, check=lambda each: each.proof == "process"):
            taken(tmp_path)
        job.kill()
        job.wait()
        watch = LeaseWatch(tmp_path, monotonic=time.monotonic, process_of=process_of)
        assert watch.look() is Standing.GONE
        assert taken(tmp_path).number == 2


@pytest.mark.needs("root")
@pytest.mark.promise("U6")
def test_a_proc_of_another_namespace_proves_nothing() -> None:
    ask = "from unbroken.records.process import this_holder; print(this_holder().scope)"
    # Without a /proc of its own, process 1 there is init here.
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", ask]
    assert subprocess.check_output(command, text=True) == "None\n"
    assert this_holder().scope is not None


@pytest.mark.promise("U6")
def test_release_watches_first_and_frees_a_lease_that_is_not_renewed(unbroken: Tool, tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", this_holder().__class__("elsewhere/0123abcd", os.getpid(), "1")
    # Rewritten by a machine whose clock is a year ahead, and never again.
    acquire(run, elsewhere, token="x", now_s=time.time() + 3e7, ttl_s=1.0)
    assert (
        unbroken("status", "run")
        .stdout.splitlines()[1]
        .endswith("in the future by the clock of that machine; its process is not visible from here")
    )
    freed = unbroken("release", "run")
    assert freed.returncode == 0 and freed.stderr.startswith("watching the lease of job 1 on elsewhere/0123abcd")
    assert freed.stdout.startswith("released: job 1 on elsewhere/0123abcd")
    lease = read_current(run)
    assert lease is not None and lease.is_released
    said = json.loads(unbroken("release", "run", "--json").stdout)
    assert (said["was_held"], said["job"]) == (False, 1)
    # Held by this very process, which is seen.
    acquire(run, this_holder(), token="y", now_s=time.time())
    held = unbroken("release", "--output-dir", "run", "--json")
    assert held.returncode == 7 and json.loads(held.stdout)["kind"] == "run-held"


@pytest.mark.promise("U6")
def test_outcome_watches_a_job_that_cannot_be_seen(unbroken: Tool, tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", this_holder().__class__("elsewhere/0123abcd", os.getpid(), "1")
    lease = acquire(run, elsewhere, token="x", now_s=time.time(), ttl_s=1.0)
    ended = unbroken("outcome", "run", "--json")
    assert (ended.returncode, json.loads(ended.stdout)["class"]) == (137, "again")
    stopped = unbroken("stop", "run")
    assert "unbroken release run" in stopped.stdout
    assert json.loads(unbroken("stop", "run", "--wait", str(int(PATIENCE_S)), "--json").stdout)["has_ended"] is True
    release(run, lease, now_s=time.time())
