"""What the trainer writes beside checkpoints, under every crash: the next job finds it whole, or writes it."""

from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.config import Config, DataConfig
from unbroken.config.changes import Difference
from unbroken.config.fields import ResumeClass
from unbroken.data.ingest.encoders import FILE_NAME, ByteEncoder, TokenizerFile
from unbroken.disk import Disk
from unbroken.files import Files
from unbroken.gpt.run_files import IDENTITY, TOKENIZER, keep_config, keep_tokenizer
from unbroken.launch.accepted import read_accepted
from unbroken.launch.started import Started
from unbroken.records.layout import Layout
from unbroken.testing import ERRORS, Kill, MemoryDisk, crash_points, crash_states

LAYOUT = Layout(Path("/run"))
STARTED = Started(Config(data=DataConfig(path="data")).settled(2))
CHANGE = Difference("optimizer.learning_rate", ResumeClass.DECLARED, 3e-4, 1e-4)
ACCEPTING = replace(STARTED, is_recorded=True, taken=(CHANGE,))
CONTENT = b'{"model": {}}'
FAULTS = (Kill("before"), Kill("during"), Kill("after"), *ERRORS)


def a_run() -> MemoryDisk:
    """A run whose first job has just taken it."""
    return MemoryDisk([LAYOUT.run])


def keeps_its_records(disk: Disk) -> object:
    """What the first job of a run writes."""
    files = Files(disk)
    keep_config(LAYOUT, STARTED, files)
    keep_tokenizer(LAYOUT, ByteEncoder.identity, TokenizerFile("own", CONTENT), files)
    return None


def with_its_records() -> MemoryDisk:
    """A run whose second job has just taken it."""
    disk = a_run()
    keeps_its_records(disk)
    return disk


def accepts_a_value(disk: Disk) -> object:
    """What a job writes that changes a value by ``--accept``, and after it one that begins the run anew."""
    keep_config(LAYOUT, ACCEPTING, Files(disk), job=2, step=7)
    keep_config(LAYOUT, STARTED, Files(disk))
    return None


@pytest.mark.promise("U8")
def test_after_every_crash_the_accepted_values_are_the_old_ones_or_the_new_ones() -> None:
    seen = set()
    for trial in crash_points(with_its_records, accepts_a_value, FAULTS):
        for disk in (trial.disk, *(each for _, each in crash_states(trial.disk))):
            files = Files(disk)
            assert files.read_bytes(LAYOUT.config, limit_bytes=1 << 20) == STARTED.config.to_json().encode()
            seen.add(tuple(change.now for change in read_accepted(LAYOUT, files) or ()))
    assert seen == {(), (1e-4,)}


@pytest.mark.promise("X7")
def test_after_every_crash_a_record_is_whole_or_absent_and_the_next_job_completes_them() -> None:
    looked = 0
    for trial in crash_points(a_run, keeps_its_records, FAULTS):
        for disk in (trial.disk, *(each for _, each in crash_states(trial.disk))):
            files = Files(disk)
            if files.find(LAYOUT.config) is not None:
                assert files.read_bytes(LAYOUT.config, limit_bytes=1 << 20) == STARTED.config.to_json().encode()
            folder = LAYOUT.run / TOKENIZER
            if files.find(folder) is not None and files.find(folder / IDENTITY) is not None:
                assert files.read_bytes(folder / FILE_NAME, limit_bytes=1 << 20) == CONTENT
            if files.find(LAYOUT.run) is not None:
                keeps_its_records(disk)
                assert files.read_bytes(folder / FILE_NAME, limit_bytes=1 << 20) == CONTENT
            looked += 1
    assert looked > 20
