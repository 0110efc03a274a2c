"""Emergency saves in worlds of real processes: no rank waits for another, and a resume is exact or says why not."""

import shutil
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.run_data_world import Leg, serve
from tests.distributed.test_faults import good, history, steps_kept
from tests.distributed.training_world import Job, exact, train
from tests.patience import PATIENCE_S
from tests.torch_versions import torch_is_older
from tests.unit.data.streams import TWO_BUCKETS, make_corpus
from unbroken.errors import PeerLost
from unbroken.loop.emergency import Emergency
from unbroken.state import payload
from unbroken.state.stage import Staged
from unbroken.store.commit import PartWriter
from unbroken.store.dumps import read_pointers
from unbroken.testing.worlds import Ended, logs, spawn, start

ALL = (0, 1, 2)


def emergency(root: Path, **fields: Any) -> Job:  # noqa: ANN401 - whatever a job has
    """A job of a run whose window is too small for a save that was never measured."""
    settings: dict[str, Any] = {"save_steps": None, "grace_seconds": 30.0, "emergency_dir": str(root / "scratch")}
    return Job(str(root / "run"), **{**settings, **fields})


def dumps(root: Path, where: str = "scratch") -> list[tuple[int, int]]:
    """The rank and step of every dump that is whole."""
    found = (root / where).glob("*/rank-*/emergency_step_*/manifest.json")
    return sorted((int(path.parts[-3].removeprefix("rank-")), int(path.parts[-2].split("_")[2])) for path in found)


