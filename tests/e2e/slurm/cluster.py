"""A real SLURM for the tests: brought up by ``up.sh``, asked by its own commands, taken down process by process."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.patience import PATIENCE_S
from tests.ports import free_port
from unbroken.launch.processes import below, living

UP = Path(__file__).with_name("up.sh")
SPEED = 10
ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def wait_for(what: str, holds: Callable[[], bool], results: Callable[[], str] = lambda: "") -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, f"waited in vain for {what}\n{results()}"
        time.sleep(0.1)


@dataclass
class Cluster:
    """Two nodes, ``n1`` and ``n2``, and the environment in which jobs are submitted."""

    directory: Path
    environ: dict[str, str]

    def call(self, *command: str | Path, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            list(map(str, command)), env=self.environ, cwd=cwd, capture_output=True, text=True, check=False
        )

    def said(self, *command: str | Path, cwd: Path | None = None) -> str:
        ended = self.call(*command, cwd=cwd)
        assert ended.returncode == 0, f"{command[0]} ended with {ended.returncode}: {ended.stdout}{ended.stderr}"
        return ended.stdout.strip()

    def tool(self, folder: Path, *arguments: str | Path) -> str:
        """What the tool says on its standard output, called in a folder."""
        return self.said(sys.executable, "-m", "unbroken", *arguments, cwd=folder)

    def facts(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` knows."""
        for _ in range(5):
            ended = self.call("scontrol", "--oneliner", "show", "job", job)
            if ended.returncode == 0:
                break
            # A busy controller lets a question fall now and then.
            time.sleep(1)
        assert ended.returncode == 0, f"scontrol exited with {ended.returncode}: {ended.stdout}{ended.stderr}"
        return dict(word.split("=", 1) for word in ended.stdout.split() if "=" in word)

    def state(self, job: str) -> str:
        return self.facts(job)["JobState"]

    def wait_for_end(self, job: str, results: Callable[[], str]) -> str:
        wait_for(f"the end of job {job}", lambda: self.state(job) in ENDED, results)
        return self.state(job)

    def fail_node(self, name: str) -> None:
        """Kill a node: its slurmd, and everything of its jobs that runs on it."""
        daemon = int((self.directory / "run" / f"slurmd-{name}.pid").read_text())
        os.kill(daemon, signal.SIGKILL)
        among = living()
        tasks = [pid for pid in among if _is_on(pid, name)]
        # A task knows its node by a variable; slurmstepd is known by its tasks.
        parents = {among[pid].parent for pid in tasks} - {1}
        for pid in {*parents, *tasks}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def repair_node(self, name: str) -> None:
        """Let ``up.sh`` start the node's slurmd again, and wait until SLURM takes it."""
        (self.directory / "again").write_text(name)
        wait_for(f"node {name}", lambda: self.said("sinfo", "-h", "-n", name, "-p", "main", "-o", "%t") == "idle")


def _is_on(pid: int, node: str) -> bool:
    try:
        return f"SLURMD_NODENAME={node}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:
        return False


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """Bring SLURM up below a directory; every process of it is gone afterwards."""
    environ = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    command = ["faketime", "-f", f"+0 x{SPEED}", UP, directory, str(free_port(3))]
    with (directory / "up.log").open("wb") as log:
        up = subprocess.Popen(list(map(str, command)), env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for("SLURM", lambda: (directory / "ready").exists() or up.poll() is not None)
        assert up.poll() is None, (directory / "up.log").read_text()
        yield Cluster(directory, {**environ, "SLURM_CONF": str(directory / "slurm.conf"), "OMP_NUM_THREADS": "1"})
    finally:
        _take_down(directory, up)


def _take_down(directory: Path, up: "subprocess.Popen[bytes]") -> None:
    # slurmctld first, so that nothing is started meanwhile; then the nodes with all that they run; munged last.
    for name in ("slurmctld", "slurmd-n1", "slurmd-n2", "munged"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((directory / "run" / f"{name}.pid").read_text()), signal.SIGKILL)
    for pid in living():
        with contextlib.suppress(OSError):
            if f"SLURM_CONF={directory}/slurm.conf\0".encode() in Path(f"/proc/{pid}/environ").read_bytes() + b"\0":
                os.kill(pid, signal.SIGKILL)
    for pid in [*below(up.pid, living()), up.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    up.wait()
