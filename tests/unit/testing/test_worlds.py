"""Worlds of real processes: they speak to each other, tell what they found, can be killed, and never outlive a test."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from unbroken.errors import NotShared
from unbroken.testing.worlds import Ended, logs, spawn, start


def gather() -> list[int]:
    import torch.distributed as dist

    said: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, dist.get_rank() * 10)
    return [each or 0 for each in said]


def fail_on_one(rank: int) -> str:
    import torch.distributed as dist

    print("rank", dist.get_rank(), "was here")
    if dist.get_rank() == rank:
        raise NotShared(path=Path("/runs/a"), rank=rank, host="h")
    return os.environ["GREETING"]


def wait_for_ever(place: str) -> None:
    import torch.distributed as dist

    (Path(place) / str(dist.get_rank())).touch()
    time.sleep(600)


def wait_with_a_process_of_its_own(place: str) -> None:
    # As a loader's worker under a fork server: its parent lives on when this rank is killed.
    child = subprocess.Popen(["sleep", "600"])
    (Path(place) / str(child.pid)).touch()
    time.sleep(600)


def make_what_cannot_travel() -> object:
    return lambda: None


def wait_until(place: Path, count: int) -> None:
    while len(list(place.iterdir())) < count:
        time.sleep(0.01)


def test_every_rank_hears_every_other() -> None:
    ended = spawn(3, gather)
    assert [each.value for each in ended] == [[0, 10, 20]] * 3, logs(ended)
    assert all(each.is_good for each in ended)


def test_an_error_of_one_rank_is_reported_with_its_fields_and_the_others_values_stand() -> None:
    ended = spawn(2, fail_on_one, 1, env={"GREETING": "hello"})
    assert ended[0].value == "hello" and ended[0].is_good
    assert isinstance(ended[1].error, NotShared) and ended[1].error.rank == 1
    assert ended[1].exit_code == 1
    assert "rank 1 was here" in ended[1].log and "NotShared" in logs(ended)


def test_a_rank_that_hangs_says_where_it_stands_and_is_killed(tmp_path: Path) -> None:
    with start(2, wait_for_ever, str(tmp_path)) as ranks:
        wait_until(tmp_path, 2)
        ended = ranks.wait(1)
    assert [each.is_late for each in ended] == [True, True]
    assert all("wait_for_ever" in each.log for each in ended), logs(ended)


def test_a_rank_can_be_killed_alone(tmp_path: Path) -> None:
    with start(2, wait_for_ever, str(tmp_path)) as ranks:
        wait_until(tmp_path, 2)
        ranks.send(signal.SIGKILL, 1)
        while not Path(f"/proc/{ranks.pids[0]}").exists():
            pytest.fail("the other one is gone")
        ranks.send(signal.SIGTERM, 0)
        ended = ranks.wait()
    assert [each.exit_code for each in ended] == [-signal.SIGTERM, -signal.SIGKILL]
    assert not any(each.is_late for each in ended)


def test_leaving_the_block_ends_every_rank(tmp_path: Path) -> None:
    with start(2, wait_for_ever, str(tmp_path)) as ranks:
        wait_until(tmp_path, 2)
        pids = ranks.pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_what_a_killed_rank_has_started_does_not_outlive_its_world(tmp_path: Path) -> None:
    with start(1, wait_with_a_process_of_its_own, str(tmp_path)) as ranks:
        wait_until(tmp_path, 1)
        (child,) = tmp_path.iterdir()
        ranks.send(signal.SIGKILL)
        ranks.wait()
    until_s = time.monotonic() + PATIENCE_S
    while (Path("/proc") / child.name).exists() and _state(child.name) != "Z":
        assert time.monotonic() < until_s, "it still runs"
        time.sleep(0.01)


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_what_cannot_travel_is_reported_as_text() -> None:
    (ended,) = spawn(1, make_what_cannot_travel)
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, RuntimeError) and "lambda" in str(ended.error)
