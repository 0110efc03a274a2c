"""A stop signal to any set of processes ends in one shutdown checkpoint, also where loader workers get it too."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.distributed.worker_world import Scene, train
from tests.patience import PATIENCE_S
from unbroken.launch.processes import below, living
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.outcome import Outcome, read_outcome
from unbroken.store.names import SHUTDOWN
from unbroken.testing.worlds import Ended, Ranks, logs, start

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


def outcome_of(run: Path) -> Outcome:
    found = read_outcome(Layout(run), now_s=time.time())
    assert found is not None
    return found


def until_ready(ranks: Ranks, run: Path, size: int) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not all(Path(f"{run}.ready-{rank}").exists() for rank in range(size)):
        assert time.monotonic() < until_s and not ranks.is_over(), logs(ranks.wait(1))
        time.sleep(0.01)


def stopped(scene: Scene, size: int, receivers: str, number: signal.Signals) -> list[Ended]:
    """Train until it is under way, send a signal, wait for the end."""
    with start(size, train, scene) as ranks:
        until_ready(ranks, Path(scene.directory), size)
        for pid in ranks.pids[:1] if receivers == "one rank" else ranks.pids:
            if receivers == "groups":
                os.killpg(pid, number)
            elif receivers == "workers last":
                victims = below(pid, living())
                os.kill(pid, number)
                for each in victims:
                    os.kill(each, number)
            else:
                os.kill(pid, number)
        return ranks.wait()


def require_one_checkpoint(run: Path, ended: list[Ended]) -> int:
    assert all(each.is_good for each in ended), logs(ended)
    assert all(each.value["stopped"] and each.value["left"] == 0 for each in ended), logs(ended)
    found = outcome_of(run)
    assert (found.status, found.verdict, found.exit_code) == ("stopped", "again", 0)
    saves = read_history(Layout(run)).of_kind("save")
    assert [each.text("save_kind") for each in saves] == [SHUTDOWN]
    [step] = {each.value["step"] for each in ended}
    assert [path.name for path in (run / "checkpoints").glob("checkpoint-*")] == [f"checkpoint-{step}-shutdown"]
    return int(step)


def trained(scene: Scene, size: int) -> list[list[float]]:
    with start(size, train, scene) as ranks:
        ended = ranks.wait()
    assert all(each.is_good for each in ended), logs(ended)
    return [each.value["weights"] for each in ended]


SETS = [
    pytest.param(1, "groups", TERM, Scene("", is_persistent=True), id="group of one, persistent"),
    pytest.param(1, "groups", INT, Scene(""), id="group of one, interrupted"),
    pytest.param(1, "groups", USR1, Scene("", context="spawn"), id="group of one, spawned"),
    pytest.param(1, "groups", TERM, Scene("", context="forkserver"), id="group of one, fork server"),
    pytest.param(1, "groups", TERM, Scene("", is_persistent=True, is_early=True), id="workers older than the run"),
    pytest.param(2, "one rank", USR1, Scene(""), id="one of two ranks"),
    pytest.param(2, "ranks", INT, Scene(""), id="both ranks"),
    pytest.param(2, "groups", TERM, Scene("", is_persistent=True), id="both groups, persistent"),
    pytest.param(2, "workers last", TERM, Scene(""), id="both ranks, then their workers"),
]


@pytest.mark.promise("U4")
@pytest.mark.parametrize(("size", "receivers", "number", "scene"), SETS)
def test_a_stop_signal_ends_in_one_shutdown_checkpoint(
    tmp_path: Path, size: int, receivers: str, number: signal.Signals, scene: Scene
) -> None:
    run = tmp_path / "run"
    results = Scene(**{**vars(scene), "directory": str(run)})
    ended = stopped(results, size, receivers, number)
    require_one_checkpoint(run, ended)
    # None had to be replaced.
    assert not any("loader worker was killed" in each.log for each in ended), logs(ended)


@pytest.mark.promise("U4")
@pytest.mark.parametrize("size", [1, 2])
def test_workers_that_are_lost_in_a_stop_are_replaced_and_the_run_stays_exact(tmp_path: Path, size: int) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    with start(size, train, Scene(str(run), pause_s=0.0, hurt=int(TERM))) as ranks:
        step = require_one_checkpoint(run, ranks.wait())
    again = trained(Scene(str(run), total=step + 4, pause_s=0.0), size)
    assert again == trained(Scene(str(whole), total=step + 4, pause_s=0.0, draws_more=True), size)


@pytest.mark.promise("U4")
def test_lost_workers_of_a_loader_that_the_run_does_not_know_end_as_a_stop_without_a_save(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start(1, train, Scene(str(run), is_by_hand=True, hurt=int(TERM))) as ranks:
        [ended] = ranks.wait()
    found = outcome_of(run)
    assert (found.status, found.verdict) == ("stopped", "again"), ended.log
    assert "data=" in ended.log
    assert isinstance(ended.error, RuntimeError | OSError) and not list((run / "checkpoints").glob("checkpoint-*"))
