"""Loops that call ``dcp.save`` and ``dcp.load``: killed or stopped at any instant, they end in the same bits."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import unbroken
from tests.frameworks.forking import Ended, Jobs, events, forking, resumed_from
from unbroken.records.drill import ENVIRONMENT, Drill, Fault, write_drill
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout

KILL = int(signal.SIGKILL)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with forking(tmp_path_factory.mktemp("jobs"), "tests.frameworks.dcp_trainings") as started:
        yield started


def drilled(tmp_path: Path, run: Path, *faults: Fault) -> dict[str, str]:
    path = tmp_path / f"drill-{len(list(tmp_path.iterdir()))}.json"
    write_drill(path, Drill(directory=run, faults=faults))
    return {ENVIRONMENT: str(path)}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def result(ended: Ended) -> dict[str, object]:
    assert ended.result is not None, ended.said
    return ended.result


@pytest.mark.promise("C7", "X6")
def test_killed_inside_the_write_it_resumes_from_the_checkpoint_before(jobs: Jobs, tmp_path: Path) -> None:
    whole = jobs.run(tmp_path / "whole", plain=True, ranks=2)
    # By torch's own means the torn folder is the newest, and the loop fails on it from then on.
    assert jobs.run(tmp_path / "plain", plain=True, ranks=2, torn=8).code == -KILL
    assert (tmp_path / "plain" / "step-8").is_dir()
    assert jobs.run(tmp_path / "plain", plain=True, ranks=2).result is None

    run = tmp_path / "run"
    killed = jobs.run(run, drilled(tmp_path, run, Fault("parts", "kill", when=2)), ranks=2)
    assert killed.code == -KILL, killed.said
    assert [each.step for each in unbroken.checkpoints(run)] == [4]
    resumed = jobs.run(run, ranks=2)
    assert resumed_from(run)[-1] == 4, resumed.said
    assert resumed.digest == whole.digest, resumed.said
    assert [each.step for each in unbroken.checkpoints(run)] == [12, 8]
    assert not list(run.glob(".tmp-*"))


@pytest.mark.promise("C7", "X6")
def test_killed_at_every_phase_of_a_save_it_ends_in_the_same_bits(jobs: Jobs, tmp_path: Path) -> None:
    whole = jobs.run(tmp_path / "whole", plain=True, ranks=2, steps=20)
    run = tmp_path / "run"
    # Torch's coordinator is rank 0; rank 1 is killed inside its own part.
    for phase, rank in (("begin", 0), ("parts", 1), ("manifest", 0), ("rename", 0), ("committed", 0), ("sweep", 0)):
        killed = jobs.run(run, drilled(tmp_path, run, Fault(phase, "kill", rank=rank)), ranks=2, steps=20)
        assert killed.result is None, (phase, killed.said)
        assert rank or killed.code == -KILL, (phase, killed.said)
    resumed = jobs.run(run, ranks=2, steps=20)
    assert resumed.digest == whole.digest, resumed.said
    assert [each.step for each in unbroken.checkpoints(run)] == [20, 16]
    assert all(each.is_usable for each in unbroken.checkpoints(run))
    assert "mismatch" not in [event.kind for event in read_history(Layout(run)).events]


@pytest.mark.promise("C7", "X6")
def test_stopped_it_is_resumed_with_other_numbers_of_ranks_from_the_same_state(jobs: Jobs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Each rank gets its signal before it votes at step 5; the vote is read at step 6.
    stopped = jobs.run(run, ranks=2, signals={"SIGTERM": 5}, in_background=True)
    assert stopped.code == 0, stopped.said
    assert result(stopped)["is_stopping"] and result(stopped)["step"] == 6
    wider = jobs.run(run, ranks=4, steps=10, signals={"SIGTERM": 8})
    assert result(wider)["began"] == stopped.digest and result(wider)["first"] == 6
    alone = jobs.run(run, steps=12)
    assert result(alone)["began"] == wider.digest and result(alone)["step"] == 12
    # Stopped and resumed with the same number of ranks, the bits are those of one job.
    same = jobs.run(tmp_path / "same", ranks=2, signals={"SIGTERM": 5})
    assert result(same)["is_stopping"]
    assert jobs.run(tmp_path / "same", ranks=2).digest == jobs.run(tmp_path / "whole", plain=True, ranks=2).digest


@pytest.mark.promise("C4", "X6")
def test_a_damaged_newest_is_skipped_and_a_lost_directory_comes_from_the_mirror(jobs: Jobs, tmp_path: Path) -> None:
    run, options = tmp_path / "run", {"mirror": f"file://{tmp_path / 'mirror'}"}
    first = jobs.run(run, steps=8)
    flip(run / "checkpoint-8" / "__0_0.distcp")
    resumed = jobs.run(run, steps=8, options=options)
    assert [event.text("name") for event in events(run, "checkpoint-skipped")] == ["checkpoint-8"]
    assert result(resumed)["first"] == 4 and resumed.digest == first.digest
    shutil.rmtree(run)
    again = jobs.run(run, steps=8, options=options)
    assert result(again)["began"] == first.digest and result(again)["first"] == 8, again.said
