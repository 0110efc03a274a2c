"""What goes wrong on one rank is known to all at the same edge: no rank hangs, no rank continues alone."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.training_world import Job, exact, in_different_directories, train
from unbroken import errors
from unbroken.files import LOCAL, Files
from unbroken.records import stop
from unbroken.records.journal import History, read_history
from unbroken.records.layout import Layout
from unbroken.records.outcome import Outcome, read_outcome
from unbroken.records.stop import request_stop
from unbroken.state import destination
from unbroken.store import sweep
from unbroken.store.directory import Store
from unbroken.store.scan import scan
from unbroken.testing.worlds import Ended, logs, spawn, start


def good(ended: list[Ended]) -> list[dict[str, Any]]:
    assert all(each.is_good for each in ended), logs(ended)
    return [each.value for each in ended]


def history(run: Path) -> History:
    return read_history(Layout(run))


def outcome(run: Path) -> Outcome:
    found = read_outcome(Layout(run), now_s=time.time())
    assert found is not None
    return found


def steps_kept(run: Path) -> set[int]:
    store = Store(Layout(run).checkpoints)
    return {store.read_manifest(name).step for name in scan(store).committed}


def told_by(ended: list[Ended], kind: str, *, rank: int) -> None:
    """One rank raised its own error, all others were told whose it is."""
    assert not any(each.is_late for each in ended), logs(ended)
    for each in ended:
        error = each.error
        if each.rank == rank:
            assert isinstance(error, errors.UnbrokenError) and error.kind == kind, logs(ended)
        else:
            assert isinstance(error, errors.RankFailed), logs(ended)
            assert (error.rank, error.cause.kind) == (rank, kind)


# ---- stops ----


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Worlds of one and of three ranks that nobody stops."""
    root = tmp_path_factory.mktemp("whole")
    return {size: good(spawn(size, train, Job(f"{root}/{size}", save_steps=None, total=8))) for size in (1, 3)}


@pytest.mark.parametrize(
    ("size", "victims", "number"),
    [
        (1, (0,), "SIGTERM"),
        (3, (1,), "SIGTERM"),
        (3, (0,), "SIGINT"),
        (3, (2,), "SIGUSR1"),
        (3, (0, 1, 2), "SIGUSR2"),
    ],
)
def test_a_signal_to_any_rank_stops_all_at_the_same_step(
    tmp_path: Path, never_stopped: dict[int, list[dict[str, Any]]], size: int, victims: tuple[int, ...], number: str
) -> None:
    run = tmp_path / "run"
    job = Job(str(run), save_steps=None, total=40, victims=victims, at_step=3, what=number)
    results = good(spawn(size, train, job))
    steps = {each["step"] for each in results}
    assert len(steps) == 1 and steps <= {4, 5}
    assert all(each["is_stopped"] for each in results)
    (step,) = steps
    names = scan(Store(Layout(run).checkpoints)).committed
    assert list(names) == [f"checkpoint-{step}-shutdown"]
    assert (outcome(run).status, outcome(run).step) == ("stopped", step)
    assert number in outcome(run).reason
    went_on = good(spawn(size, train, Job(str(run), save_steps=None, total=8)))
    assert [exact(each) for each in went_on] == [exact(each) for each in never_stopped[size]]


def _count_reads_of_the_flag(job: Job) -> dict[str, Any]:
    reads: list[Layout] = []
    real = stop.read_request

    def counting(layout: Layout, files: Files = LOCAL) -> stop.StopRequest | None:
        reads.append(layout)
        return real(layout, files)

    stop.read_request = counting
    return {**train(job), "reads": len(reads)}


def test_the_flag_file_is_read_by_one_rank_and_stops_all_at_the_same_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start(3, _count_reads_of_the_flag, Job(str(run), save_steps=None, total=1_000_000, pause_s=0.01)) as ranks:
        while not any((Layout(run).metrics).glob("*.jsonl")):
            assert not ranks.is_over(), logs(ranks.wait())
            time.sleep(0.01)
        request_stop(Layout(run), job=1, by="a test", scratch=".scratch-stop")
        results = good(ranks.wait())
    assert len({each["step"] for each in results}) == 1 and results[0]["is_stopped"]
    assert list(scan(Store(Layout(run).checkpoints)).committed) == [f"checkpoint-{results[0]['step']}-shutdown"]
    assert not Layout(run).stop_request.exists()
    assert [stop.text("by") for stop in read_history(Layout(run)).of_kind("stop")] == ["flag"]
    assert results[0]["reads"] > 1 and [each["reads"] for each in results[1:]] == [0, 0]


