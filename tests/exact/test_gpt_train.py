"""The trainer's promise: killed, stopped and resized on the way, a run has the bits of one job that was left alone."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exact import gpt_world
from tests.exact.gpt_world import STEPS, Job, tiny, tokenize_text, write_text
from unbroken import errors
from unbroken.config import Config
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import is_exact, read_metrics
from unbroken.store.directory import Store
from unbroken.testing.worlds import logs, spawn

CHAIN = (
    Job(ranks=2, workers=1, kill_in=5),
    Job(ranks=1, workers=3, stop_at=6),
    Job(ranks=3, sharding="fsdp2", kill_in=9),
    Job(ranks=4, sharding="fsdp2"),
)


def bits(run: Path) -> dict[int, dict[str, str]]:
    """Losses, norms and rates of every step that counts, in hexadecimal."""
    kept = read_metrics(Layout(run)).kept
    return {step: {name: text for name, text in row.bits.items() if is_exact(name)} for step, row in kept.items()}


def fingerprint(run: Path) -> str:
    found = Store(Layout(run).checkpoints).read_manifest("final").fingerprint
    assert found
    return found


def run_jobs(config: Config, jobs: Sequence[Job]) -> list[Any]:
    results = []
    for job in jobs:
        ended = spawn(job.ranks, gpt_world.train, config, job)
        if job.kill_in is not None:
            assert any(each.exit_code == -signal.SIGKILL for each in ended), logs(ended)
        else:
            assert all(each.is_good for each in ended), logs(ended)
        results.append(ended[0].value)
    return results


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def data(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenize_text(text, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The config of a run that one rank has trained in one job."""
    config = tiny(data, tmp_path_factory.mktemp("alone") / "run")
    [trained] = run_jobs(config, [Job()])
    assert trained.is_completed and trained.step == STEPS
    return config


def at(config: Config, run: Path, **training: Any) -> Config:  # noqa: ANN401
    """The same config for another run."""
    return replace(config, training=replace(config.training, output_dir=str(run), **training))


def directory(config: Config) -> Path:
    return Path(config.training.output_dir)


@pytest.mark.promise("G1", "X1", "C14")
def test_a_chain_of_jobs_on_two_one_three_and_four_ranks_has_the_bits_of_one_job(alone: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    results = run_jobs(at(alone, run), CHAIN)
    assert [each and each.is_completed for each in results] == [None, False, None, True]
    reference = bits(directory(alone))
    assert len(reference) == STEPS
    assert {name for row in reference.values() for name in row} == {"loss", "lr", "grad_norm", "val_loss"}
    assert bits(run) == reference
    assert fingerprint(run) == fingerprint(directory(alone))
    lost = read_metrics(Layout(run)).lost
    assert lost and all(row.bits["loss"] == reference[row.step]["loss"] for row in lost)
    history = read_history(Layout(run))
    assert not history.of_kind("mismatch")
    assert any(fact.values["compared"] for fact in history.of_kind("recomputed")), (
        "steps were computed twice and compared"
    )
    assert all(fact.values["data"]["agrees"] for fact in history.of_kind("commit")), "each sample once"


@pytest.mark.promise("G1")
def test_a_residual_stream_in_fp32_has_the_same_bits_resumed_and_sharded(data: Path, tmp_path: Path) -> None:
    config = tiny(data, tmp_path / "alone", max_steps=4, mixed_precision="bf16")
    config = replace(config, model=replace(config.model, residual_dtype="fp32"))
    run_jobs(config, [Job()])
    run_jobs(at(config, tmp_path / "run"), (Job(stop_at=2), Job(ranks=2, sharding="fsdp2")))
    assert len(bits(tmp_path / "alone")) == 4
    assert bits(tmp_path / "run") == bits(tmp_path / "alone")
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "alone")


@pytest.mark.promise("G19", "G1")
def test_text_that_is_tokenized_on_the_fly_has_the_bits_of_shards_after_a_kill_and_on_two_ranks(
    alone: Config, text: Path, tmp_path: Path
) -> None:
    config = at(alone, tmp_path / "run")
    own = write_text(tmp_path / "text")
    config = replace(config, data=replace(config.data, path=str(own), format="jsonl"))
    run_jobs(config, (Job(kill_in=8), Job(ranks=2)))
    assert bits(tmp_path / "run") == bits(directory(alone))
    assert fingerprint_of_weights(tmp_path / "run") == fingerprint_of_weights(directory(alone))


def fingerprint_of_weights(run: Path) -> dict[str, str]:
    tensors = Store(Layout(run).checkpoints).read_manifest("final").tensors
    return {name: tensor.digest for name, tensor in tensors.items() if name.startswith(("model.", "optimizer."))}


@pytest.mark.promise("X1")
def test_the_opt_out_gives_other_bits_on_two_ranks_so_the_fold_is_what_makes_them_equal(
    alone: Config, tmp_path: Path
) -> None:
    run_jobs(at(alone, tmp_path / "run", exact=False), [Job(ranks=2)])
    assert bits(tmp_path / "run") != bits(directory(alone))


def refused(config: Config, *, ranks: int = 1, accept: Sequence[str] = ()) -> BaseException:
    ended = spawn(ranks, gpt_world.train, config, Job(ranks=ranks), accept)
    assert ended[0].error is not None, logs(ended)
    return ended[0].error


