"""``unbroken run`` with restarts, and as the parent of torchrun."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Tool
from tests.e2e.launching import (
    AGREEING,
    OUTCOMES,
    RECORDING,
    STUBBORN,
    TELL,
    Launch,
    Start,
    launching,
    wait_until_gone,
    write_script,
)
from tests.ports import free_port
from unbroken.launch.processes import below, child_ranks, living

# Counts its starts, then does what the test adds.
COUNTING = f"""{TELL}
with open("starts", "a") as starts:
    starts.write("x")
started = pathlib.Path("starts").stat().st_size
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a launcher on a script's text."""
    with launching(tmp_path) as begin:
        yield begin


def starts_of(folder: Path) -> int:
    return (folder / "starts").stat().st_size


def test_a_crashing_job_is_started_again_as_often_as_allowed(unbroken: Tool, tmp_path: Path) -> None:
    script = write_script(tmp_path, f"{COUNTING}\nsys.exit(3)")
    ended = unbroken("run", "--max-restarts", "2", "--restart-delay", "0", "--", script)
    assert (ended.returncode, starts_of(tmp_path)) == (3, 3)


def test_a_restart_that_completes_is_the_outcome(unbroken: Tool, tmp_path: Path) -> None:
    text = f"{COUNTING}\nif started == 1: os.kill(os.getpid(), 9)\ntell('completed', 0, 'done')"
    options = ["--max-restarts", "5", "--restart-delay", "0", "--json"]
    ended = unbroken("run", *options, "--", write_script(tmp_path, text))
    assert (ended.returncode, json.loads(ended.stdout)["jobs"]) == (0, 2)


@pytest.mark.parametrize(("status", "code", "kind"), [each for each in OUTCOMES if each[1] not in (1, 74)])
def test_an_outcome_that_no_restart_can_mend_is_final(
    unbroken: Tool, tmp_path: Path, status: str, code: int, kind: str
) -> None:
    script = write_script(tmp_path, f"{COUNTING}\ntell({status!r}, {code}, {kind!r})")
    ended = unbroken("run", "--max-restarts", "5", "--restart-delay", "0", "--", script)
    assert (ended.returncode, starts_of(tmp_path)) == (code, 1)


@pytest.mark.parametrize(
    ("mistake", "code", "starts"),
    [
        ("unbroken.Run('')", 2, 1),
        ("unbroken.Settings(save_steps=0)", 1, 1),
        ("raise NameError('modle')", 1, 1),
        # What another start may mend stays a crash.
        ("raise OSError(116, 'Stale file handle')", 1, 3),
        ("raise RuntimeError('CUDA error: all devices are busy')", 1, 3),
    ],
)
def test_a_mistake_before_the_run_is_open_is_not_tried_again(
    unbroken: Tool, tmp_path: Path, mistake: str, code: int, starts: int
) -> None:
    script = write_script(tmp_path, f"{COUNTING}\nimport unbroken\n{mistake}")
    ended = unbroken("run", "--max-restarts", "2", "--restart-delay", "0", "--", script)
    assert (ended.returncode, starts_of(tmp_path)) == (code, starts), ended.stderr


def test_a_run_without_progress_is_given_up(unbroken: Tool, tmp_path: Path) -> None:
    script = write_script(tmp_path, f"{COUNTING}\ntell('error', 74, 'again', 'the_run')")
    ended = unbroken("run", "--max-restarts", "50", "--restart-delay", "0", "--", script)
    assert (ended.returncode, starts_of(tmp_path)) == (74, 4)


def test_a_run_with_progress_is_not_given_up(unbroken: Tool, tmp_path: Path) -> None:
    text = f"""{COUNTING}
from unbroken.cli.main import main
checkpoint = pathlib.Path(f"the_run/checkpoints/checkpoint-{{started}}")
checkpoint.mkdir(parents=True)
(checkpoint / "model.pt").write_bytes(b"bytes")
main(["seal", "--quiet", str(checkpoint)])
os.kill(os.getpid(), 9)
"""
    options = ["--max-restarts", "5", "--restart-delay", "0", "--run-dir", "the_run"]
    ended = unbroken("run", *options, "--", write_script(tmp_path, text))
    assert (ended.returncode, starts_of(tmp_path)) == (137, 6)


def test_a_signal_while_a_restart_is_awaited_ends_the_launch(start: Start, tmp_path: Path) -> None:
    launch = start(f"{COUNTING}\nsys.exit(3)", "--max-restarts", "5", "--restart-delay", "60")
    launch.wait_for("restart 1 of 5 in 60 s")
    launch.process.send_signal(signal.SIGTERM)
    assert (launch.end(), starts_of(tmp_path)) == (3, 1)


def test_a_job_that_is_stopped_by_a_signal_is_not_started_again(start: Start, tmp_path: Path) -> None:
    launch = start(f"{COUNTING}{STUBBORN}".replace("SIG_IGN", "SIG_DFL"), "--max-restarts", "5")
    launch.ready()
    launch.process.send_signal(signal.SIGTERM)
    assert (launch.end(), starts_of(tmp_path)) == (143, 1)