# ---- saves that fail ----


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two ranks whose saves all succeed."""
    return good(spawn(2, train, Job(str(tmp_path_factory.mktemp("one") / "run"))))


@pytest.mark.parametrize(
    ("what", "victim", "at", "kind"),
    [
        ("full-disk", 1, 4, "storage-failed"),
        ("full-disk", 0, 4, "storage-failed"),
        ("surprise", 1, 4, "internal-error"),
        ("no room", 0, 2, "no-room"),
    ],
)
def test_a_save_that_one_rank_cannot_write_is_reported_and_training_continues(
    tmp_path: Path, undisturbed: list[dict[str, Any]], what: str, victim: int, at: int, kind: str
) -> None:
    run = tmp_path / "run"
    results = good(spawn(2, train, Job(str(run), victims=(victim,), at_step=at, what=what)))
    assert [exact(each) for each in results] == [exact(each) for each in undisturbed]
    failed = history(run).of_kind("save-failed")
    assert [fact.values["step"] for fact in failed] == [4]
    # The first rank writes the journal: it tells its own error, or whose it is.
    assert failed[0].values["error"] == (kind if victim == 0 else "rank-failed")
    assert [fact.values["step"] for fact in history(run).of_kind("commit")] == [2, 6, 8]
    assert steps_kept(run) == {2, 6, 8}
    assert not [name for name in (Layout(run).checkpoints).iterdir() if name.name.startswith(".tmp")]


def test_a_failed_save_does_not_move_the_hint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = Job(str(run), victims=(0, 1), at_step=4, what="full-disk", total=6)
    good(spawn(2, train, job))
    # The target is at a step whose save succeeded; before it, the hint stood on the last one that did.
    assert (Layout(run).checkpoints / "latest").readlink() == Path("final")
    assert steps_kept(run) == {2, 6}


def test_a_save_that_one_rank_asks_for_is_made_once_by_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    good(spawn(2, train, Job(str(run), save_steps=None, total=9, victims=(1,), at_step=3, what="ask for saves")))
    assert [fact.values["step"] for fact in history(run).of_kind("commit")] == [5, 9]


# ---- losses that are NaN ----


@pytest.mark.parametrize("logging_steps", [1, 100])
def test_a_loss_that_is_nan_on_one_rank_ends_all_at_one_edge(tmp_path: Path, logging_steps: int) -> None:
    run = tmp_path / "run"
    job = Job(str(run), victims=(1,), at_step=4, what="nan", logging_steps=logging_steps, total=12)
    ended = spawn(3, train, job)
    told_by(ended, "non-finite-loss", rank=1)
    assert (outcome(run).status, outcome(run).exit_code) == ("error", 8)
    assert steps_kept(run) <= {2, 4}


def test_an_error_of_one_ranks_own_in_a_step_ends_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = spawn(3, train, Job(str(run), victims=(1,), at_step=3, what="raise", total=40))
    assert not any(each.is_late or each.is_good for each in ended), logs(ended)
    assert isinstance(ended[1].error, ZeroDivisionError)
    assert (outcome(run).status, outcome(run).exit_code) == ("error", 1)
    assert steps_kept(run) == {2}


# ---- beginnings ----


@pytest.mark.promise("K7")
def test_ranks_that_see_different_directories_are_reported_by_name(tmp_path: Path) -> None:
    told_by(spawn(3, in_different_directories, str(tmp_path)), "not-shared", rank=2)


def test_a_second_world_is_refused_on_all_its_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start(2, train, Job(str(run), total=1_000_000, pause_s=0.02, save_steps=None)) as first:
        while not any((Layout(run).metrics).glob("*.jsonl")):
            assert not first.is_over(), logs(first.wait())
            time.sleep(0.01)
        told_by(spawn(2, train, Job(str(run))), "run-held", rank=0)
        assert not first.is_over()
        first.send(signal.SIGTERM)
        results = good(first.wait())
    assert results[0]["is_stopped"]


def test_what_one_rank_hands_over_and_cannot_be_saved_ends_all(tmp_path: Path) -> None:
    ended = spawn(2, train, Job(str(tmp_path / "run"), what="no item", odd_rank=1))
    told_by(ended, "not-an-item", rank=1)


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run of two ranks with checkpoints at steps 2 and 4."""
    run = tmp_path / "run"
    good(spawn(2, train, Job(str(run), total=4)))
    return run


def test_a_model_that_differs_on_one_rank_is_refused_by_all_and_nothing_is_quarantined(stopped: Path) -> None:
    ended = spawn(2, train, Job(str(stopped), what="other model", odd_rank=1))
    told_by(ended, "state-differs", rank=1)
    assert steps_kept(stopped) == {2, 4}
    assert (outcome(stopped).status, outcome(stopped).exit_code) == ("halted", 6)