@pytest.mark.promise("G5")
def test_a_resume_with_another_model_seed_or_lane_is_refused_by_name(alone: Config) -> None:
    changed = replace(
        alone,
        model=replace(alone.model, n_embd=64),
        training=replace(alone.training, per_device_batch_size=1, seed=7),
    )
    error = refused(changed)
    assert isinstance(error, errors.ConfigDiffers)
    names = {change.field for change in error.changes}
    assert names == {"model.n_embd", "training.per_device_batch_size", "training.seed"}


def test_more_ranks_than_lanes_are_refused_before_anything_is_built(data: Path, tmp_path: Path) -> None:
    config = tiny(data, tmp_path / "run", global_batch_size=2)
    assert isinstance(refused(config, ranks=2), errors.TooManyRanks)
    assert not (tmp_path / "run").exists()


@pytest.mark.promise("U8")
def test_a_change_that_was_accepted_is_journalled_and_later_jobs_continue_with_it(
    alone: Config, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = at(alone, run)
    run_jobs(config, [Job(stop_at=4)])
    changed = replace(config, optimizer=replace(config.optimizer, learning_rate=1e-3))
    error = refused(changed)
    assert isinstance(error, errors.ConfigDiffers)
    [ended] = spawn(1, gpt_world.train, changed, Job(), ("optimizer.learning_rate",))
    assert ended.is_good and ended.value.is_completed, logs([ended])
    history = read_history(Layout(run))
    assert [fact.values["names"] for fact in history.of_kind("accept")] == [["optimizer.learning_rate"]]
    assert history.of_kind("config")[-1].values["changes"]["optimizer.learning_rate"] == [3e-3, 1e-3]
    assert bits(run)[STEPS] != bits(directory(alone))[STEPS]
    # Killed after it, and continued by the old command, which says neither the new value nor --accept.
    chained = at(alone, tmp_path / "chained")
    run_jobs(chained, [Job(stop_at=4)])
    accepting = replace(chained, optimizer=changed.optimizer)
    spawn(1, gpt_world.train, accepting, Job(kill_in=9), ("optimizer.learning_rate",))
    [trained] = run_jobs(chained, [Job()])
    assert trained.is_completed and bits(tmp_path / "chained") == bits(run)
    history = read_history(Layout(tmp_path / "chained"))
    assert not history.of_kind("mismatch")
    # From step 6 on, or from step 4 where its save was still on its way when the job was killed.
    assert [fact.values["compared"] in (2, 4) for fact in history.of_kind("recomputed")] == [True]
    said = (tmp_path / "chained" / "logs" / "job-0003.log").read_text()
    assert [line for line in said.splitlines() if "optimizer.learning_rate" in line and "step 4" in line]


def bigram_loss(data: Path) -> float:
    """What a table of pairs of bytes, counted over train/, would lose on each byte of val/."""
    train, validation = (np.fromfile(data / split / "00000-000.bin", np.uint16) for split in ("train", "val"))
    counts = np.full((257, 257), 0.1)
    np.add.at(counts, (train[:-1], train[1:]), 1.0)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log(shares[validation[:-1], validation[1:]]).mean())


def test_the_loss_goes_down_and_beats_a_table_of_pairs(data: Path, tmp_path: Path) -> None:
    steps = 160
    config = tiny(data, tmp_path / "run", max_steps=steps, per_device_batch_size=8, global_batch_size=16)
    config = replace(
        config,
        model=replace(config.model, n_embd=64, n_positions=64, dropout=0.0),
        data=replace(config.data, max_length=64),
        optimizer=replace(config.optimizer, learning_rate=5e-3, warmup_steps=10, min_lr_ratio=0.02),
        training=replace(config.training, eval_steps=steps, max_eval_batches=None, logging_steps=10, save_steps=steps),
    )
    [trained] = run_jobs(config, [Job()])
    losses = [row.values["loss"] for _, row in sorted(read_metrics(Layout(tmp_path / "run")).kept.items())]
    assert sum(losses[-10:]) / 10 < sum(losses[:10]) / 10 - 2
    assert trained.val_loss < bigram_loss(data) - 0.1


@pytest.mark.promise("G18")
def test_data_that_is_exhausted_halts_at_the_same_step_with_the_same_weights_on_one_rank_and_on_three(
    data: Path, tmp_path: Path
) -> None:
    found = []
    for ranks in (1, 3):
        run = tmp_path / f"{ranks}"
        large = {"per_device_batch_size": 256, "global_batch_size": 1792, "max_steps": 1_000, "eval_steps": None}
        config = tiny(data, run, **large)
        config = replace(config, data=replace(config.data, allow_bucket_exhaustion=True))
        error = refused(config, ranks=ranks)
        assert isinstance(error, errors.Halted)
        store = Store(Layout(run).checkpoints)
        manifest = store.read_manifest(f"checkpoint-{error.step}-shutdown")
        found.append((error.step, manifest.fingerprint))
        ending = read_history(Layout(run)).of_kind("job-end")[-1].values
        assert (ending["status"], ending["exit_code"]) == ("halted", 4)
    assert found[0] == found[1]
    assert found[0][0] > 1
