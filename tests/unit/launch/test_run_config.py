"""What a run was started with decides what a later job may change."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.store.saving import save
from unbroken.config import Config, DataConfig
from unbroken.errors import (
    BadUsage,
    CheckpointsExist,
    ConfigDiffers,
    ConfigInvalid,
    ConfigMissing,
    GptSimpleRun,
    RunRecordDamaged,
)
from unbroken.gpt.run_files import keep_config
from unbroken.launch.run_config import CONFIG_VARIABLE, RunConfig, passed_on, resolve_run_config, taken_over
from unbroken.records.journal import Journal
from unbroken.records.layout import Layout
from unbroken.store.directory import Store


@pytest.fixture
def asked(tmp_path: Path) -> Config:
    config = Config(data=DataConfig(path="data"))
    return replace(config, training=replace(config.training, output_dir=str(tmp_path / "run")))


def record(config: Config, *, has_checkpoint: bool = True) -> None:
    run = Path(config.training.output_dir)
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text(config.to_json())
    if has_checkpoint:
        # One that was set aside as damaged: the run has a past all the same.
        (run / "checkpoints" / "quarantine" / "checkpoint-10").mkdir(parents=True)


def with_rate(config: Config, rate: float) -> Config:
    return replace(config, optimizer=replace(config.optimizer, learning_rate=rate))


def test_a_rank_gets_the_config_that_the_launcher_decoded(asked: Config) -> None:
    # A path that is no valid UTF-8, as Linux allows it.
    odd = with_rate(replace(asked, data=replace(asked.data, path="d\udcff")), 0.1 + 0.2)
    assert taken_over(passed_on(odd, "unbroken train")).config == odd


def test_a_config_that_is_missing_cut_or_too_large_is_an_error(asked: Config) -> None:
    whole = passed_on(asked, "unbroken train")[CONFIG_VARIABLE]
    for environ in ({}, {CONFIG_VARIABLE: ""}, {CONFIG_VARIABLE: whole[:-10]}, {CONFIG_VARIABLE: "no config"}):
        with pytest.raises(BadUsage, match="UNBROKEN_TRAIN_CONFIG"):
            taken_over(environ)
    path = "".join(chr(0x4E00 + number * number % 20_000) for number in range(60_000))
    with pytest.raises(BadUsage, match="too large"):
        passed_on(replace(asked, data=replace(asked.data, path=path)), "unbroken train")


def test_the_first_job_settles_the_global_batch_by_its_ranks(asked: Config) -> None:
    started = resolve_run_config(asked, 3)
    assert started.config.training.global_batch_size == 3 * 4 * 4
    assert not started.is_recorded and not started.is_replaced


@pytest.mark.promise("G1")
def test_a_later_job_keeps_it_on_any_number_of_ranks(asked: Config) -> None:
    record(asked.settled(3))
    started = resolve_run_config(asked, 5)
    assert started.config.training.global_batch_size == 48
    assert started.is_recorded and not started.differences.fixed


@pytest.mark.promise("G5")
def test_every_field_that_may_not_change_is_named_at_once(asked: Config) -> None:
    record(asked.settled(1))
    model = replace(asked.model, n_embd=1024, n_layer=3)
    with pytest.raises(ConfigDiffers) as caught:
        resolve_run_config(with_rate(replace(asked, model=model), 1e-4), 1)
    changes = {change.field: change.is_fixed for change in caught.value.changes}
    assert changes == {"model.n_embd": True, "model.n_layer": True, "optimizer.learning_rate": False}


def test_a_declared_change_continues_when_it_is_accepted_and_a_fixed_one_never(asked: Config) -> None:
    record(asked.settled(1))
    started = resolve_run_config(with_rate(asked, 1e-4), 1, accept=["optimizer.learning_rate"])
    assert [each.field for each in started.differences.declared] == ["optimizer.learning_rate"]
    with pytest.raises(ConfigDiffers):
        resolve_run_config(replace(asked, model=replace(asked.model, n_embd=1024)), 1, accept=["model.n_embd"])


def test_a_free_change_is_only_noted(asked: Config) -> None:
    record(asked.settled(1))
    started = resolve_run_config(replace(asked, training=replace(asked.training, logging_steps=3)), 1)
    assert [each.field for each in started.differences.free] == ["training.logging_steps"]


def test_a_run_that_never_saved_may_be_started_with_another_config(asked: Config) -> None:
    record(asked.settled(2), has_checkpoint=False)
    assert resolve_run_config(asked, 1).config.training.global_batch_size == 32, "what was settled stays settled"
    changed = resolve_run_config(with_rate(asked, 1e-4), 1)
    assert changed.is_replaced and not changed.is_recorded
    assert changed.config.training.global_batch_size == 16


def test_a_start_from_scratch_by_force_begins_a_record_of_its_own(asked: Config) -> None:
    record(asked.settled(2))
    scratch = replace(asked, training=replace(asked.training, resume="scratch", seed=7))
    assert resolve_run_config(scratch, 1, force=True).is_replaced
    with pytest.raises(ConfigDiffers):
        resolve_run_config(scratch, 1)


def accepted(config: Config, *accept: str, job: int, step: int) -> RunConfig:
    """A job that accepts, up to its first step."""
    started = resolve_run_config(config, 1, accept=accept)
    keep_config(Layout(Path(config.training.output_dir)), started, job=job, step=step)
    return started


@pytest.mark.promise("U8")
def test_an_accepted_value_is_the_runs_until_another_one_is_accepted(asked: Config) -> None:
    record(asked.settled(1))
    accepted(with_rate(asked, 1e-4), "optimizer.learning_rate", job=2, step=10)
    # The first value, or a third one, in the config file.
    for rate in (asked.optimizer.learning_rate, 5e-5):
        started = resolve_run_config(with_rate(asked, rate), 1)
        assert started.config.optimizer.learning_rate == 1e-4
        assert [(kept.field, kept.now) for kept in started.kept] == [("optimizer.learning_rate", rate)]
        assert [each.now for each in started.differences.declared] == [1e-4], "what replay reads from the journal"
    with pytest.raises(ConfigDiffers) as caught:
        resolve_run_config(replace(asked, optimizer=replace(asked.optimizer, weight_decay=0.3)), 1)
    assert [change.field for change in caught.value.changes] == ["optimizer.weight_decay"]
    # Back to the first value needs a word, and is then the run's.
    started = accepted(asked, "optimizer.learning_rate", job=3, step=20)
    assert started.config.optimizer.learning_rate == asked.optimizer.learning_rate and not started.kept
    again = resolve_run_config(with_rate(asked, 1e-4), 1)
    assert again.config.optimizer.learning_rate == asked.optimizer.learning_rate
    assert [(each.job, each.step, each.was, each.now) for each in again.accepted] == [
        (2, 10, 3e-4, 1e-4),
        (3, 20, 1e-4, 3e-4),
    ]


@pytest.mark.promise("U8")
def test_values_of_the_run_that_do_not_go_with_the_config_are_refused(asked: Config) -> None:
    record(asked.settled(1))
    shorter = replace(asked, training=replace(asked.training, max_steps=150))
    accepted(shorter, "training.max_steps", job=2, step=10)
    longer = replace(asked, optimizer=replace(asked.optimizer, warmup_steps=200))
    with pytest.raises(ConfigInvalid):
        resolve_run_config(longer, 1, accept=["optimizer.warmup_steps"])


def test_a_record_of_accepted_values_that_was_changed_by_hand_is_refused(asked: Config) -> None:
    record(asked.settled(1))
    accepted(with_rate(asked, 1e-4), "optimizer.learning_rate", job=2, step=10)
    path = Path(asked.training.output_dir, "accepted.json")
    path.write_text(path.read_text().replace("0.0001", "0.0002"))
    with pytest.raises(RunRecordDamaged):
        resolve_run_config(asked, 1)


@pytest.mark.promise("U8", "U9")
def test_a_start_from_scratch_forgets_what_was_accepted_and_is_one_request_per_config(asked: Config) -> None:
    record(asked.settled(1))
    accepted(with_rate(asked, 1e-4), "optimizer.learning_rate", job=2, step=10)
    scratch = replace(asked, training=replace(asked.training, resume="scratch"))
    started = resolve_run_config(scratch, 1, force=True)
    assert started.is_replaced and started.config.optimizer == asked.optimizer
    keep_config(Layout(Path(asked.training.output_dir)), started)
    assert resolve_run_config(asked, 1).config.optimizer == asked.optimizer
    assert resolve_run_config(with_rate(scratch, 1e-4), 1, force=True).resume != started.resume
    assert resolve_run_config(scratch, 1, force=True).resume == started.resume


def journalled(config: Config, started: RunConfig, job: int, step: int) -> None:
    """What the trainer journals at the start of a job."""
    journal = Journal(Layout(Path(config.training.output_dir)), job, clock=lambda: 0.0)
    journal.write("resume", step=step)
    changes = (*started.differences.declared, *started.differences.free)
    journal.write("config", changes={each.field: [each.started_with, each.now] for each in changes})
    journal.close()


def test_a_run_with_checkpoints_and_no_config_json_is_refused_until_accepted(asked: Config) -> None:
    record(asked.settled(1))
    path = Path(asked.training.output_dir, "config.json")
    path.unlink()
    with pytest.raises(ConfigMissing):
        resolve_run_config(with_rate(asked, 1e-4), 1)
    started = resolve_run_config(with_rate(asked, 1e-4), 1, accept=["config.json"])
    assert started.is_rewritten
    keep_config(Layout(path.parent), started, job=2, step=10)
    assert resolve_run_config(with_rate(asked, 1e-4), 1).is_recorded
    with pytest.raises(ConfigDiffers):
        resolve_run_config(asked, 1)


def test_accepted_values_whose_record_is_missing_are_rebuilt_from_the_journal(asked: Config) -> None:
    record(asked.settled(1))
    layout = Layout(Path(asked.training.output_dir))
    changes = ((2, with_rate(asked, 1e-4)), (3, asked), (4, with_rate(asked, 5e-5)))
    for job, config in changes:
        started = accepted(config, "optimizer.learning_rate", job=job, step=10 * job)
        journalled(config, started, job, 10 * job)
        kept = layout.accepted.read_bytes()
        layout.accepted.unlink()
        rebuilt = resolve_run_config(asked, 1)
        assert rebuilt.is_rebuilt
        assert rebuilt.config.optimizer == config.optimizer, f"job {job}"
        keep_config(layout, rebuilt, job=job + 1, step=99)
        assert layout.accepted.read_bytes() == kept
    assert not resolve_run_config(asked, 1).is_rebuilt


def test_scratch_where_there_are_checkpoints_asks_for_force_whatever_else_differs(asked: Config) -> None:
    record(asked.settled(1))
    save(Store(Path(asked.training.output_dir, "checkpoints")), 4)
    scratch = replace(asked, training=replace(asked.training, resume="scratch", seed=7))
    with pytest.raises(CheckpointsExist):
        resolve_run_config(scratch, 1)
    assert resolve_run_config(scratch, 1, force=True).is_replaced


def test_a_record_that_was_changed_by_hand_is_refused(asked: Config) -> None:
    record(asked.settled(1))
    path = Path(asked.training.output_dir, "config.json")
    path.write_text(path.read_text().replace('"seed": 42', '"seed": 43'))
    with pytest.raises(RunRecordDamaged) as caught:
        resolve_run_config(asked, 1)
    assert caught.value.exit_code == 3
    assert caught.value.help()[0].command == f"mv {path} {path}.bad"


@pytest.mark.parametrize("resume", ["auto", "scratch"])
def test_a_run_of_gpt_simple_is_recognised_and_left_alone(asked: Config, resume: str) -> None:
    run = Path(asked.training.output_dir)
    for name in ("checkpoint-9", "checkpoint-12-shutdown"):
        (run / "checkpoints" / name / "model").mkdir(parents=True)
        # Its loss is `Infinity` before the first log: no JSON.
        (run / "checkpoints" / name / "trainer_state.json").write_text('{"step": 9, "metrics": {"loss": Infinity}}')
        (run / "checkpoints" / name / "model" / "pytorch_model.bin").write_bytes(b"pickle")
    asked = replace(asked, training=replace(asked.training, resume=resume))
    with pytest.raises(GptSimpleRun) as refused:
        resolve_run_config(asked, 1, force=True)
    assert refused.value.checkpoints == ("checkpoint-9", "checkpoint-12-shutdown")


def test_a_run_of_gpt_simple_without_a_checkpoint_is_recognised_by_its_config(asked: Config) -> None:
    run = Path(asked.training.output_dir)
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text('{"model": {}, "data": {}, "optimizer": {}, "training": {}}')
    with pytest.raises(GptSimpleRun):
        resolve_run_config(asked, 1)
