"""torchtitan's own ``CheckpointManager`` as a run: killed, stopped or damaged, it ends in the same bits."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

import unbroken
from tests.frameworks.forking import Ended, Jobs, events, forking, resumed_from
from tests.frameworks.test_dcp import drilled, flip
from unbroken.records.drill import Fault

KILL, TERM = int(signal.SIGKILL), int(signal.SIGTERM)
MODES = ("disabled", "async")
PARTS = ("dataloader", "model_parts", "optimizers", "lr_schedulers", "states", "sd_adapter")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with forking(tmp_path_factory.mktemp("jobs"), "tests.frameworks.titan_trainings") as started:
        yield started


def result(ended: Ended) -> dict[str, Any]:
    assert ended.result is not None, ended.said
    return ended.result


@pytest.mark.promise("C7", "C13")
@pytest.mark.parametrize("mode", MODES)
def test_stopped_by_a_signal_it_saves_and_the_same_command_continues(jobs: Jobs, tmp_path: Path, mode: str) -> None:
    world: dict[str, Any] = {"ranks": 2, "mode": mode}
    # Torchtitan alone ends at once, and the steps since the last save are lost.
    assert jobs.run(tmp_path / "plain", plain=True, signals={"SIGTERM": 6}, **world).code == -TERM
    whole = jobs.run(tmp_path / "plain", plain=True, **world)
    assert result(whole)["first"] == 4 or mode == "async"

    run = tmp_path / "run"
    stopped = jobs.run(run, signals={"SIGTERM": 6}, **world)
    # Each rank gets its signal before it votes at step 6; the vote is read at step 7.
    assert stopped.code == 0 and result(stopped)["is_stopping"] and result(stopped)["step"] == 7, stopped.said
    assert [each.name for each in unbroken.checkpoints(run)] == ["step-7", "step-4"]
    assert [event.text("status") for event in events(run, "job-end")] == ["stopped"]
    resumed = jobs.run(run, **world)
    assert resumed_from(run) == [0, 7] and resumed.digest == whole.digest, resumed.said
    assert result(resumed)["counters"] == [12, 12, 12]
    assert events(run, "job-end")[-1].text("status") == "completed"
    # Once more: it is done, and not one step is computed.
    again = jobs.run(run, **world)
    assert result(again)["first"] == 12 and again.digest == whole.digest, again.said


@pytest.mark.promise("C7", "C13", "X6")
@pytest.mark.parametrize("mode", MODES)
def test_killed_inside_the_write_it_resumes_from_the_checkpoint_before(jobs: Jobs, tmp_path: Path, mode: str) -> None:
    world: dict[str, Any] = {"ranks": 2, "mode": mode}
    whole = jobs.run(tmp_path / "whole", plain=True, **world)
    run = tmp_path / "run"
    assert jobs.run(run, drilled(tmp_path, run, Fault("manifest", "kill", when=2)), **world).result is None
    assert [each.name for each in unbroken.checkpoints(run)] == ["step-4"]
    resumed = jobs.run(run, **world)
    assert result(resumed)["first"] == 4 and resumed.digest == whole.digest, resumed.said
    # `keep_latest_k` is carried out by the run, after each commit.
    assert [each.name for each in unbroken.checkpoints(run)] == ["step-12", "step-8"]


@pytest.mark.promise("C7", "C4")
def test_a_damaged_newest_is_skipped_and_a_lost_directory_comes_from_the_mirror(jobs: Jobs, tmp_path: Path) -> None:
    run, config = tmp_path / "run", {"mirror": f"file://{tmp_path / 'mirror'}"}
    whole = jobs.run(tmp_path / "plain", plain=True, ranks=2)
    # Torchtitan alone loads the changed byte.
    flip(tmp_path / "plain" / "step-12" / "__1_0.distcp")
    assert result(jobs.run(tmp_path / "plain", plain=True, ranks=2))["first"] == 12
    assert jobs.run(run, ranks=2).digest == whole.digest
    flip(run / "step-12" / "__1_0.distcp")
    again = jobs.run(run, ranks=2, config=config)
    assert [event.text("name") for event in events(run, "checkpoint-skipped")] == ["step-12"]
    assert result(again)["first"] == 8 and again.digest == whole.digest, again.said
    run.rename(tmp_path / "lost")
    fetched = jobs.run(run, ranks=2, config=config)
    assert result(fetched)["first"] == 12 and fetched.digest == whole.digest, fetched.said


@pytest.mark.promise("C7")
def test_a_seed_checkpoint_and_a_request_for_an_older_step(jobs: Jobs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert jobs.run(run, ranks=2, is_seed=True).result is not None
    assert [each.name for each in unbroken.checkpoints(run)] == ["step-0"]
    first = jobs.run(run, ranks=2, config={"keep_latest_k": 0})
    assert result(first)["first"] == 0 and first.digest == jobs.run(tmp_path / "whole", plain=True, ranks=2).digest
    assert [each.step for each in unbroken.checkpoints(run)] == [12, 8, 4, 0]
    back: dict[str, Any] = {"config": {"load_step": 4, "keep_latest_k": 0}}
    assert jobs.run(run, ranks=2, signals={"SIGKILL": 10}, **back).result is None
    # Once: the same command continues from the newest.
    resumed = jobs.run(run, ranks=2, **back)
    assert resumed_from(run)[-2:] == [4, 8] and resumed.digest == first.digest, resumed.said


@pytest.mark.promise("C7")
def test_an_error_is_recorded_and_disabled_it_is_torchtitans_own(jobs: Jobs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert jobs.run(run, ranks=2, raises=6).code == 1
    (end,) = events(run, "job-end")
    assert (end.text("status"), end.text("reason")) == ("error", "ValueError: the loss is odd")
    for config in ({"enable": False}, {"load_only": True}):
        alone = jobs.run(tmp_path / "alone", ranks=2, config=config)
        assert result(alone)["step"] == 12, alone.said
        # And a signal ends it, as it ends torchtitan.
        assert jobs.run(tmp_path / "alone", ranks=2, config=config, signals={"SIGTERM": 3}).code == -TERM
    assert not (tmp_path / "alone").exists()


@pytest.mark.promise("C7")
@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"async_mode": "async_with_pinned_mem"}, "async_with_pinned_mem"),
        ({"last_save_model_only": True}, "last_save_model_only"),
        ({"folder": "gs://bucket/a"}, "mirror='gs://bucket/a'"),
    ],
)
def test_what_does_not_go_with_a_run_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    from torchtitan.components.checkpointer import AsyncMode

    from unbroken.frameworks.torchtitan import CheckpointManager

    make: Any = CheckpointManager.Config
    with pytest.raises(ValueError, match=named):
        CheckpointManager(make(**{"enable": True, "folder": "a", **config}))
    disabled = CheckpointManager(make(folder="a"), **dict.fromkeys(PARTS))
    with pytest.raises(ValueError, match="to_hf"):
        disabled.dcp_save({}, "a/step-1", AsyncMode.DISABLED, to_hf=True)