# ---- torchrun ----


def test_torchruns_one_is_replaced_by_the_outcome_and_the_launcher_never_loads_torch(tmp_path: Path) -> None:
    # As soon as one worker ends badly torchrun ends the others, so rank 1 waits until rank 0 has told.
    text = f"""{TELL}
import time
if os.environ["RANK"] == "0": tell("error", 6, "look")
while not os.path.exists(os.environ["UNBROKEN_OUTCOME_FILE"]): time.sleep(0.01)
sys.exit(6)
"""
    show = (
        "import sys\nfrom unbroken.cli.main import main\ncode = main(sys.argv[1:])\n"
        "sys.stderr.write('\\nMODULES ' + ' '.join(sys.modules))\nsys.exit(code)"
    )
    command = [sys.executable, "-c", show, "run", "--nproc-per-node", "2", "--", write_script(tmp_path, text)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    said, _, modules = ended.stderr.partition("\nMODULES ")
    assert ended.returncode == 6
    assert "Traceback" not in said and "ended with" not in said, "the run told why it ended; nobody adds to it"
    assert "as told" in said.splitlines()[-1], "the reason that the job gave"
    assert modules and not {"torch", "numpy"} & set(modules.split())


@pytest.mark.parametrize(
    ("does", "code", "line"),
    [
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL"),
        ("os._exit(5)", 5, "rank 1 exited with code 5"),
        ("raise ValueError('the rank says this')", 1, "rank 1 exited with code 1"),
    ],
)
def test_a_rank_that_fails_has_one_line_and_keeps_its_own_traceback(
    unbroken: Tool, tmp_path: Path, does: str, code: int, line: str
) -> None:
    text = f"import os, time\nif os.environ['RANK'] == '1': {does}\ntime.sleep(600)"
    ended = unbroken("run", "--nproc-per-node", "2", "--", write_script(tmp_path, text))
    said = ended.stderr.splitlines()
    assert ended.returncode == code, ended.stderr
    assert f"unbroken: {line}" in said
    assert "ChildFailedError" not in ended.stderr and "torch/distributed" not in ended.stderr
    assert ("ValueError: the rank says this" in said) == does.startswith("raise")
    assert len(said) <= (10 if does.startswith("raise") else 3), ended.stderr


@pytest.mark.parametrize("to", ["the launcher", "everybody", "one rank", "torchrun"])
def test_ranks_stop_cleanly_whoever_gets_the_signal(start: Start, to: str) -> None:
    launch = start(AGREEING, "--nproc-per-node", "2", "--stopped-exit-code", "75")
    lines = [line.split() for line in launch.wait_for("ready", times=2)]
    ranks = [int(pid) for _, pid, _ in lines]
    assert {threads for _, _, threads in lines} == {"1"}
    everybody = [launch.process.pid, *below(launch.process.pid, living())]
    torchrun = living()[ranks[0]].parent
    assert sorted(child_ranks(torchrun, living())) == sorted(ranks)
    receivers = {"the launcher": everybody[:1], "everybody": everybody, "one rank": ranks[1:], "torchrun": [torchrun]}
    for pid in receivers[to]:
        os.kill(pid, signal.SIGUSR1 if to == "the launcher" else signal.SIGTERM)
    assert launch.end() == 75, launch.said
    assert "OMP_NUM_THREADS=1" in launch.said
    assert "Traceback" not in launch.said
    wait_until_gone(everybody)


def test_ranks_whose_torchrun_was_killed_get_a_stop_request(start: Start) -> None:
    launch = start(AGREEING, "--nproc-per-node", "2")
    ranks = [int(line.split()[1]) for line in launch.wait_for("ready", times=2)]
    os.kill(living()[ranks[0]].parent, signal.SIGKILL)
    assert launch.end() == 0, launch.said
    assert "as told" in launch.said, "the reason that the ranks gave"
    wait_until_gone(ranks)


def test_a_second_interrupt_ends_every_rank_at_once(start: Start) -> None:
    launch = start(STUBBORN, "--nproc-per-node", "2")
    pids = launch.ready(times=2)
    for _ in range(2):
        launch.process.send_signal(signal.SIGINT)
        launch.wait_for("press Ctrl-C again to kill it")
    assert launch.end() == 130
    wait_until_gone(pids)


def test_nodes_leave_with_one_code_whichever_launcher_got_the_signal(start: Start, tmp_path: Path) -> None:
    port = str(free_port())

    def node(rank: int) -> Launch:
        where = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", port]
        return start(AGREEING.replace("# record", RECORDING), *where, "--run-dir", "r", "--stopped-exit-code", "75")

    nodes = [node(0), node(1)]
    for each in nodes:
        each.wait_for("ready")
    nodes[1].process.send_signal(signal.SIGTERM)
    assert [each.end() for each in nodes] == [75, 75], nodes[1].said
    assert "as recorded" in nodes[1].said.splitlines()[-1], "the reason in the records of the run"
