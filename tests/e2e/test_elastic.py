"""Two agents of torchrun that meet at an endpoint: one is killed, the other continues alone, and no bit is another."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.launching import TOOL, wait_until_gone
from tests.exact.gpt_world import tokenize_text, write_text
from tests.patience import PATIENCE_S
from tests.ports import free_port
from unbroken.launch.processes import below, living
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.store.directory import Store

SMALL = (
    *("model.n_layer=1", "model.n_embd=32", "model.n_head=2", "training.eval_steps=null", "training.max_steps=80"),
    *("optimizer.warmup_steps=2", "training.save_steps=10", "training.logging_steps=10", "data.epochs=null"),
    *("training.global_batch_size=6", "training.per_device_batch_size=2"),
)
# A lost node is noticed after three intervals; a busy one must not be taken for lost, nor a slow one be left behind.
QUICK = "last_call_timeout=30,keep_alive_interval=5"


class Node:
    """One launcher, whose output goes to a file."""

    def __init__(self, folder: Path, name: str, *options: str) -> None:
        self.output = folder / f"{name}.txt"
        with self.output.open("w") as sink:
            self.process = subprocess.Popen(
                [*TOOL, "train", "run.yaml", *SMALL, *options],
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
            )

    def said(self) -> str:
        return self.output.read_text()

    def family(self) -> list[int]:
        return [self.process.pid, *below(self.process.pid, living())]

    def agent(self) -> int:
        return next(each.pid for each in living().values() if each.parent == self.process.pid)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config and data, and the run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("elastic")
    tokenize_text(write_text(folder / "text"), folder / "data")
    subprocess.run([*TOOL, "init", "--preset", "tiny", "-o", "run.yaml", "--quiet"], cwd=folder, check=True)
    whole = Node(folder, "whole", "training.output_dir=whole")
    assert whole.process.wait(PATIENCE_S) == 0, whole.said()
    return folder


@contextlib.contextmanager
def nodes_of(folder: Path, run: Path, *options: str) -> Iterator[tuple[Node, Node]]:
    """Two nodes that meet; the first one keeps the store in which they do."""
    meeting = ("--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", f"training.output_dir={run}", *options)
    nodes = (
        Node(folder, f"{run.name}-first", *meeting, "--rdzv-conf", f"{QUICK},is_host=1"),
        Node(folder, f"{run.name}-second", *meeting, "--rdzv-conf", f"{QUICK},is_host=0"),
    )
    try:
        yield nodes
    finally:
        for node in nodes:
            kill(node.family() if node.process.poll() is None else [])
            node.process.wait()


def wait_until(is_so: Callable[[], bool], node: Node) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until and node.process.poll() is None, node.said()
        time.sleep(0.05)


def worlds(run: Path) -> list[int | None]:
    """How many ranks each job had."""
    return [fact.whole("world_size") for fact in read_history(Layout(run)).of_kind("job-start")]


def has_committed(run: Path, *, ranks: int) -> bool:
    """Whether a job of so many ranks has committed anything."""
    history = read_history(Layout(run))
    started = history.of_kind("job-start")
    is_theirs = bool(started) and started[-1].whole("world_size") == ranks
    return is_theirs and history.last("commit", job=started[-1].job) is not None


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def fingerprint(run: Path) -> object:
    return Store(Layout(run).checkpoints).read_manifest("final").fingerprint


@pytest.mark.parametrize("victim", ["node", "agent"])
def test_a_node_is_killed_and_the_other_one_resumes_with_fewer_ranks_to_the_same_bits(
    folder: Path, victim: str
) -> None:
    run = folder / victim
    with nodes_of(folder, run, "--max-restarts", "3") as (first, second):
        wait_until(lambda: has_committed(run, ranks=2), first)
        left = second.family()
        kill(left if victim == "node" else [second.agent()])
        # The launcher of a killed agent finds the signal, or what the run has told meanwhile of its lost peer.
        ends = (-9,) if victim == "node" else (128 + 9, 1)
        assert second.process.wait(PATIENCE_S) in ends, second.said()
        assert first.process.wait(PATIENCE_S) == 0, first.said()
        wait_until_gone(left)
    if victim == "agent":
        assert "leftover" in second.said()
    assert worlds(run)[-2:] == [2, 1], "one job of two ranks, then one of one"
    assert (read_history(Layout(run)).of_kind("resume")[-1].whole("step") or 0) > 0
    assert fingerprint(run) == fingerprint(folder / "whole")
