"""The Trainer of Lightning as a run: killed or stopped at any instant, the identical job ends in the same bits."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch

import unbroken
from tests.frameworks.forking import Ended, Jobs, events, forking, resumed_from
from tests.trackers.readers import tensorboard_points, wandb_points
from unbroken.records.drill import ENVIRONMENT, Drill, Fault, write_drill
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import read_metrics

KILL = int(signal.SIGKILL)
TERM = int(signal.SIGTERM)
EPOCHS = {"max_steps": -1, "max_epochs": 3, "limit_val_batches": 3}
BEST = [{"monitor": "val_loss", "save_top_k": 2}]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with forking(tmp_path_factory.mktemp("jobs"), "tests.frameworks.fits") as started:
        yield started


def result(ended: Ended) -> dict[str, Any]:
    assert ended.result is not None, ended.said
    return ended.result


def steps_of(run: Path) -> list[int | None]:
    return [each.step for each in unbroken.checkpoints(run)]


def killed(ended: Ended) -> None:
    assert ended.code == -KILL, ended.said


def logged(directory: Path) -> dict[tuple[str, str], str]:
    """What the logger of all jobs says, by step and name."""
    rows = [
        row for path in directory.glob("log/*/metrics.csv") for row in csv.DictReader(path.read_text().splitlines())
    ]
    return {(row["step"], name): value for row in rows for name, value in row.items() if value and name != "step"}


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "models").iterdir())


def assert_paths(ended: Ended) -> None:
    """The best and the last of every ``ModelCheckpoint`` are there, and torch reads them."""
    for path in (*result(ended)["best"], *result(ended)["last"]):
        assert "state_dict" in torch.load(path, weights_only=True), path


@pytest.mark.promise("C11")
def test_killed_inside_lightnings_own_write_it_resumes_to_the_same_bits(jobs: Jobs, tmp_path: Path) -> None:
    # Dropout, and a data set that draws from the global RNG; ten batches an epoch, killed in the second one.
    job: dict[str, Any] = {"noise": 0.1, "trainer": {"max_steps": 18}}
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **job)

    # Without unbroken the epoch starts over: samples are repeated, and others left out.
    killed(jobs.run(tmp_path / "plain", plain=True, torn=16, **job))
    plain = jobs.run(tmp_path / "plain", plain=True, **job)
    assert result(plain)["step"] == 18 and plain.digest != whole.digest

    run = tmp_path / "run"
    killed(jobs.run(run, torn=16, **job))
    assert steps_of(run)[0] == 12 and (run / "models" / "last.ckpt").resolve().parent.name == "checkpoint-12"
    resumed = jobs.run(run, **job)
    assert resumed.digest == whole.digest, resumed.said
    assert resumed_from(run)[-1] == 12
    assert result(resumed)["reads"] == 6 * 4
    assert_paths(resumed)
    assert all(each.is_usable for each in unbroken.checkpoints(run))


@pytest.mark.promise("C11")
def test_stopped_by_a_signal_it_saves_and_keeps_best_last_and_average(jobs: Jobs, tmp_path: Path) -> None:
    job: dict[str, Any] = {"ema": True, "trainer": {**EPOCHS, "accumulate_grad_batches": 2}, "checkpoints": BEST}
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **job)
    run = tmp_path / "run"
    # The fifth step ends the epoch: its validation comes first.
    stopped = jobs.run(run, interrupts=[{"step": 5, "number": TERM}], **job)
    assert stopped.code == 0 and result(stopped)["is_stopped"] and result(stopped)["step"] == 6, stopped.said
    assert "SIGTERM" in result(stopped)["reason"]
    assert_paths(stopped)
    killed(jobs.run(run, interrupts=[{"step": 12, "number": KILL}], **job))
    resumed = jobs.run(run, **job)
    assert resumed.digest == whole.digest, resumed.said
    assert result(resumed)["scores"] == result(whole)["scores"]
    assert [Path(path).name for path in result(resumed)["best"]] == [Path(path).name for path in result(whole)["best"]]
    assert_paths(resumed)
    # Moved and started again: it is done, not one batch is trained, and the best is still known.
    moved = tmp_path / "moved"
    run.rename(moved)
    again = jobs.run(moved, **job)
    assert result(again)["step"] == 15 and result(again)["trained"] == 0, again.said
    assert result(again)["scores"] == result(whole)["scores"]
    assert_paths(again)


@pytest.mark.promise("C11", "X6")
def test_killed_at_every_phase_of_a_save_it_ends_in_the_same_bits(jobs: Jobs, tmp_path: Path) -> None:
    # Saves at steps 3, 6 and 9 come before a validation: made up for by the next step.
    validated = {"limit_val_batches": 2, "val_check_interval": 6, "check_val_every_n_epoch": None}
    job: dict[str, Any] = {"stateful": True, "trainer": validated, "checkpoints": [{"every_n_train_steps": 3}]}
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **job)
    run = tmp_path / "run"
    killed(jobs.run(run, inside=[3], **job))
    assert unbroken.checkpoints(run) == []
    for phase in ("begin", "manifest", "rename", "committed", "latest", "sweep", "journal"):
        path = tmp_path / f"{phase}.json"
        write_drill(path, Drill(directory=run, faults=(Fault(phase, "kill"),)))
        killed(jobs.run(run, {ENVIRONMENT: str(path)}, **job))
    resumed = jobs.run(run, **job)
    assert resumed.digest == whole.digest, resumed.said
    assert_paths(resumed)
    assert not list(run.glob(".tmp-*")) and not list(run.glob(".trash-*"))
    assert "mismatch" not in [event.kind for event in read_history(Layout(run)).events]


@pytest.mark.promise("C11")
def test_a_flag_file_and_the_walltime_stop_it_and_a_damaged_newest_is_skipped(jobs: Jobs, tmp_path: Path) -> None:
    job: dict[str, Any] = {"manual": True, "trainer": {"max_steps": 36}}
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **job)
    run = tmp_path / "run"
    # Two optimizers: two steps a batch.
    stopped = jobs.run(run, interrupts=[{"step": 10, "flag": str(Layout(run).stop_request)}], **job)
    assert result(stopped)["is_stopped"] and result(stopped)["step"] == 10, stopped.said
    limits = {"max_runtime_seconds": 600.0, "walltime_reserve_seconds": 600.0}
    stopped = jobs.run(run, options=limits, **job)
    assert [event.text("by") for event in events(run, "stop")] == ["flag", "walltime"]
    assert result(stopped)["step"] == 12
    newest = run / "checkpoint-12" / "lightning.ckpt"
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    resumed = jobs.run(run, **job)
    assert [event.text("name") for event in events(run, "checkpoint-skipped")] == ["checkpoint-12"]
    assert resumed_from(run)[-1] == 10
    assert resumed.digest == whole.digest, resumed.said
    assert_paths(resumed)
    status = json.loads(
        subprocess.check_output([sys.executable, "-m", "unbroken", "status", str(run), "--json"], text=True)
    )
    assert (status["step"], status["jobs"]) == (36, 3)


@pytest.mark.promise("C11")
def test_a_truncated_newest_ends_lightning_alone_and_is_skipped_with_the_callback(jobs: Jobs, tmp_path: Path) -> None:
    job: dict[str, Any] = {"trainer": {"max_steps": 10}}
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **job)
    ended = {}
    for directory, is_plain in ((tmp_path / "plain", True), (tmp_path / "run", False)):
        killed(jobs.run(directory, plain=is_plain, interrupts=[{"step": 9, "number": KILL}], **job))
        newest = (directory / "models" / "last.ckpt").resolve()
        os.truncate(newest, newest.stat().st_size // 2)
        ended[directory.name] = jobs.run(directory, plain=is_plain, **job)
    assert ended["plain"].code == 1, ended["plain"].said
    assert resumed_from(tmp_path / "run")[-1] == 4 and ended["run"].digest == whole.digest, ended["run"].said


@pytest.mark.promise("C11")
def test_where_only_the_best_is_saved_lightning_alone_starts_over_and_forgets_it_in_a_moved_run(
    jobs: Jobs, tmp_path: Path
) -> None:
    # The first is the best, and there is no last.ckpt.
    best = {"monitor": "val_loss", "mode": "max", "save_last": None}
    job: dict[str, Any] = {"trainer": EPOCHS, "checkpoints": [best]}
    interrupts = [{"step": 25, "number": KILL}]
    killed(jobs.run(tmp_path / "plain", plain=True, interrupts=interrupts, **job))
    (only,) = (tmp_path / "plain" / "models").iterdir()
    assert only.name == "epoch=0-step=10.ckpt"
    assert result(jobs.run(tmp_path / "plain", plain=True, **job))["trained"] == 30
    run = tmp_path / "run"
    killed(jobs.run(run, interrupts=interrupts, **job))
    (tmp_path / "moved").mkdir()
    run = run.rename(tmp_path / "moved" / "run")
    resumed = jobs.run(run, **job)
    assert resumed_from(run)[-1] == 10 and result(resumed)["trained"] == 20, resumed.said
    assert Path(result(resumed)["best"][0]).name == only.name and len(result(resumed)["scores"][0]) == 1
    assert Path(result(resumed)["best"][0]).resolve() == run / "checkpoint-10" / "lightning.ckpt"
    moved = (tmp_path / "plain").rename(tmp_path / "moved" / "plain")
    forgot = jobs.run(moved, plain=True, ckpt_path=str(moved / "models" / only.name), **job)
    assert Path(result(forgot)["best"][0]).name != only.name, forgot.said


@pytest.mark.promise("C11", "G24")
@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_tracker_of_the_callback_shows_each_step_once_and_lightnings_logger_some_of_them_twice(
    jobs: Jobs, tmp_path: Path, tracker: str
) -> None:
    pytest.importorskip(tracker)
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    job: dict[str, Any] = {"interrupts": [{"step": 11, "number": KILL}]}
    if tracker == "tensorboard":
        killed(jobs.run(tmp_path / "plain", plain=True, logger="tensorboard", **job))
        jobs.run(tmp_path / "plain", plain=True, logger="tensorboard", trainer={"max_steps": 14})
        (points,) = tensorboard_points(tmp_path / "plain", "train_loss").values()
        shown = [step for step, _ in points]
        assert len(shown) > len(set(shown))
    run = tmp_path / "run"
    job["options"] = {"trackers": tracker, "tracker_mode": "committed"}
    killed(jobs.run(run, offline, **job))
    resumed = jobs.run(run, offline, options=job["options"], trainer={"max_steps": 14})
    assert resumed.code == 0, resumed.said
    (points,) = (wandb_points if tracker == "wandb" else tensorboard_points)(run).values()
    assert [step for step, _ in points] == [*range(1, 15)]


@pytest.mark.promise("C11")
def test_slurms_signal_is_answered_by_the_run_and_not_by_lightnings_requeue(jobs: Jobs, tmp_path: Path) -> None:
    called = tmp_path / "requeued"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {called}\n')
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    slurm = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
    }
    workers: dict[str, Any] = {"stateful": True, "loader": {"num_workers": 2, "persistent_workers": True}}
    usr1 = [{"step": 6, "number": int(signal.SIGUSR1)}]
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **workers)
    plain = jobs.run(tmp_path / "plain", slurm, plain=True, ckpt_path=None, interrupts=usr1, **workers)
    assert called.read_text() == "requeue 7\n", plain.said
    run = tmp_path / "run"
    stopped = jobs.run(run, slurm, interrupts=usr1, **workers)
    assert result(stopped)["is_stopped"] and result(stopped)["step"] == 6, stopped.said
    assert called.read_text() == "requeue 7\n" and not list(run.rglob("hpc_ckpt*"))
    resumed = jobs.run(run, slurm, **workers)
    assert resumed.digest == whole.digest, resumed.said


@pytest.mark.promise("C11")
def test_two_ranks_stop_together_and_resume_to_the_same_bits(jobs: Jobs, tmp_path: Path) -> None:
    two = {"ranks": 2, "trainer": {"strategy": "ddp", "devices": 2, "max_steps": 12}}
    job: dict[str, Any] = {**two, "noise": 0.1, "checkpoints": [{"every_n_train_steps": 2}]}
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **job)
    run = tmp_path / "run"
    # The other rank alone hears of it.
    stopped = jobs.run(run, interrupts=[{"step": 6, "number": TERM, "rank": 1}], **job)
    assert stopped.code == 0 and result(stopped)["is_stopped"] and result(stopped)["step"] == 7, stopped.said
    resumed = jobs.run(run, **job)
    assert resumed.digest == whole.digest, resumed.said
    assert_paths(resumed)


@pytest.mark.promise("C11")
def test_loss_scale_plateau_and_early_stopping_resume_exactly(jobs: Jobs, tmp_path: Path) -> None:
    job: dict[str, Any] = {"scaler": True, "plateau": True, "early": True, "checkpoints": [{}]}
    job["trainer"] = {**EPOCHS, "max_epochs": 8}
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **job)
    assert result(whole)["epoch"] == 3
    run = tmp_path / "run"
    killed(jobs.run(run, interrupts=[{"step": 15, "number": KILL}], **job))
    # The end of an epoch is saved before the scheduler is stepped: the step behind it is saved too.
    assert steps_of(run)[0] == 11
    resumed = jobs.run(run, **job)
    assert resumed.digest == whole.digest, resumed.said
    again = jobs.run(run, **job)
    assert result(again)["trained"] == 0 and result(again)["step"] == 30, again.said
    # Without unbroken the scheduler misses the end of the epoch that was resumed.
    plain = {**job, "plain": True, "checkpoints": [{"every_n_train_steps": 4}]}
    killed(jobs.run(tmp_path / "plain", interrupts=[{"step": 15, "number": KILL}], **plain))
    missed = jobs.run(tmp_path / "plain", **plain)
    assert result(missed)["rates"] != result(whole)["rates"], missed.said


@pytest.mark.promise("C11")
def test_what_a_module_saves_and_loads_by_its_own_hooks_goes_on_where_it_was(jobs: Jobs, tmp_path: Path) -> None:
    job: dict[str, Any] = {"average": True, "trainer": {"max_steps": 14}}
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **job)
    run = tmp_path / "run"
    stopped = jobs.run(run, interrupts=[{"step": 5, "number": TERM}], **job)
    assert result(stopped)["step"] == 5, stopped.said
    killed(jobs.run(run, interrupts=[{"step": 11, "number": KILL}], **job))
    resumed = jobs.run(run, **job)
    assert resumed_from(run)[-1] == 8 and resumed.digest == whole.digest, resumed.said
    assert len(torch.load(result(resumed)["last"][0], weights_only=True)["average"]) == 4


@pytest.mark.promise("C11")
def test_the_mean_of_an_interrupted_epoch_is_of_all_its_batches_and_no_step_is_missing_in_a_log(
    jobs: Jobs, tmp_path: Path
) -> None:
    # A short loader begins again three times while the long one is read once; the samples draw from the global RNG.
    job: dict[str, Any] = {"pair": True, "logger": "csv", "noise": 0.1, "trainer": EPOCHS}
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **job)
    run = tmp_path / "run"
    stopped = jobs.run(run, interrupts=[{"step": 6, "number": TERM}], **job)
    assert result(stopped)["step"] == 6, stopped.said
    killed(jobs.run(run, interrupts=[{"step": 19, "number": KILL}], **job))
    resumed = jobs.run(run, **job)
    assert resumed.digest == whole.digest, resumed.said
    assert result(resumed)["metrics"] == result(whole)["metrics"] and logged(run) == logged(tmp_path / "whole")


@pytest.mark.promise("C11")
def test_loaders_and_accumulation_of_each_epoch_and_doubles_resume_exactly(jobs: Jobs, tmp_path: Path) -> None:
    trainer = {**EPOCHS, "precision": "64-true", "reload_dataloaders_every_n_epochs": 1}
    job: dict[str, Any] = {"made": True, "accumulate": {"0": 1, "1": 3}, "trainer": trainer}
    job["checkpoints"] = [{"every_n_train_steps": 2}]
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **job)
    run = tmp_path / "run"
    for step in (12, 15):
        killed(jobs.run(run, interrupts=[{"step": step, "number": KILL}], **job))
    resumed = jobs.run(run, **job)
    assert resumed.digest == whole.digest, resumed.said


@pytest.mark.promise("C11")
def test_a_kill_beside_a_save_leaves_no_file_and_no_other_name(jobs: Jobs, tmp_path: Path) -> None:
    job: dict[str, Any] = {"trainer": EPOCHS}
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **job)
    run = tmp_path / "run"
    killed(jobs.run(run, interrupts=[{"step": 7, "number": KILL}], **job))
    # After the commit of step 8, and before Lightning gives up the path of step 4.
    path = tmp_path / "drill.json"
    write_drill(path, Drill(directory=run, faults=(Fault("committed", "kill"),)))
    killed(jobs.run(run, {ENVIRONMENT: str(path)}, **job))
    assert steps_of(run)[0] == 8 and "epoch=0-step=4.ckpt" in names_in(run)
    # Step 20 ends an epoch: a file of Lightning. The commit of step 21 does not come.
    killed(jobs.run(run, interrupts=[{"step": 21, "number": KILL}], **job))
    assert names_in(run) == ["epoch=1-step=20.ckpt", "last.ckpt"] and steps_of(run)[0] == 16
    foreign = run / "models" / "epoch=2-step=24.ckpt"
    foreign.write_text("of the user")
    killed(jobs.run(run, interrupts=[{"step": 25, "number": KILL}], **job))
    assert foreign.read_text() == "of the user" and "epoch=2-step=24-v1.ckpt" in names_in(run)
    foreign.unlink()
    resumed = jobs.run(run, **job)
    assert resumed.digest == whole.digest, resumed.said
    assert names_in(run) == names_in(tmp_path / "whole") and result(resumed)["best"][0].endswith("step=28.ckpt")


@pytest.mark.promise("C11")
def test_a_training_that_has_ended_is_left_as_it_ended(jobs: Jobs, tmp_path: Path) -> None:
    # The ModelCheckpoint saves at the end of each epoch, the one at which EarlyStopping ends the training among them.
    job: dict[str, Any] = {"early": True, "ema": True, "checkpoints": [{}], "trainer": {**EPOCHS, "max_epochs": 8}}
    run = tmp_path / "run"
    ended = jobs.run(run, **job)
    assert result(ended)["epoch"] == 3, ended.said
    again = jobs.run(run, **job)
    assert result(again)["trained"] == 0 and again.digest == ended.digest, again.said
    assert result(again)["metrics"] == result(ended)["metrics"]


@pytest.mark.promise("C11")
@pytest.mark.parametrize("has_saver", [True, False])
def test_a_script_can_ask_every_checkpoint_callback_for_its_best(tmp_path: Path, has_saver: bool) -> None:
    from lightning.pytorch import callbacks

    from unbroken.frameworks import lightning as unbroken_pl

    saver = callbacks.ModelCheckpoint(tmp_path, monitor="loss")
    ours = unbroken_pl.Callback(tmp_path / "run", save_steps=2, console=False)
    members: list[Any] = [ours, saver] if has_saver else [ours]
    strategy = SimpleNamespace(checkpoint_io=None)
    trainer = SimpleNamespace(strategy=strategy, callbacks=members, checkpoint_callbacks=members)
    for asked in trainer.checkpoint_callbacks:
        assert (asked.best_model_path, asked.last_model_path, asked.best_model_score) == ("", "", None)
    ours.setup(trainer, None, "validate")
    saver.best_model_path, saver.best_model_score = "best.ckpt", torch.tensor(0.5)
    for asked in trainer.checkpoint_callbacks:
        assert asked.best_k_models == {} and asked.mode == "min" and asked.save_top_k == 1
        assert asked.best_model_path == ("best.ckpt" if has_saver else "")
        assert asked.best_model_score == (0.5 if has_saver else None)
    with pytest.raises(AttributeError):
        _ = trainer.checkpoint_callbacks[-1].never_heard_of


@pytest.mark.promise("C11")
@pytest.mark.parametrize("name", ["LearningRateFinder", "BatchSizeFinder", "AsyncCheckpointIO"])
def test_what_trains_before_the_run_or_writes_after_a_save_is_refused(tmp_path: Path, name: str) -> None:
    from lightning.pytorch import callbacks
    from lightning.pytorch.plugins import AsyncCheckpointIO

    from unbroken.frameworks import lightning as unbroken_pl

    is_plugin = name == "AsyncCheckpointIO"
    strategy = SimpleNamespace(checkpoint_io=AsyncCheckpointIO() if is_plugin else None)
    trainer = SimpleNamespace(strategy=strategy, callbacks=[] if is_plugin else [getattr(callbacks, name)()])
    with pytest.raises(ValueError, match=f"{name} (trains before|writes after)"):
        unbroken_pl.Callback(tmp_path / "run").setup(trainer, None, "fit")
    assert not (tmp_path / "run").exists()


@pytest.mark.promise("C11")
def test_a_step_of_fewer_batches_at_the_end_of_an_epoch_is_a_step(jobs: Jobs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Ten batches an epoch: its third step has two of them, and not four.
    trainer = {**EPOCHS, "max_epochs": 2, "accumulate_grad_batches": 4}
    callbacks: dict[str, Any] = {"swa": True, "trainer": trainer, "checkpoints": [{"every_n_train_steps": 2}]}
    ended = jobs.run(run, **callbacks)
    assert result(ended)["step"] == 6, ended.said
    (end,) = read_history(Layout(run)).of_kind("job-end")
    assert end.number("step") == 6
    assert [step for step, _ in read_metrics(Layout(run)).series("loss")] == [1, 2, 3, 4, 5, 6]
    assert "StochasticWeightAveraging" in ended.said


@pytest.mark.promise("C11")
def test_what_cannot_be_resumed_exactly_is_refused_by_name(jobs: Jobs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    refused = jobs.run(run, loader={"num_workers": 2})
    assert refused.code == 1 and "StatefulDataLoader" in refused.said
    refused = jobs.run(run, checkpoints=[])
    assert refused.code == 1 and "ModelCheckpoint" in refused.said
    killed(jobs.run(run, interrupts=[{"step": 13, "number": KILL}]))
    refused = jobs.run(run, loader={"batch_size": 2})
    assert refused.code == 1 and "batch_size:" in refused.said
    # Back to an older one: once, and the newer ones are set aside.
    back = str(run / "checkpoint-8" / "lightning.ckpt")
    killed(jobs.run(run, ckpt_path=back, interrupts=[{"step": 13, "number": KILL}]))
    assert (run / "abandoned").is_dir() and steps_of(run)[0] == 12
    resumed = jobs.run(run, ckpt_path=back)
    assert resumed_from(run)[-1] == 12 and resumed.code == 0


@pytest.mark.promise("C11", "X6")
def test_a_lost_directory_comes_back_from_a_mirror_and_for_pytorch_lightning_too(jobs: Jobs, tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    job: dict[str, Any] = {"package": "pytorch_lightning", "options": {"mirror": f"file://{tmp_path / 'mirror'}"}}
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, package="pytorch_lightning")
    run = tmp_path / "run"
    stopped = jobs.run(run, interrupts=[{"step": 13, "number": TERM}], **job)
    assert result(stopped)["step"] == 13, stopped.said
    shutil.rmtree(run)
    resumed = jobs.run(run, **job)
    assert resumed_from(run)[-1] == 13 and resumed.digest == whole.digest, resumed.said


@pytest.mark.promise("C11")
def test_an_exception_is_recorded_as_an_error_also_if_the_script_catches_it(jobs: Jobs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for catches in (False, True):
        jobs.run(run, interrupts=[{"step": 6, "raises": "a batch is odd"}], catches=catches)
    ends = read_history(Layout(run)).of_kind("job-end")
    assert [(event.text("status"), event.text("reason")) for event in ends] == 2 * [
        ("error", "ValueError: a batch is odd")
    ]


@pytest.mark.promise("C11")
@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy"])
def test_strategies_that_write_by_themselves_are_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    from lightning.pytorch import strategies

    from unbroken.frameworks import lightning as unbroken_pl

    trainer = SimpleNamespace(strategy=getattr(strategies, name)())
    with pytest.raises(ValueError, match=name):
        unbroken_pl.Callback(tmp_path / "run").setup(trainer, None, "fit")
    assert not (tmp_path / "run").exists()


SAVED: dict[str, Any] = {"checkpoints": [], "options": {"save_steps": 4}}


@pytest.mark.promise("C11")
def test_a_due_save_before_a_validation_is_made_at_the_next_quiet_step(jobs: Jobs, tmp_path: Path) -> None:
    # Each multiple of 4 has a validation; step 10 is the last of its epoch.
    validated = {"limit_val_batches": 2, "val_check_interval": 4, "check_val_every_n_epoch": None, "max_steps": 14}
    run = tmp_path / "run"
    killed(jobs.run(run, interrupts=[{"step": 10, "number": KILL}], **SAVED, trainer=validated))
    assert steps_of(run) == [9, 5]


@pytest.mark.promise("C11")
def test_a_save_during_a_validation_does_not_stand_for_the_step_after_it(jobs: Jobs, tmp_path: Path) -> None:
    validated = {"limit_val_batches": 2, "val_check_interval": 4}
    best = [{"monitor": "val_loss", "save_last": False}]
    job: dict[str, Any] = {"checkpoints": best, "options": {"save_steps": 5}, "trainer": validated}
    killed(jobs.run(tmp_path / "run", interrupts=[{"step": 7, "number": KILL}], **job))
    assert steps_of(tmp_path / "run") == [5, 4]


@pytest.mark.promise("C11")
@pytest.mark.parametrize("noise", ["validation", "epoch"])
def test_where_no_step_is_quiet_it_saves_and_stops_behind_a_validation_or_an_epoch(
    jobs: Jobs, tmp_path: Path, noise: str
) -> None:
    trainer: dict[str, Any] = {"limit_val_batches": 2, "val_check_interval": 1, "max_steps": 14}
    if noise == "epoch":
        trainer = {"limit_train_batches": 1, "max_epochs": 14, "max_steps": -1}
    job: dict[str, Any] = {**SAVED, "trainer": trainer}
    whole = jobs.run(tmp_path / "whole", plain=True, ckpt_path=None, **job)
    run = tmp_path / "run"
    killed(jobs.run(run, interrupts=[{"step": 7, "number": KILL}], **job))
    assert steps_of(run) == [5]
    stopped = jobs.run(run, interrupts=[{"step": 6, "number": TERM}], **job)
    assert result(stopped)["is_stopped"] and steps_of(run) == [7, 5], stopped.said
    resumed = jobs.run(run, **job)
    assert resumed_from(run)[1:] == [5, 7] and resumed.digest == whole.digest, resumed.said


@pytest.mark.promise("C11")
def test_where_no_save_would_be_exact_a_warning_says_so_once(jobs: Jobs, tmp_path: Path) -> None:
    # With max_steps Lightning starts the end of an epoch over.
    ended = jobs.run(tmp_path / "run", **SAVED, trainer={"limit_train_batches": 1, "max_steps": 24})
    assert ended.said.count("no save and no stop for 10 steps") == 1 and steps_of(tmp_path / "run") == [24]


@pytest.mark.promise("C11")
def test_where_two_optimizers_count_two_steps_a_batch_a_multiple_that_was_crossed_is_saved(
    jobs: Jobs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job: dict[str, Any] = {"checkpoints": [], "options": {"save_steps": 5, "keep_last_k": 9}, "manual": True}
    killed(jobs.run(run, interrupts=[{"step": 18, "number": KILL}], **job))
    assert steps_of(run) == [16, 10, 6]


@pytest.mark.promise("C11")
def test_another_schedule_is_refused_by_name_and_another_rate_is_named(jobs: Jobs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    killed(jobs.run(run, interrupts=[{"step": 6, "number": KILL}]))
    refused = jobs.run(run, cosine=True)
    assert refused.code == 1 and "lr_schedulers: ['StepLR'] before, ['CosineAnnealingLR'] now" in refused.said
    resumed = jobs.run(run, lr=1.0, interrupts=[{"step": 10, "number": KILL}])
    assert resumed.said.count("optimizer.lr was 0.01 when the checkpoint was saved and is 1 now") == 1, resumed.said
    # The checkpoint's is used, so it is what the next job compares with; an unchanged script is not warned.
    again = jobs.run(run)
    assert "when the checkpoint was saved" not in again.said and again.code == 0, again.said
    assert result(again)["rates"][0][0] < 0.01


@pytest.mark.promise("C11")
def test_a_training_that_early_stopping_ended_says_so(jobs: Jobs, tmp_path: Path) -> None:
    job: dict[str, Any] = {"early": True, "checkpoints": [{}], "trainer": {**EPOCHS, "max_epochs": 8}}
    run = tmp_path / "run"
    for _ in range(2):
        jobs.run(run, **job)
        end = read_history(Layout(run)).of_kind("job-end")[-1]
        assert (end.text("status"), end.text("reason")) == ("completed", "ended before its target by EarlyStopping")
    asked = [sys.executable, "-m", "unbroken", "outcome", str(run)]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert "EarlyStopping" in said and "done: the training has ended" in said
