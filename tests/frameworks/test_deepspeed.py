"""DeepSpeed engines as runs, in every ZeRO stage: killed or stopped, they end in the same bits."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("tensorboard")

import unbroken
from tests.frameworks.forking import Ended, Jobs, events, forking, resumed_from
from tests.trackers.readers import tensorboard_points
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import read_metrics

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
KILL = int(signal.SIGKILL)
CONVERTERS = {"get": True, "convert": True, "load": True, "script": True, "16bit": True}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with forking(tmp_path_factory.mktemp("jobs"), "tests.frameworks.deepspeed_trainings") as started:
        yield started


def result(ended: Ended) -> dict[str, object]:
    assert ended.result is not None, ended.said
    return ended.result


@pytest.mark.promise("C8")
def test_killed_inside_the_engines_own_write_it_resumes_to_the_same_bits(jobs: Jobs, tmp_path: Path) -> None:
    whole = jobs.run(tmp_path / "whole", plain=True, stage=3, ranks=2, steps=6)
    run = tmp_path / "run"
    assert jobs.run(run, stage=3, ranks=2, steps=6, torn=4).code == -KILL
    resumed = jobs.run(run, stage=3, ranks=2, steps=6, convert=True)
    assert resumed_from(run)[-1] == 2, resumed.said
    assert result(resumed)["client_state"] == 2
    assert resumed.digest == whole.digest, resumed.said
    assert result(resumed)["converted"] == CONVERTERS
    assert [each.step for each in unbroken.checkpoints(run)] == [6, 4, 2]
    assert not list(run.glob(".tmp-*"))


@pytest.mark.promise("C8", "X6")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stopped_and_killed_it_resumes_exactly_and_every_converter_gives_the_live_weights(
    jobs: Jobs, tmp_path: Path, stage: int
) -> None:
    whole = jobs.run(tmp_path / "whole", plain=True, stage=stage, ranks=2)
    run = tmp_path / "run"
    shown = {"trackers": "tensorboard", "tracker_mode": "committed", "tracker_run_name": "mine"}
    # Each rank gets its signal before it votes at step 3; the vote is read at step 4.
    stopped = jobs.run(run, stage=stage, ranks=2, stop=3, options=shown)
    assert stopped.code == 0 and result(stopped)["step"] == 4, stopped.said
    refused = jobs.run(run, stage=stage % 3 + 1, ranks=2)
    assert refused.code == 1 and f"zero_stage: {stage} before, {stage % 3 + 1} now" in refused.said
    refused = jobs.run(run, ALONE, stage=stage)
    assert refused.code == 1 and "world_size: 2 before, 1 now" in refused.said
    assert jobs.run(run, stage=stage, ranks=2, torn=6, options=shown).code == -KILL
    resumed = jobs.run(run, stage=stage, ranks=2, convert=True, options=shown)
    assert result(resumed)["first"] == 4 and resumed.digest == whole.digest, resumed.said
    assert result(resumed)["converted"] == CONVERTERS
    ((name, points),) = tensorboard_points(run).items()
    assert name.startswith("mine-") and [step for step, _ in points] == [*range(1, 9)]


@pytest.mark.promise("C8")
@pytest.mark.parametrize("stage", [1, 3])
def test_in_bf16_it_resumes_exactly_and_every_converter_gives_the_live_weights(
    jobs: Jobs, tmp_path: Path, stage: int
) -> None:
    job: dict[str, Any] = {"stage": stage, "bf16": True, "steps": 6}
    whole = jobs.run(tmp_path / "whole", ALONE, plain=True, **job)
    run = tmp_path / "run"
    assert jobs.run(run, ALONE, torn=4, **job).code == -KILL
    resumed = jobs.run(run, ALONE, convert=True, **job)
    assert resumed_from(run)[-1] == 2 and resumed.digest == whole.digest, resumed.said
    assert result(resumed)["converted"] == CONVERTERS


@pytest.mark.promise("C8")
def test_by_its_own_means_a_resumed_engine_draws_other_numbers(jobs: Jobs, tmp_path: Path) -> None:
    whole = jobs.run(tmp_path / "whole", plain=True, stage=1, ranks=2, steps=4)
    assert jobs.run(tmp_path / "plain", plain=True, stage=1, ranks=2, steps=2).code == 0
    again = jobs.run(tmp_path / "plain", plain=True, stage=1, ranks=2, steps=4)
    assert result(again)["first"] == 2 and again.digest != whole.digest


@pytest.mark.promise("C8")
def test_a_torn_newest_ends_deepspeed_alone_and_is_skipped_and_the_best_is_kept(jobs: Jobs, tmp_path: Path) -> None:
    assert jobs.run(tmp_path / "plain", ALONE, plain=True, stage=1, steps=4).code == 0
    # The file `latest` names a folder, and nobody has looked into it.
    assert (tmp_path / "plain" / "latest").read_text() == "global_step4"
    _truncate_states(tmp_path / "plain" / "global_step4")
    assert jobs.run(tmp_path / "plain", ALONE, plain=True, stage=1).code == 1
    run, options = tmp_path / "run", {"keep_last_k": 1, "keep_best": "loss:max"}
    jobs.run(run, ALONE, stage=1, steps=6, options=options)
    losses = dict(read_metrics(Layout(run)).series("loss"))
    best = max((2, 4, 6), key=lambda step: losses[step])
    kept = [each.step for each in unbroken.checkpoints(run)]
    assert kept == sorted({6, best}, reverse=True)
    jobs.run(run, ALONE, stage=1, steps=8)
    _truncate_states(run / "checkpoint-8")
    resumed = jobs.run(run, ALONE, stage=1)
    whole = jobs.run(tmp_path / "whole", ALONE, plain=True, stage=1)
    assert resumed_from(run)[-1] == 6 and resumed.digest == whole.digest, resumed.said


def _truncate_states(folder: Path) -> None:
    (states,) = folder.glob("*_optim_states.pt")
    os.truncate(states, states.stat().st_size // 2)


@pytest.mark.promise("C8")
def test_a_save_by_the_first_rank_alone_is_refused_and_does_not_hang(jobs: Jobs, tmp_path: Path) -> None:
    refused = jobs.run(tmp_path / "run", stage=2, ranks=2, alone=True, options={"rank_wait_seconds": 3.0})
    assert refused.code == 1 and "NotAllRanks" in refused.said and "rank 1" in refused.said, refused.said
    assert [event.text("status") for event in events(tmp_path / "run", "job-end")] == ["error"]
    assert not unbroken.checkpoints(tmp_path / "run")


@pytest.mark.promise("C8")
def test_an_exit_code_after_a_stop_and_random_numbers_before_the_first_step_are_noticed(
    jobs: Jobs, tmp_path: Path
) -> None:
    def statuses() -> list[object]:
        return [event.values["status"] for event in read_history(Layout(tmp_path)).of_kind("job-end")]

    jobs.run(tmp_path, ALONE, stage=1, stop=3, exit_code=75)
    assert unbroken.checkpoints(tmp_path)[0].step == 3 and statuses() == ["stopped"]
    jobs.run(tmp_path, ALONE, stage=1, stop=5, exit_code=75)
    assert not read_history(Layout(tmp_path)).of_kind("data")
    jobs.run(tmp_path, ALONE, stage=1, draws=True)
    (drawn,) = read_history(Layout(tmp_path)).of_kind("data")
    assert drawn.values["notices"] == ["draws from the global RNG before the first step"]
    assert statuses() == ["stopped", "stopped", "completed"]
