"""The Trainer of Transformers as a run: killed or stopped at any instant, the identical job ends in the same bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers.trainer_utils import get_last_checkpoint

import unbroken
from tests.frameworks.forking import Ended, Jobs, events, forking, resumed_from
from unbroken.records.drill import ENVIRONMENT, Drill, Fault, write_drill
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout

SAMPLES = 50
KILL = int(signal.SIGKILL)
TERM = int(signal.SIGTERM)
TWO_WORKERS = {"dataloader_num_workers": 2, "gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with forking(tmp_path_factory.mktemp("jobs")) as started:
        yield started


def kinds(run: Path) -> list[str]:
    return [event.kind for event in read_history(Layout(run)).events]


def drilled(tmp_path: Path, run: Path, *faults: Fault) -> dict[str, str]:
    path = tmp_path / f"drill-{len(list(tmp_path.iterdir()))}.json"
    write_drill(path, Drill(directory=run, faults=faults))
    return {ENVIRONMENT: str(path)}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


@pytest.mark.promise("C9")
def test_killed_inside_the_trainers_own_write_it_resumes_to_the_same_bits(jobs: Jobs, tmp_path: Path) -> None:
    torn = {"name": "optimizer.pt", "step": 12}
    # A sampler that draws from the global RNG when its epoch begins; the second one begins after step 7.
    arguments = {"max_steps": 12, "train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 8}
    whole = jobs.run(tmp_path / "whole", plain=True, arguments=arguments)

    # Without unbroken the torn folder is what the Trainer finds, and fails on.
    assert jobs.run(tmp_path / "plain", plain=True, arguments=arguments, torn=torn).code == -KILL
    broken = jobs.run(tmp_path / "plain", plain=True, arguments=arguments, resume=True)
    assert broken.code != 0 and broken.result is None

    run = tmp_path / "run"
    assert jobs.run(run, arguments=arguments, torn=torn).code == -KILL
    find: Any = get_last_checkpoint
    assert Path(find(str(run))).name == "checkpoint-8"
    resumed = jobs.run(run, arguments=arguments)
    assert resumed.digest == whole.digest, resumed.said
    assert resumed_from(run)[-1] == 8
    assert {each.step for each in unbroken.checkpoints(run)} == {4, 8, 12}
    assert all(each.is_usable for each in unbroken.checkpoints(run))
    # And the samples of the first epoch were skipped by their numbers, not read.
    assert whole.result is not None and resumed.result is not None
    assert resumed.result["reads"] <= whole.result["reads"] - SAMPLES


@pytest.mark.promise("C9")
def test_stopped_by_a_signal_it_saves_and_the_same_command_resumes(jobs: Jobs, tmp_path: Path) -> None:
    whole = jobs.run(tmp_path / "whole", plain=True, arguments=TWO_WORKERS)
    run = tmp_path / "run"
    stopped = jobs.run(run, arguments=TWO_WORKERS, interrupts=[{"step": 5, "number": TERM}])
    assert stopped.code == 0, stopped.said
    assert stopped.result is not None and stopped.result["is_stopped"] and stopped.result["step"] == 6
    assert [each.step for each in unbroken.checkpoints(run)] == [6, 4]
    resumed = jobs.run(run, arguments=TWO_WORKERS)
    assert resumed.digest == whole.digest, resumed.said
    assert resumed.result is not None and not resumed.result["is_stopped"]
    # Once more: it is done, and not one step is computed.
    again = jobs.run(run, arguments=TWO_WORKERS)
    assert again.result is not None and again.result["step"] == 20
    assert kinds(run).count("commit") == 6


CHAINS = {"in one process": {}, "with workers and accumulation": TWO_WORKERS}


@pytest.mark.promise("C9", "X6")
@pytest.mark.parametrize("name", CHAINS)
def test_killed_at_every_phase_of_a_save_it_ends_in_the_same_bits(jobs: Jobs, tmp_path: Path, name: str) -> None:
    arguments = {**CHAINS[name], "save_total_limit": 2}
    whole = jobs.run(tmp_path / "whole", plain=True, arguments=arguments)
    run = tmp_path / "run"

    def killed(ended: Ended) -> None:
        assert ended.code == -KILL, ended.said

    killed(jobs.run(run, arguments=arguments, interrupts=[{"step": 3, "number": KILL, "inside": True}]))
    for file, step in (("optimizer.pt", 4), ("scheduler.pt", 4), ("rng_state.pth", 4), ("trainer_state.json", 4)):
        killed(jobs.run(run, arguments=arguments, torn={"name": file, "step": step}))
    assert unbroken.checkpoints(run) == []
    for phase in ("begin", "manifest", "rename", "committed", "latest", "sweep", "journal"):
        # The sweep comes with the third checkpoint, the rename of a draft twice a save.
        killed(jobs.run(run, drilled(tmp_path, run, Fault(phase, "kill")), arguments=arguments))
    killed(jobs.run(run, arguments=arguments, interrupts=[{"step": 18, "number": KILL}]))
    resumed = jobs.run(run, arguments=arguments)
    assert resumed.digest == whole.digest, resumed.said
    assert [each.step for each in unbroken.checkpoints(run)] == [20, 16]
    assert not list(run.glob(".tmp-*")) and not list(run.glob(".trash-*"))
    assert "mismatch" not in kinds(run)


@pytest.mark.promise("C9")
def test_a_flag_file_and_the_walltime_stop_it_and_a_damaged_newest_is_skipped(jobs: Jobs, tmp_path: Path) -> None:
    whole = jobs.run(tmp_path / "whole", plain=True)
    run = tmp_path / "run"
    stopped = jobs.run(run, interrupts=[{"step": 5, "flag": str(Layout(run).stop_request)}])
    assert stopped.result is not None and stopped.result["step"] == 6, stopped.said
    assert not Layout(run).stop_request.exists()
    limits = {"max_runtime_seconds": 600.0, "walltime_reserve_seconds": 600.0}
    stopped = jobs.run(run, options=limits)
    assert stopped.result is not None and stopped.result["step"] == 7, stopped.said
    assert [event.text("by") for event in events(run, "stop")] == ["flag", "walltime"]
    flip(run / "checkpoint-7" / "optimizer.pt")
    resumed = jobs.run(run)
    assert [event.text("name") for event in events(run, "checkpoint-skipped")] == ["checkpoint-7"]
    assert resumed_from(run)[-1] == 6
    assert resumed.digest == whole.digest, resumed.said
    assert (run / "quarantine" / "checkpoint-7").is_dir()
    status = json.loads(
        subprocess.check_output([sys.executable, "-m", "unbroken", "status", str(run), "--json"], text=True)
    )
    assert (status["step"], status["max_steps"], status["jobs"]) == (20, 20, 3)


@pytest.mark.promise("C9")
def test_the_best_and_the_last_survive_the_limit(jobs: Jobs, tmp_path: Path) -> None:
    arguments = {
        # The loss falls: the greatest is the first.
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
    }
    whole = jobs.run(tmp_path / "whole", plain=True, arguments=arguments)
    # The Trainer ends with the best alone: started again, it would train on from step 4.
    assert [each.name for each in (tmp_path / "whole").iterdir()] == ["checkpoint-4"]

    run = tmp_path / "run"
    assert jobs.run(run, arguments=arguments, interrupts=[{"step": 14, "number": KILL}]).code == -KILL
    # Under another path: the state of the Trainer names the best by the one before.
    ended = jobs.run(Path(os.path.relpath(run)), arguments=arguments)
    assert ended.digest == whole.digest, ended.said
    assert [each.name for each in unbroken.checkpoints(run)] == ["checkpoint-20", "checkpoint-4"]
    assert unbroken.checkpoints(run)[1].metrics["eval_loss"] > 2


@pytest.mark.promise("C9")
def test_a_save_in_the_last_step_of_an_epoch_comes_after_its_evaluation(jobs: Jobs, tmp_path: Path) -> None:
    # An evaluation draws from the RNG: the dropout of the next epoch follows from it. An epoch has 5 steps.
    arguments = {"eval_strategy": "epoch", "per_device_train_batch_size": 10, "max_steps": 15, "save_steps": 10}
    whole = jobs.run(tmp_path / "whole", plain=True, arguments=arguments)
    run = tmp_path / "run"
    stopped = jobs.run(run, arguments=arguments, interrupts=[{"step": 4, "number": TERM}])
    assert stopped.result is not None and stopped.result["step"] == 5, stopped.said
    assert unbroken.checkpoints(run)[0].metrics["eval_loss"] > 2
    inside = jobs.run(run, arguments=arguments, interrupts=[{"step": 6, "number": TERM}])
    assert inside.result is not None and inside.result["step"] == 7, inside.said
    assert "eval_loss" not in inside.said, "the epoch is not over: its evaluation is not this job's"
    assert jobs.run(run, arguments=arguments, interrupts=[{"step": 12, "number": KILL}]).code == -KILL
    resumed = jobs.run(run, arguments=arguments)
    assert "resuming from step 10" in resumed.said and resumed.digest == whole.digest, resumed.said


@pytest.mark.promise("C9")
def test_a_training_that_early_stopping_has_ended_is_done(jobs: Jobs, tmp_path: Path) -> None:
    arguments = {
        # The loss falls: the first is the best.
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
    }
    run = tmp_path / "run"
    steps = []
    for patience in (2, 2, 3):
        ended = jobs.run(run, arguments=arguments, patience=patience)
        assert ended.result is not None and not ended.result["is_stopped"], ended.said
        steps.append(ended.result["step"])
    # With more patience, which begins anew in each job, it continues.
    assert steps == [6, 6, 12]


@pytest.mark.promise("C9")
def test_a_sampler_that_draws_from_the_global_rng_resumes_in_its_order(jobs: Jobs, tmp_path: Path) -> None:
    arguments = {
        "train_sampling_strategy": "group_by_length",
        "dataloader_num_workers": 1,
        "per_device_train_batch_size": 4,
    }
    # In the second epoch: the first one begins with the RNG states of the seed in any case.
    kill = [{"step": 18, "number": KILL}]
    whole = jobs.run(tmp_path / "whole", plain=True, arguments=arguments)
    assert jobs.run(tmp_path / "plain", plain=True, arguments=arguments, interrupts=kill).code == -KILL
    # By its own means the Trainer makes another order of the interrupted epoch.
    assert jobs.run(tmp_path / "plain", plain=True, arguments=arguments, resume=True).digest != whole.digest
    assert jobs.run(tmp_path / "run", arguments=arguments, interrupts=kill).code == -KILL
    ours = jobs.run(tmp_path / "run", arguments=arguments)
    assert ours.digest == whole.digest, ours.said


# In the main process: accumulating, with a generator of the collator's own, after the first step of an epoch and before
# its last one. In workers.
RANDOM: dict[str, dict[str, Any]] = {
    "accumulating": {"masked": None, "arguments": {"gradient_accumulation_steps": 2}, "killed": 9},
    "seeded": {"masked": 5, "arguments": {"eval_strategy": "steps", "eval_steps": 3}, "killed": 11},
    "first": {"masked": 5, "arguments": {"per_device_train_batch_size": 10, "save_steps": 3}, "killed": 7},
    "last": {"masked": None, "arguments": {"per_device_train_batch_size": 10, "save_steps": 3}, "killed": 10},
    "workers": {"masked": None, "arguments": TWO_WORKERS, "killed": 17},
}


@pytest.mark.promise("C9")
@pytest.mark.parametrize("name", RANDOM)
def test_data_that_draws_random_numbers_resumes_as_in_one_job(jobs: Jobs, tmp_path: Path, name: str) -> None:
    job = {**RANDOM[name]}
    kill = [{"step": job.pop("killed"), "number": KILL}]
    whole = jobs.run(tmp_path / "whole", plain=True, **job)
    # By its own means the Trainer draws other masks after a resume.
    assert jobs.run(tmp_path / "plain", plain=True, interrupts=kill, **job).code == -KILL
    assert jobs.run(tmp_path / "plain", plain=True, resume=True, **job).digest != whole.digest
    assert jobs.run(tmp_path / "run", interrupts=kill, **job).code == -KILL
    ours = jobs.run(tmp_path / "run", **job)
    assert ours.digest == whole.digest, ours.said
    assert ours.result is not None and whole.result is not None
    if name == "accumulating":
        # The 4 samples of each of 8 steps were skipped by their numbers: not one was read.
        assert ours.result["reads"] == whole.result["reads"] - 8 * 4
    # A loader worker that ends, as the first job's do after its kill, ends no job.
    assert kinds(tmp_path / "run").count("job-end") == 1
    assert ("read again" in ours.said) == (name == "workers")


@pytest.mark.promise("C9")
@pytest.mark.parametrize(
    "arguments", [{}, TWO_WORKERS, {"save_strategy": "epoch"}], ids=["skipped", "workers", "epochs"]
)
def test_a_stream_without_a_length_resumes_inside_its_second_epoch(
    jobs: Jobs, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    # 8 batches of 2 samples: killed in the second pass, and stopped by the last step of it.
    job: dict[str, Any] = {"streamed": 16, "arguments": {"save_steps": 3, **arguments}}
    passes = 8 // arguments.get("gradient_accumulation_steps", 1)
    kill, stop = {"step": passes + 3, "number": KILL}, {"step": 2 * passes, "number": TERM}
    whole = jobs.run(tmp_path / "whole", plain=True, **job)
    if not arguments:
        # By its own means the Trainer passes more batches than an epoch has, and starts the next one over.
        assert jobs.run(tmp_path / "plain", plain=True, interrupts=[kill], **job).code == -KILL
        assert jobs.run(tmp_path / "plain", plain=True, resume=True, **job).digest != whole.digest
    run = tmp_path / "run"
    assert jobs.run(run, interrupts=[kill], **job).code == -KILL
    stopped = jobs.run(run, interrupts=[stop], **job)
    assert stopped.code == 0 and stopped.result is not None and stopped.result["is_stopped"], stopped.said
    resumed = jobs.run(run, **job)
    assert resumed.digest == whole.digest, resumed.said
    assert resumed.result is not None and whole.result is not None
    assert resumed.result["epoch"] == whole.result["epoch"]


@pytest.mark.promise("C9")
def test_after_an_epoch_that_a_callback_ended_it_resumes_in_the_right_one(jobs: Jobs, tmp_path: Path) -> None:
    # Three epochs of 10 batches, two of which end after 4; killed in the last one. The data draws while it is read.
    arguments = {"max_steps": -1, "num_train_epochs": 3, "per_device_train_batch_size": 5, "save_steps": 3}
    job: dict[str, Any] = {"ends_epoch": [4, 8], "masked": None, "arguments": arguments}
    whole = jobs.run(tmp_path / "whole", plain=True, **job)
    assert jobs.run(tmp_path / "run", interrupts=[{"step": 14, "number": KILL}], **job).code == -KILL
    resumed = jobs.run(tmp_path / "run", **job)
    assert resumed.digest == whole.digest, resumed.said
    assert resumed.result is not None and whole.result is not None
    assert (resumed.result["epoch"], resumed.result["step"]) == (whole.result["epoch"], 18) == (3, 18)


@pytest.mark.promise("C9")
def test_gradients_left_at_the_end_of_a_stream_are_reported(jobs: Jobs, tmp_path: Path) -> None:
    arguments = {"save_strategy": "epoch", "gradient_accumulation_steps": 3, "max_steps": 4}
    said = jobs.run(tmp_path / "run", streamed=16, arguments=arguments).said
    assert "gradients" in said


@pytest.mark.promise("C9")
def test_workers_that_are_kept_over_epochs_draw_what_they_would_have_drawn(jobs: Jobs, tmp_path: Path) -> None:
    job: dict[str, Any] = {"masked": None, "arguments": {**TWO_WORKERS, "dataloader_persistent_workers": True}}
    whole = jobs.run(tmp_path / "whole", **job)
    # Inside the second epoch.
    assert jobs.run(tmp_path / "run", interrupts=[{"step": 18, "number": KILL}], **job).code == -KILL
    resumed = jobs.run(tmp_path / "run", **job)
    assert "read again" in resumed.said and resumed.digest == whole.digest, resumed.said


@pytest.mark.promise("C9")
def test_batches_of_workers_are_skipped_or_read_again_as_the_callback_says(jobs: Jobs, tmp_path: Path) -> None:
    whole = jobs.run(tmp_path / "whole", plain=True, arguments=TWO_WORKERS)
    for reread in (True, False):
        job: dict[str, Any] = {"arguments": TWO_WORKERS, "options": {"reread": reread}}
        run = tmp_path / str(reread)
        assert jobs.run(run, interrupts=[{"step": 18, "number": KILL}], **job).code == -KILL
        resumed = jobs.run(run, **job)
        assert resumed.digest == whole.digest, resumed.said
        assert ("read again" in resumed.said) is reread


@pytest.mark.promise("C9")
def test_a_loss_scaler_is_restored_and_one_that_was_lost_is_noticed(jobs: Jobs, tmp_path: Path) -> None:
    job: dict[str, Any] = {"scaler": True, "arguments": {"max_steps": 12, "max_grad_norm": 0.0}}
    kill = [{"step": 10, "number": KILL}]
    whole = jobs.run(tmp_path / "whole", plain=True, **job)
    assert whole.result is not None, whole.said

    # A file that a power cut took: the Trainer alone starts the scaler over, and says nothing.
    assert jobs.run(tmp_path / "plain", plain=True, interrupts=kill, **job).code == -KILL
    (tmp_path / "plain" / "checkpoint-8" / "scaler.pt").unlink()
    lost = jobs.run(tmp_path / "plain", plain=True, resume=True, **job)
    assert lost.result is not None and lost.result["scaler"] != whole.result["scaler"], lost.said

    run = tmp_path / "run"
    assert jobs.run(run, interrupts=kill, **job).code == -KILL
    resumed = jobs.run(run, **job)
    assert resumed.result is not None and resumed_from(run)[-1] == 8, resumed.said
    assert (resumed.digest, resumed.result["scaler"]) == (whole.digest, whole.result["scaler"])
    (run / "checkpoint-12" / "scaler.pt").unlink()
    again = jobs.run(run, **job)
    assert [event.text("name") for event in events(run, "checkpoint-skipped")] == ["checkpoint-12"]
    assert again.result is not None and again.result["scaler"] == whole.result["scaler"], again.said


# How the script itself asks the Trainer to resume, and what a warning then says.
ALONE: dict[str, tuple[dict[str, Any], bool | str, str]] = {
    "true": ({"arguments": {"dataloader_num_workers": 1}}, True, "loader workers may draw"),
    "path": ({"streamed": 40}, "checkpoint-8", "does not know the length"),
}


@pytest.mark.promise("C9")
@pytest.mark.parametrize("name", ALONE)
def test_with_the_callback_alone_it_resumes_as_the_script_asks_and_a_warning_names_the_limit(
    jobs: Jobs, tmp_path: Path, name: str
) -> None:
    case, asked, warned = ALONE[name]
    job = {"is_alone": True, **case}
    run = tmp_path / "run"
    whole = jobs.run(tmp_path / "whole", plain=True, **case)
    assert jobs.run(run, interrupts=[{"step": 10, "number": KILL}], **job).code == -KILL
    resumed = jobs.run(run, resume=asked if asked is True else str(run / str(asked)), **job)
    assert resumed.digest == whole.digest, resumed.said
    assert resumed_from(run) == [0, 8] and warned in resumed.said
    assert [each.step for each in unbroken.checkpoints(run)][:2] == [20, 16]


@pytest.mark.promise("C9")
def test_what_cannot_be_resumed_exactly_is_refused_by_name(jobs: Jobs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert jobs.run(run, arguments={"save_strategy": "epoch"}, interrupts=[{"step": 5, "number": TERM}]).code == 0
    weights = tmp_path / "model"
    shutil.copytree(run / "checkpoint-6", weights)
    for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "manifest.json"):
        (weights / name).unlink()
    refused = jobs.run(tmp_path / "other", resume=str(weights))
    assert refused.code == 1
    assert "trainer_state.json" in refused.said and "optimizer.pt" in refused.said
    refused = jobs.run(run, arguments={"per_device_train_batch_size": 4})
    assert refused.code == 1 and "train_batch_size:" in refused.said
    accepted = jobs.run(run, arguments={"per_device_train_batch_size": 4}, options={"accept": ["train_batch_size"]})
    assert accepted.code == 0, accepted.said
    # A start over what is there is nobody's wish.
    refused = jobs.run(run, plain=False, resume=str(tmp_path / "run" / "checkpoint-99"))
    assert refused.code == 1 and "checkpoint-99" in refused.said


@pytest.mark.promise("C9", "X6")
def test_a_save_under_the_final_name_is_sealed_there_and_skipped_if_torn(jobs: Jobs, tmp_path: Path) -> None:
    whole = jobs.run(tmp_path / "whole", plain=True)
    run = tmp_path / "run"
    killed = jobs.run(run, save_late=6, torn={"name": "optimizer.pt", "step": 6})
    assert killed.code == -KILL and (run / "checkpoint-6").is_dir()
    killed = jobs.run(run, save_late=6, interrupts=[{"step": 7, "number": KILL}])
    assert [event.text("name") for event in events(run, "checkpoint-skipped")] == ["checkpoint-6"]
    resumed = jobs.run(run)
    assert resumed_from(run)[-1] == 6
    assert resumed.digest == whole.digest, resumed.said
    # Only a new best is saved, and nothing is left of the evaluations that found none.
    best = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "best", "metric_for_best_model": "loss"}
    first = jobs.run(tmp_path / "best", arguments={**best, "greater_is_better": True})
    assert first.code == 0, first.said
    assert [each.step for each in unbroken.checkpoints(tmp_path / "best")] == [4]
    assert not list((tmp_path / "best").glob(".tmp-*"))


@pytest.mark.promise("C9", "X6")
def test_checkpoints_from_before_unbroken_are_sealed_by_hand_and_resumed(jobs: Jobs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = jobs.run(tmp_path / "whole", plain=True)
    assert jobs.run(run, plain=True, interrupts=[{"step": 10, "number": KILL}]).code == -KILL
    refused = jobs.run(run)
    assert refused.code == 1 and "manifest" in refused.said
    subprocess.run([sys.executable, "-m", "unbroken", "seal", str(run), "--all"], check=True, capture_output=True)
    resumed = jobs.run(run)
    assert resumed_from(run)[-1] == 8
    assert resumed.digest == whole.digest, resumed.said


@pytest.mark.promise("C9", "X6")
def test_with_the_directory_lost_it_resumes_from_its_mirror(jobs: Jobs, tmp_path: Path) -> None:
    options = {"mirror": f"file://{tmp_path / 'mirror'}"}
    arguments = {"save_total_limit": 1}
    run = tmp_path / "run"
    whole = jobs.run(tmp_path / "whole", plain=True)
    assert jobs.run(run, options=options, arguments=arguments, interrupts=[{"step": 9, "number": TERM}]).code == 0
    shutil.rmtree(run)
    resumed = jobs.run(run, options=options, arguments=arguments)
    assert resumed_from(run)[-1] == 10, resumed.said
    assert resumed.digest == whole.digest


@pytest.mark.promise("C9")
@pytest.mark.parametrize("is_dispatched", [False, True])
def test_two_ranks_killed_and_stopped_end_in_the_same_bits(jobs: Jobs, tmp_path: Path, is_dispatched: bool) -> None:
    arguments = {"max_steps": 12, "ddp_backend": "gloo", "accelerator_config": {"dispatch_batches": is_dispatched}}
    world: dict[str, Any] = {"ranks": 2, "arguments": arguments}
    run = tmp_path / "run"
    whole = jobs.run(tmp_path / "whole", plain=True, **world)
    assert jobs.run(run, interrupts=[{"step": 6, "number": KILL}], **world).code == -KILL
    # Each rank gets its signal after it has voted at step 6; the vote of step 7 is read at step 8.
    stopped = jobs.run(run, interrupts=[{"step": 6, "number": TERM}], **world)
    assert stopped.code == 0 and stopped.result is not None and stopped.result["step"] == 8, stopped.said
    refused = jobs.run(run, arguments={"max_steps": 12})
    assert refused.code == 1 and "world_size:" in refused.said
    resumed = jobs.run(run, **world)
    assert resumed.digest == whole.digest, resumed.said
    assert {each.name for each in (run / "checkpoint-12").glob("unbroken_rng_*")} == {
        "unbroken_rng_0.pt",
        "unbroken_rng_1.pt",
    }


@pytest.mark.promise("C9")
def test_an_exception_is_recorded_as_an_error_also_if_the_script_catches_it(jobs: Jobs, tmp_path: Path) -> None:
    whole, run = jobs.run(tmp_path / "whole", plain=True), tmp_path / "run"
    raised = jobs.run(run, interrupts=[{"step": 6, "raises": "a batch is odd"}])
    assert raised.code == 1, raised.said
    caught = jobs.run(run, interrupts=[{"step": 10, "raises": "a batch is odd"}], catches=True)
    assert caught.code == 0, caught.said
    resumed = jobs.run(run)
    assert resumed.digest == whole.digest, resumed.said
    ends = read_history(Layout(run)).of_kind("job-end")
    assert [(event.text("status"), event.text("reason")) for event in ends] == [
        ("error", "ValueError: a batch is odd"),
        ("error", "TrainingLeft: an exception or sys.exit left the training at step 10"),
        ("completed", "the target is reached"),
    ]