def skipped(root: Path) -> list[tuple[str, str]]:
    return [
        (fact.values["name"], fact.values["reason"]) for fact in history(root / "run").of_kind("checkpoint-skipped")
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Worlds of three that nobody stops."""
    root = tmp_path_factory.mktemp("whole")
    # FSDP2 of torch 2.6 does not run on a CPU.
    wraps = ("ddp", "plain") if torch_is_older(2, 7) else ("ddp", "fsdp", "plain")
    jobs = {wrap: Job(f"{root}/{wrap}", wrap=wrap, save_steps=None) for wrap in wraps}
    return {wrap: good(spawn(3, train, job)) for wrap, job in jobs.items()}


@pytest.mark.promise("M11")
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_signal_without_time_for_a_save_dumps_on_every_rank_and_the_next_job_resumes_exactly(
    tmp_path: Path, whole: dict[str, list[dict[str, Any]]], wrap: str
) -> None:
    results = good(spawn(3, train, emergency(tmp_path, wrap=wrap, victims=(1,), at_step=3, what="SIGTERM")))
    (step,) = {each["step"] for each in results}
    assert all(each["is_stopped"] for each in results)
    # Nothing was committed: that there is a checkpoint is found out by the next job.
    assert steps_kept(tmp_path / "run") == set()
    assert dumps(tmp_path) == [(rank, step) for rank in ALL]
    went_on = good(spawn(3, train, emergency(tmp_path, wrap=wrap)))
    assert Path(went_on[0]["resumed_from"]).name == f"checkpoint-{step}-shutdown"
    assert [exact(each) for each in went_on] == [exact(each) for each in whole[wrap]]
    facts = history(tmp_path / "run")
    assert [fact.values["step"] for fact in facts.of_kind("emergency-save")] == [step]
    assert [fact.values["step"] for fact in facts.of_kind("emergency-resume")] == [step]
    # After the last commit, and not before, they are of no use.
    assert dumps(tmp_path) == []
    assert read_pointers(tmp_path / "run") == []


def _leave_while_a_save_is_written(job: Job) -> dict[str, Any]:
    """The second rank never gets to the end of its part; the first leaves once that has broken its own save."""
    write, leave = payload.write, Emergency.leave

    def stuck(staged: Staged, draft: PartWriter, rank: int, *, files: int | None = None) -> payload.Written:
        time.sleep(600)
        return write(staged, draft, rank, files=files)

    def leave_last(path: Emergency, step: int, counters: Mapping[str, Any]) -> None:
        leave(path, step, counters)
        (saving,) = (each for each in threading.enumerate() if each.name == "unbroken-save")
        saving.join()

    if dist.get_rank() == 1:
        payload.write = stuck
    else:
        Emergency.leave = leave_last  # type: ignore[method-assign, assignment]
    return train(job)


def test_a_save_given_up_because_the_ranks_leave_is_no_failed_save(tmp_path: Path) -> None:
    job = emergency(tmp_path, wrap="plain", save_steps=2, victims=(0, 1), at_step=2, what="SIGTERM")
    ended = spawn(2, _leave_while_a_save_is_written, job)
    assert "gave up the save of step 2" in ended[0].log, logs(ended)
    facts = history(tmp_path / "run")
    assert [fact.values["step"] for fact in facts.of_kind("save")] == [2]
    assert facts.of_kind("save-failed") == [] == facts.of_kind("commit")
    assert [rank for rank, _ in dumps(tmp_path)] == [0, 1]


@pytest.mark.promise("M11")
def test_dumps_are_resharded_as_a_save_would_be(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"wrap": "fsdp", "has_data": False, "is_alike": True, "is_dropping": False}
    results = good(spawn(3, train, emergency(tmp_path, **shape, victims=ALL, at_step=3, what="SIGTERM")))
    step = results[0]["step"]
    ordinary = tmp_path / "ordinary"
    good(spawn(3, train, Job(str(ordinary / "run"), save_steps=None, total=step, **shape)))
    went_on = good(spawn(2, train, emergency(tmp_path, **shape)))
    compared = good(spawn(2, train, Job(str(ordinary / "run"), save_steps=None, **shape)))
    assert Path(went_on[0]["resumed_from"]).name == f"checkpoint-{step}-shutdown"
    assert [exact(each) for each in went_on] == [exact(each) for each in compared]


@pytest.mark.promise("M11")
def test_ranks_that_dumped_and_then_died_leave_a_checkpoint(
    tmp_path: Path, whole: dict[str, list[dict[str, Any]]]
) -> None:
    """Each asks by itself at the same step; then one after the other is killed, and none could ask the others."""
    with start(3, train, emergency(tmp_path, wrap="plain", total=10_000, victims=ALL, at_step=4, what="dump")) as ranks:
        until = time.monotonic() + PATIENCE_S
        while dumps(tmp_path) != [(rank, 5) for rank in ALL]:
            assert time.monotonic() < until
            time.sleep(0.02)
        ranks.send(signal.SIGKILL)
        ranks.wait()
    went_on = good(spawn(3, train, emergency(tmp_path, wrap="plain")))
    assert Path(went_on[0]["resumed_from"]).name == "checkpoint-5-shutdown"
    assert [exact(each) for each in went_on] == [exact(each) for each in whole["plain"]]


@pytest.mark.promise("M11")
def test_a_dead_rank_keeps_no_other_from_dumping_and_without_its_dump_there_is_no_checkpoint(tmp_path: Path) -> None:
    job = emergency(tmp_path, wrap="plain", save_steps=2, victims=(1,), at_step=5, what="kill-saved")
    ended = spawn(3, train, job)
    assert ended[1].exit_code == -signal.SIGKILL
    assert all(isinstance(ended[rank].error, PeerLost) for rank in (0, 2)), logs(ended)
    found = dumps(tmp_path)
    assert {rank for rank, _ in found} == {0, 2}
    went_on = good(spawn(3, train, emergency(tmp_path, wrap="plain", save_steps=2)))
    assert Path(went_on[0]["resumed_from"]).name == "checkpoint-4"
    reasons = dict(skipped(tmp_path))
    assert reasons


@pytest.mark.promise("M11")
def test_a_rank_that_hangs_keeps_no_other_from_dumping_before_the_kill(tmp_path: Path) -> None:
    job = emergency(tmp_path, wrap="plain", grace_seconds=40.0, victims=(1,), at_step=3, what="hang")
    with start(3, train, job) as ranks:
        until = time.monotonic() + PATIENCE_S
        while not (tmp_path / "run/emergency/area.json").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        # The others come to the edge at which its answer is missing, and wait there.
        time.sleep(3)
        ranks.send(signal.SIGTERM, 0, 2)
        while {rank for rank, _ in dumps(tmp_path)} != {0, 2}:
            assert time.monotonic() < until
            time.sleep(0.02)
        ranks.send(signal.SIGKILL, 1)
        ended = ranks.wait()
    assert all(ended[rank].is_good and ended[rank].value["is_stopped"] for rank in (0, 2)), logs(ended)


def test_a_deadline_that_is_far_away_lets_no_rank_leave_while_it_waits_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNBROKEN_MAX_RUNTIME", "36000")
    # A window of which the deadline has already taken half: only a request to end would make that a hurry.
    job = emergency(tmp_path, wrap="plain", grace_seconds=80_000.0, victims=(1,), at_step=3, what="slow")
    results = good(spawn(2, train, job))
    assert [(each["step"], each["is_stopped"]) for each in results] == [(8, False)] * 2
    assert dumps(tmp_path) == []


@pytest.mark.promise("M12")
def test_on_another_host_dumps_are_refused_with_the_reason_unless_there_is_a_copy(
    tmp_path: Path, whole: dict[str, list[dict[str, Any]]]
) -> None:
    good(spawn(3, train, emergency(tmp_path, host="node-1/a", total=4)))
    killed_after_its_dumps(tmp_path, emergency(tmp_path, host="node-1/a", total=10_000))
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "run", kept / "run")
    shutil.copytree(tmp_path / "scratch", kept / "scratch")
    elsewhere = good(spawn(3, train, emergency(tmp_path, host="node-2/b")))
    assert Path(elsewhere[0]["resumed_from"]).name == "final"
    ((name, reason),) = skipped(tmp_path)
    assert name == "emergency_step_5"
    for part in ("node-1", "node-2", "persistent_dir"):
        assert part in reason
    # After a restart the host has another boot, and its disk the same dumps.
    again = good(spawn(3, train, emergency(kept, host="node-1/z")))
    assert Path(again[0]["resumed_from"]).name == "checkpoint-5-shutdown"
    assert [exact(each) for each in again] == [exact(each) for each in elsewhere] == [exact(e) for e in whole["ddp"]]


def killed_after_its_dumps(root: Path, job: Job) -> None:
    """Every rank dumps step 5 and is killed as soon as all have."""
    fields = {**vars(job), "victims": ALL, "at_step": 4, "what": "dump"}
    with start(3, train, Job(**fields)) as ranks:
        until = time.monotonic() + PATIENCE_S
        while dumps(root) != [(rank, 5) for rank in ALL] or len(_copies(root, job)) < 3:
            assert time.monotonic() < until
            time.sleep(0.02)
        ranks.send(signal.SIGKILL)
        ranks.wait()


def _copies(root: Path, job: Job) -> list[int]:
    """The ranks that say that their dump is copied; all where no copy is asked for."""
    return [each.rank for each in read_pointers(root / "run") if each.copy is not None or job.persistent_dir is None]


@pytest.mark.promise("M12", "C4")
def test_with_the_local_scratch_wiped_another_host_resumes_from_the_persistent_copy(
    tmp_path: Path, whole: dict[str, list[dict[str, Any]]]
) -> None:
    shared = str(tmp_path / "shared")
    killed_after_its_dumps(tmp_path, emergency(tmp_path, host="node-1/a", persistent_dir=shared, total=10_000))
    shutil.rmtree(tmp_path / "scratch")
    went_on = good(spawn(3, train, emergency(tmp_path, host="node-2/b", persistent_dir=shared)))
    assert Path(went_on[0]["resumed_from"]).name == "checkpoint-5-shutdown"
    assert [exact(each) for each in went_on] == [exact(each) for each in whole["ddp"]]
    assert dumps(tmp_path, "shared") == []


def test_a_damaged_dump_is_skipped_and_its_copy_is_taken(tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    killed_after_its_dumps(tmp_path, emergency(tmp_path, persistent_dir=shared, total=10_000))
    for part in (tmp_path / "scratch").glob("*/rank-00000/*/state/__0_0.distcp"):
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
    taken = good(spawn(3, train, emergency(tmp_path, persistent_dir=shared)))
    assert Path(taken[0]["resumed_from"]).name == "checkpoint-5-shutdown"
    assert skipped(tmp_path) == []


def test_what_each_rank_has_served_is_in_the_account_after_a_dump_and_each_sample_comes_once(tmp_path: Path) -> None:
    run, data = tmp_path / "run", tmp_path / "data"
    make_corpus(data, TWO_BUCKETS)
    settings = {"emergency_dir": str(tmp_path / "scratch"), "grace_seconds": 30.0, "save_steps": None}
    more: dict[str, Any] = {"stream": {"epochs": None}, "settings": settings}
    # Three ranks share four lanes unevenly.
    first = spawn(3, serve, Leg(str(run), str(data), global_batch=8, signal_at=3, **more))
    rest = spawn(2, serve, Leg(str(run), str(data), global_batch=8, total=8, **more))
    seen = sorted(batch for each in (*first, *rest) for batch in good_value(each))
    assert [begin + offset for _, begin, _ in seen for offset in range(2)] == list(range(8 * 8))
    (resumed,) = history(run).of_kind("emergency-resume")
    assert 3 <= resumed.values["step"] < 8
    (commit,) = history(run).of_kind("commit")
    assert commit.values["data"]["agrees"] is True
    assert commit.values["data"]["samples"] == 8 * 8


def good_value(ended: Ended) -> list[tuple[int, int, list[int]]]:
    assert ended.is_good, ended.log
    found: list[tuple[int, int, list[int]]] = ended.value
    return found


def test_a_model_that_needs_the_other_ranks_to_say_its_state_is_refused_by_name_and_training_continues(
    tmp_path: Path,
) -> None:
    good(spawn(2, train, emergency(tmp_path, wrap="fsdp1", victims=(0, 1), at_step=3, what="dump", has_norm=False)))
    (refused,) = history(tmp_path / "run").of_kind("emergency-failed")
    assert refused.values["error"] == "needs-peers"
    assert "'model' is a FullyShardedDataParallel" in refused.values["reason"]
    assert dumps(tmp_path) == []
    assert steps_kept(tmp_path / "run") == {8}
