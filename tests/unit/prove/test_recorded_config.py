"""The config that some steps of a run were computed with, from its record and what its journal says of later jobs."""

import time
from pathlib import Path

import pytest

from unbroken.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from unbroken.config.changes import with_values
from unbroken.errors import BadUsage, RunRecordDamaged
from unbroken.prove.drilled_command import Relocation, config_of_jobs, recorded_config
from unbroken.records.journal import Journal
from unbroken.records.layout import Layout

STARTED = Config(
    data=DataConfig(path="data", tokenizer="bytes"),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    training=TrainingConfig(global_batch_size=16, output_dir="runs/a", resume="scratch"),
)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A run whose second and third job had another rate, the third another number of workers too."""
    found = Layout(tmp_path / "run")
    found.run.mkdir()
    found.config.write_text(STARTED.to_json())
    rate = {"optimizer.learning_rate": [1e-3, 5e-4]}
    for job, changes in ((2, rate), (3, {**rate, "data.num_workers": [STARTED.data.num_workers, 9]})):
        journal = Journal(found, job, clock=time.time)
        journal.write("config", changes=changes, is_replaced=False)
        journal.close()
    return found


def test_a_run_that_no_train_started_has_no_config(tmp_path: Path) -> None:
    assert recorded_config(Layout(tmp_path)) is None


def test_a_record_that_was_changed_by_hand_is_refused(layout: Layout) -> None:
    layout.config.write_text(layout.config.read_text().replace('"seed": 42', '"seed": 43'))
    with pytest.raises(RunRecordDamaged, match="changed after it was written"):
        recorded_config(layout)


@pytest.mark.parametrize(("jobs", "rate"), [((), 1e-3), ((1,), 1e-3), ((2,), 5e-4), ((2, 3), 5e-4)])
def test_what_a_later_job_changed_counts_for_its_steps(layout: Layout, jobs: tuple[int, ...], rate: float) -> None:
    started = recorded_config(layout)
    assert started == STARTED
    assert config_of_jobs(layout, STARTED, jobs).optimizer.learning_rate == rate


def test_a_change_between_the_two_ends_is_named_and_one_that_no_bit_depends_on_is_not(layout: Layout) -> None:
    with pytest.raises(BadUsage, match=r"jobs 1 and 2 of .* differ in optimizer.learning_rate; choose A and B"):
        config_of_jobs(layout, STARTED, (1, 2))
    assert config_of_jobs(layout, STARTED, (2, 3)).data.num_workers == 9


def test_a_recomputation_is_sent_elsewhere_and_all_else_stays(tmp_path: Path) -> None:
    found = with_values(STARTED, Relocation(tmp_path, Path("/data")).changes())
    assert (found.training.output_dir, found.training.resume, found.data.path) == (str(tmp_path), "auto", "/data")
    assert found.optimizer == STARTED.optimizer and found.training.global_batch_size == 16
    assert with_values(STARTED, {"training.unheard_of": 1}) == STARTED
