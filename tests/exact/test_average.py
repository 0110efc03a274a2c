"""Averaged weights through kills, stops and resizes: the bits of one job, in every evaluation."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.exact import gpt_world
from tests.exact.gpt_world import Job, tiny, tokenize_text, write_text
from tests.exact.test_gpt_train import at, bits, directory, fingerprint, refused, run_jobs
from unbroken import errors
from unbroken.config import Config
from unbroken.gpt.checkpoint import find_model
from unbroken.gpt.device import RankDevice
from unbroken.gpt.evaluate import Evaluation
from unbroken.gpt.training_data import validation_stream
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.testing.worlds import logs, spawn
from unbroken.world import World

STEPS = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenize_text(write_text(tmp_path_factory.mktemp("text")), tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The config of a run that one rank has trained in one job, with an evaluation after every step."""
    run = tmp_path_factory.mktemp("alone") / "run"
    config = tiny(data, run, max_steps=STEPS, save_steps=2, eval_steps=1, max_eval_batches=3, ema_decay=0.5)
    run_jobs(config, [Job()])
    return config


@pytest.mark.promise("C16")
def test_killed_and_resized_it_evaluates_to_the_bits_of_one_job_at_every_step(alone: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    jobs = (Job(ranks=2, sharding="fsdp2", kill_in=4), Job(ranks=1, stop_at=5), Job(ranks=2))
    run_jobs(at(alone, run), jobs)
    reference = bits(directory(alone))
    assert all(row["ema_val_loss"] != row["val_loss"] for row in reference.values())
    assert bits(run) == reference and len(reference) == STEPS
    assert fingerprint(run) == fingerprint(directory(alone))


@pytest.mark.promise("C16")
def test_what_a_checkpoint_holds_evaluates_to_what_was_logged_before_it_was_saved(alone: Config) -> None:
    logged = bits(directory(alone))
    for step in (4, STEPS):
        found = find_model(f"{directory(alone)}@{step}", is_averaged=True)
        loaded = found.load(gpt_world.CPU)
        evaluate = Evaluation(validation_stream(alone), 2, 3, RankDevice(World(0, 1), gpt_world.CPU))
        assert evaluate(loaded.model).loss.hex() == logged[step]["ema_val_loss"]


def test_it_can_be_turned_on_off_and_changed_between_jobs_if_the_field_is_accepted(
    alone: Config, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    plain = at(alone, run, ema_decay=None)
    run_jobs(plain, [Job(stop_at=2)])
    kept = replace(plain, training=replace(plain.training, ema_decay=0.9))
    error = refused(kept)
    assert isinstance(error, errors.ConfigDiffers)
    accept = ("training.ema_decay",)
    [ended] = spawn(1, gpt_world.train, kept, Job(stop_at=4), accept)
    assert ended.is_good, logs([ended])
    row = bits(run)[3]
    assert row["ema_val_loss"] != row["val_loss"]
    away = abs(float.fromhex(row["ema_val_loss"]) - float.fromhex(bits(run)[2]["val_loss"]))
    assert away < abs(float.fromhex(bits(run)[1]["val_loss"]) - float.fromhex(row["val_loss"])), (
        "it begins with the weights of the checkpoint, not with those of the first step"
    )
    [ended] = spawn(1, gpt_world.train, plain, Job(), accept)
    assert ended.is_good and ended.value.is_completed, logs([ended])
    assert "ema_val_loss" not in bits(run)[STEPS]
    assert all(not fact.values["unused"] for fact in read_history(Layout(run)).of_kind("accept"))
