"""A rank that dies or fails in the script's own collectives, and stop signals to launchers, under the launchers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Tool
from tests.e2e.launching import TOOL, Start, launching, write_script
from tests.e2e.test_lease import NAMESPACE
from tests.patience import PATIENCE_S
from tests.ports import free_port
from unbroken.launch.processes import below, living
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.store.names import SHUTDOWN

TRAINS = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist, unbroken
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

HOW = sys.argv[1] if len(sys.argv) > 1 else "wait"
VICTIM = int(sys.argv[2]) if len(sys.argv) > 2 else 1

def fail(_):
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the label is 1001 of 1000")

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.ones(64, 4), batch_size=2, num_workers=2 if HOW == "wait" else 0)
    settings = unbroken.Settings(save_steps=None if HOW == "wait" else 2, audit="off")
    with unbroken.Run("runs/a", model=model, optimizer=optimizer, data=loader, settings=settings) as run:
        for step in run.steps(100_000 if HOW == "wait" else 6):
            out = model(next(run.data))
            if step == 3 and run.job == 1 and dist.get_rank() == VICTIM and HOW != "wait":
                out.register_hook(fail)
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if HOW == "wait":
                time.sleep(0.02)
                if step == 3:
                    os.write(1, b"ready %d\\n" % os.getpid())
"""
TWO = ("--nproc-per-node", "2")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``unbroken run`` on a script's text."""
    with launching(tmp_path, "run") as begin:
        yield begin


@pytest.mark.promise("U5")
def test_launch_starts_again_after_a_rank_was_killed_and_says_which(unbroken: Tool, tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAINS)
    ended = unbroken("launch", "--restart-delay", "0", *TWO, "--", script, "kill")
    assert ended.returncode == 0, ended.stderr
    [line] = [each for each in (ended.stdout + ended.stderr).splitlines() if "restart 1" in each]
    assert "peer-lost" in line and "SIGKILL" in line
    [first, _] = read_history(Layout(tmp_path / "runs/a")).of_kind("job-end")
    assert (first.text("class"), first.text("status")) == ("again", "error")


@pytest.mark.promise("U5")
def test_launch_gives_up_on_an_exception_and_shows_it_with_its_rank(unbroken: Tool, tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAINS)
    ended = unbroken("launch", "--restart-delay", "0", *TWO, "--", script, "raise")
    assert ended.returncode == 1 and "restart" not in ended.stderr, ended.stderr
    [line] = [each for each in (ended.stdout + ended.stderr).splitlines() if "error: rank-raised" in each]
    assert "ValueError" in line and "the label is 1001 of 1000" in line, "the user's own words"


@pytest.mark.promise("U5")
def test_torchrun_alone_leaves_the_same_outcome(unbroken: Tool, tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAINS)
    alone = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*alone, str(script), "kill"], cwd=tmp_path, capture_output=True, timeout=PATIENCE_S, check=False)
    facts = json.loads(unbroken("outcome", "runs/a", "--json").stdout)
    assert (facts["class"], facts["status"]) == ("again", "error"), facts
    assert facts["reason"].startswith("peer-lost")


@pytest.mark.promise("U5")
@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("program", "ranks"), [([*TOOL, "run"], 1), (TORCHRUN, 2)], ids=["told by its launcher", "told by its neighbour"]
)
def test_a_rank_killed_on_another_machine_is_named(tmp_path: Path, program: list[str], ranks: int) -> None:
    # In a PID namespace of its own a node is another machine to the rest: nobody there sees its processes.
    script = write_script(tmp_path, TRAINS)
    port = str(free_port())
    where = ["--nnodes", "2", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", port]
    nodes = [
        subprocess.Popen(
            [*NAMESPACE, *program, *where, "--node-rank", str(node), str(script), "kill", str(ranks)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for node in (0, 1)
    ]
    for each in nodes:
        each.wait(timeout=PATIENCE_S)
    [end] = read_history(Layout(tmp_path / "runs/a")).of_kind("job-end")
    assert end.text("class") == "again"
    assert str(end.text("reason")).startswith(f"peer-lost: rank {ranks} is gone"), end.text("reason")


@pytest.mark.promise("U4")
@pytest.mark.parametrize("receivers", ["launcher", "everybody"])
def test_a_signal_to_the_launcher_or_to_every_process_ends_in_one_checkpoint(
    start: Start, tmp_path: Path, receivers: str
) -> None:
    launch = start(TRAINS, *TWO)
    launch.ready(2)
    pids = [launch.process.pid, *(below(launch.process.pid, living()) if receivers == "everybody" else ())]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert launch.end() == 0, launch.said
    history = read_history(Layout(tmp_path / "runs/a"))
    assert [each.text("save_kind") for each in history.of_kind("save")] == [SHUTDOWN], launch.said
    [end] = history.of_kind("job-end")
    assert (end.text("status"), end.text("class")) == ("stopped", "again")