def test_an_object_that_raises_its_own_error_on_one_rank_ends_all(stopped: Path) -> None:
    ended = spawn(2, train, Job(str(stopped), what="broken object", odd_rank=1))
    assert isinstance(ended[1].error, ZeroDivisionError), logs(ended)
    assert isinstance(ended[0].error, errors.RankFailed), logs(ended)
    assert "an error of the user's own" in str(ended[0].error)


def test_a_part_that_one_rank_needs_and_finds_damaged_is_quarantined_once_by_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = good(spawn(2, train, Job(str(tmp_path / "one"), wrap="fsdp", total=6)))
    good(spawn(2, train, Job(str(run), wrap="fsdp", total=4)))
    store = Store(Layout(run).checkpoints)
    # Only the second rank reads what it wrote: its shards have not moved.
    part = store.path("final") / "state/__1_0.distcp"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    results = good(spawn(2, train, Job(str(run), wrap="fsdp", total=6)))
    assert [each["resumed_from"] for each in results] == [str(store.path("checkpoint-2"))] * 2
    assert [exact(each) for each in results] == [exact(each) for each in whole]
    passed = history(run).of_kind("checkpoint-skipped")
    assert [fact.values["name"] for fact in passed] == ["final"]
    assert "state/__1_0.distcp" in passed[0].values["reason"]
    assert len([each for each in (store.path("quarantine")).iterdir() if each.is_dir()]) == 1


def test_a_record_of_one_rank_that_is_damaged_sets_the_checkpoint_aside_for_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    good(spawn(2, train, Job(str(run), total=4)))
    store = Store(Layout(run).checkpoints)
    record = store.path("final") / "ranks/rank-00001.json"
    record.write_text(json.dumps({"schema": "unbroken.rank-state/2", "rank": 1, "values": {}}))
    results = good(spawn(2, train, Job(str(run), total=6)))
    assert {each["resumed_from"] for each in results} == {str(store.path("checkpoint-2"))}


def test_a_run_that_another_job_has_taken_ends_on_all_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = spawn(3, train, Job(str(run), victims=(0,), at_step=3, what="lost", total=40, save_steps=None))
    told_by(ended, "lease-lost", rank=0)
    assert steps_kept(run) == set()


# ---- ranks that are lost ----


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_ranks_left_by_a_dead_one_report_it_and_the_same_command_resumes(tmp_path: Path, victim: int) -> None:
    run = tmp_path / "run"
    job = Job(str(run), wrap="plain", victims=(victim,), at_step=3, what="kill-saved", total=40)
    ended = spawn(3, train, job)
    assert ended[victim].exit_code == -signal.SIGKILL
    for each in (each for each in ended if each.rank != victim):
        assert not each.is_late and isinstance(each.error, errors.PeerLost), logs(ended)
        assert each.error.rank == each.rank
    assert steps_kept(run) == {2}
    if victim != 0:
        # The first rank tells it; where that one is dead, nobody does, and the job reads as crashed.
        assert (outcome(run).status, outcome(run).verdict) == ("error", "again")
    went_on = good(spawn(3, train, Job(str(run), wrap="plain", total=8)))
    whole = good(spawn(3, train, Job(str(tmp_path / "whole"), wrap="plain", total=8)))
    assert [exact(each) for each in went_on] == [exact(each) for each in whole]


def _lose_a_rank_after_the_commit(job: Job) -> object:
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    settle = sweep.settle

    def settle_and_kill(*args: object, **options: object) -> object:
        os.kill(pids[1], signal.SIGKILL)
        # The connection must be known to be closed before the commit is told.
        time.sleep(0.5)
        return settle(*args, **options)  # type: ignore[arg-type]

    if dist.get_rank() == 0:
        setattr(destination, "settle", settle_and_kill)  # noqa: B010 - the name in the module that calls it
    return train(job)


def test_a_save_whose_commit_a_dead_rank_never_heard_of_is_no_failed_save(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, _ = spawn(2, _lose_a_rank_after_the_commit, Job(str(run), wrap="plain", total=40))
    assert isinstance(first.error, errors.PeerLost), first.log
    assert steps_kept(run) == {2}
    assert [fact.values["step"] for fact in history(run).of_kind("commit")] == [2]
    assert history(run).of_kind("save-failed") == []


def test_what_only_one_rank_hands_over_is_refused_by_all_at_the_start(tmp_path: Path) -> None:
    ended = spawn(3, train, Job(str(tmp_path / "run"), what="one more", odd_rank=0))
    for each in ended:
        assert isinstance(each.error, errors.ItemsDiffer), logs(ended)
        assert [("extra" in names) for names in each.error.names] == [True, False, False]
    assert not (tmp_path / "run").exists()
