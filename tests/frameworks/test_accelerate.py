"""A loop with Accelerate as a run: killed or stopped at any instant, the identical job ends in the same bits."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import unbroken
from tests.frameworks.forking import ROOT, Jobs, forking, resumed_from

KILL = int(signal.SIGKILL)
TERM = int(signal.SIGTERM)
AUTOMATIC = {"automatic_checkpoint_naming": True, "total_limit": 2}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with forking(tmp_path_factory.mktemp("jobs"), "tests.frameworks.accelerate_trainings") as started:
        yield started


def at(step: int, number: int) -> list[dict[str, int]]:
    """A signal to every rank in the body of a step."""
    return [{"step": step, "number": number, "rank": -1}]


@pytest.mark.promise("C10", "X6")
def test_killed_inside_accelerates_own_write_it_resumes_to_the_same_bits(jobs: Jobs, tmp_path: Path) -> None:
    torn = {"name": "optimizer.bin", "step": 4}
    whole = jobs.run(tmp_path / "whole", plain=True)
    # By Accelerate alone the torn folder is the newest, and load_state takes it and fails.
    assert jobs.run(tmp_path / "plain", plain=True, project=AUTOMATIC, torn=torn).code == -KILL
    broken = jobs.run(tmp_path / "plain", plain=True, project=AUTOMATIC, resume=4)
    assert broken.code != 0 and broken.result is None

    run = tmp_path / "run"
    assert jobs.run(run, project=AUTOMATIC, torn=torn).code == -KILL
    assert [each.step for each in unbroken.checkpoints(run)] == [12, 8]
    # With other seeds: what is not restored would show.
    resumed = jobs.run(run, project=AUTOMATIC, seed=5)
    assert resumed.digest == whole.digest, resumed.said
    assert resumed_from(run)[-1] == 12
    # total_limit is carried out after each commit.
    assert [each.step for each in unbroken.checkpoints(run)] == [33, 32]
    assert not list(run.glob(".tmp-*"))


@pytest.mark.promise("C10")
def test_the_order_of_an_interrupted_epoch_is_the_one_it_began_with(jobs: Jobs, tmp_path: Path) -> None:
    whole = jobs.run(tmp_path / "whole", plain=True)
    # By load_state and skip_first_batches alone the second epoch is shuffled otherwise.
    plain: dict[str, Any] = {"plain": True, "project": {"automatic_checkpoint_naming": True}}
    assert jobs.run(tmp_path / "plain", interrupts=at(14, KILL), **plain).code == -KILL
    assert jobs.run(tmp_path / "plain", resume=3, **plain).digest != whole.digest
    run = tmp_path / "run"
    assert jobs.run(run, interrupts=at(14, KILL)).code == -KILL
    stopped = jobs.run(run, interrupts=at(22, TERM))
    # At the last batch of an epoch: what follows the batches is left to the next job.
    assert stopped.result is not None and stopped.result["is_stopped"] and stopped.result["evaluations"] == 0
    resumed = jobs.run(run, seed=5)
    assert resumed.digest == whole.digest, resumed.said
    assert resumed.result is not None and resumed.result["evaluations"] == 2
    # And no sample of the batches that were done is read again.
    assert whole.result is not None and resumed.result["reads"] < whole.result["reads"] / 2
    again = jobs.run(run)
    assert again.result is not None and again.result["step"] == 33 and again.result["evaluations"] == 0


LOADERS: dict[str, dict[str, Any]] = {
    "workers that draw": {"loader": {"num_workers": 2, "persistent_workers": True}, "noise": "global"},
    "a data set with a generator": {"noise": "own", "accumulation": 2},
    "a seedable sampler": {"loading": {"use_seedable_sampler": True}, "saves_epochs": True},
    "a stateful loader of a stream": {"loading": {"use_stateful_dataloader": True}, "is_stream": True},
    "a loss scaler and accumulation": {"scaler": True, "accumulation": 3},
}


@pytest.mark.promise("C10")
@pytest.mark.parametrize("name", LOADERS)
def test_stopped_in_several_epochs_it_ends_in_the_same_bits(jobs: Jobs, tmp_path: Path, name: str) -> None:
    case = LOADERS[name]
    whole = jobs.run(tmp_path / "whole", **case)
    assert whole.result is not None, whole.said
    total = whole.result["step"]
    # Inside the first epoch, at its end, and inside the last one.
    stops: list[tuple[int, dict[str, Any]]] = [(2, {}), (total // 3, {"seed": 5}), (total - 1, {"seed": 6})]
    for step, seeds in stops:
        stopped = jobs.run(tmp_path / "run", interrupts=at(step, TERM), **seeds, **case)
        assert stopped.result is not None and stopped.result["step"] == step, stopped.said
    resumed = jobs.run(tmp_path / "run", seed=9, **case)
    assert resumed.digest == whole.digest, resumed.said


WORLDS: dict[str, dict[str, Any]] = {
    "each reads its own": {},
    "the first reads for all": {"loading": {"dispatch_batches": True}},
    # The last batch of an epoch is filled up with samples of the first one.
    "the first reads for all, and too few": {"loading": {"dispatch_batches": True}, "samples": 41},
}


@pytest.mark.promise("C10")
@pytest.mark.parametrize("name", WORLDS)
def test_two_ranks_killed_and_stopped_end_in_the_same_bits(jobs: Jobs, tmp_path: Path, name: str) -> None:
    case = {"ranks": 2, **WORLDS[name]}
    run = tmp_path / "run"
    whole = jobs.run(tmp_path / "whole", plain=True, **case)
    assert jobs.run(run, interrupts=at(6, KILL), **case).code == -KILL
    # The vote of step 8 is read at step 9, in the second epoch.
    stopped = jobs.run(run, interrupts=at(8, TERM), **case)
    assert stopped.result is not None and stopped.result["step"] == 9, stopped.said
    refused = jobs.run(run, **WORLDS[name])
    assert refused.code == 1 and "num_processes:" in refused.said
    resumed = jobs.run(run, **case)
    assert resumed.digest == whole.digest, resumed.said
    assert {each.name for each in (run / "checkpoint-9").glob("unbroken_rng_*")} == {
        "unbroken_rng_0.pt",
        "unbroken_rng_1.pt",
    }


def launched(directory: Path, interrupts: list[dict[str, int]], name: str) -> tuple[int, dict[str, Any]]:
    """A job started as users start one: ``accelerate launch``, with two processes."""
    result = directory.parent / f"{name}.json"
    job = {"directory": str(directory), "result": str(result), "interrupts": interrupts}
    asked = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
    asked += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "tests.frameworks.accelerate_trainings"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *asked, json.dumps(job)]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    return ended.returncode, json.loads(result.read_text()) if result.exists() else {}


@pytest.mark.promise("C10")
def test_launched_by_accelerate_killed_and_stopped_it_ends_in_the_same_bits(jobs: Jobs, tmp_path: Path) -> None:
    whole = jobs.run(tmp_path / "whole", plain=True, ranks=2)
    run = tmp_path / "run"
    # The launcher, and with it every process.
    code, _ = launched(run, [{"step": 6, "number": KILL, "launcher": 1}, *at(6, KILL)], "killed")
    assert code == -KILL
    # To the launcher alone, which sends it on.
    _, stopped = launched(run, [{"step": 8, "number": TERM, "launcher": 1}], "stopped")
    assert stopped["is_stopped"] and 8 <= stopped["step"] <= 10
    # That one resumed under the launcher; the last job need not be started by it, which takes longer than the training.
    resumed = jobs.run(run, ranks=2)
    assert resumed.digest == whole.digest, resumed.said


PREPARED: dict[str, dict[str, Any]] = {
    "two ranks": {"ranks": 2, "loading": {"dispatch_batches": True}},
    "a loss scaler and accumulation": {"scaler": True, "accumulation": 3, "loading": {"use_seedable_sampler": True}},
}


@pytest.mark.promise("C10")
@pytest.mark.parametrize("name", PREPARED)
def test_run_itself_takes_prepared_objects(jobs: Jobs, tmp_path: Path, name: str) -> None:
    case = {"by_run": True, **PREPARED[name]}
    whole = jobs.run(tmp_path / "whole", **case)
    stopped = jobs.run(tmp_path / "run", interrupts=at(13, TERM), **case)
    assert stopped.result is not None and stopped.result["is_stopped"], stopped.said
    resumed = jobs.run(tmp_path / "run", **case)
    assert resumed.digest == whole.digest, resumed.said


@pytest.mark.promise("C10")
def test_a_scheduler_that_is_not_registered_is_named(jobs: Jobs, tmp_path: Path) -> None:
    # Every second step lowers the rate: a scheduler that starts over after an odd one is out of phase.
    loose: dict[str, Any] = {"is_scheduler_loose": "forgotten"}
    stopped = jobs.run(tmp_path / "loose", interrupts=at(5, TERM), **loose)
    assert "StepLR" in stopped.said
    whole = jobs.run(tmp_path / "whole", **loose)
    # It is not the run's fault, and it was said.
    assert jobs.run(tmp_path / "loose", **loose).digest != whole.digest
    refused = jobs.run(tmp_path / "strict", options={"audit": "error"}, **loose)
    assert refused.code == 1 and "StepLR" in refused.said

    registered: dict[str, Any] = {"is_scheduler_loose": "registered", "options": {"audit": "error"}}
    assert jobs.run(tmp_path / "run", interrupts=at(5, TERM), **registered).code == 0
    assert jobs.run(tmp_path / "run", **registered).digest == whole.digest


@pytest.mark.promise("C10")
def test_the_last_and_the_best_survive_a_limit_and_a_kill(jobs: Jobs, tmp_path: Path) -> None:
    project = {"automatic_checkpoint_naming": True, "total_limit": 1}
    torn = {"name": "optimizer.bin", "step": 2}
    # Accelerate alone deletes the last one before it writes the next: nothing is left to resume from.
    assert jobs.run(tmp_path / "plain", plain=True, project=project, torn=torn).code == -KILL
    assert [each.name for each in (tmp_path / "plain" / "checkpoints").iterdir()] == ["checkpoint_1"]
    assert jobs.run(tmp_path / "plain", plain=True, project=project, resume=2).result is None

    # The greatest loss is an early one.
    run, options = tmp_path / "run", {"keep_best": "loss:max"}
    assert jobs.run(run, project=project, torn=torn, options=options).code == -KILL
    assert [each.step for each in unbroken.checkpoints(run)] == [4]
    assert jobs.run(run, project=project, options=options).result is not None
    last, best = unbroken.checkpoints(run)
    assert last.step == 33 and best.metrics["loss"] > last.metrics["loss"]


@pytest.mark.promise("C10")
def test_a_loss_scaler_of_the_script_is_named_or_restored(jobs: Jobs, tmp_path: Path) -> None:
    forgotten: dict[str, Any] = {"own_scaler": "forgotten"}
    plain: dict[str, Any] = {"plain": True, "project": {"automatic_checkpoint_naming": True}, **forgotten}
    assert jobs.run(tmp_path / "plain", interrupts=at(14, KILL), **plain).code == -KILL
    # Accelerate alone starts it over at its first scale, and says nothing.
    lost = jobs.run(tmp_path / "plain", resume=3, **plain)
    assert lost.result is not None and lost.result["scale"] == 2.0**127 and "GradScaler" not in lost.said
    assert "GradScaler" in jobs.run(tmp_path / "loose", interrupts=at(5, TERM), **forgotten).said
    refused = jobs.run(tmp_path / "strict", options={"audit": "error"}, **forgotten)
    assert refused.code == 1 and "GradScaler" in refused.said

    registered: dict[str, Any] = {"own_scaler": "registered", "options": {"audit": "error"}}
    whole = jobs.run(tmp_path / "whole", plain=True, own_scaler="registered")
    assert jobs.run(tmp_path / "run", interrupts=at(14, KILL), **registered).code == -KILL
    resumed = jobs.run(tmp_path / "run", **registered)
    assert resumed.digest == whole.digest, resumed.said


@pytest.mark.promise("C10")
def test_ranks_with_different_numbers_of_batches_are_refused(jobs: Jobs, tmp_path: Path) -> None:
    # Eleven batches: six for one rank, five for the other.
    refused = jobs.run(tmp_path / "run", ranks=2, samples=41, loading={"even_batches": False})
    assert refused.code == 1 and "even_batches=True" in refused.said, refused.said
