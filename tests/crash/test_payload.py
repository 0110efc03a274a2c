"""A save of tensors under every crash: afterwards there is the old state or the new one, whole and bit for bit."""

from pathlib import Path

import pytest
import torch

from tests.unit.state.payloads import differing, load, poisoned, save
from unbroken.disk import Disk
from unbroken.errors import EvidenceMissing, StorageError
from unbroken.files import Files
from unbroken.store.directory import Store
from unbroken.testing import ERRORS, FaultyDisk, Ignore, Kill, MemoryDisk, always, crash_points, crash_states

ROOT = Path("/store")
FAULTS = (Kill("before"), Kill("during"), Kill("after"), *ERRORS)


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((30,), float(step)), "model.b": torch.full((4, 5), step)}


def with_the_first() -> MemoryDisk:
    """A store that has step 1."""
    disk = MemoryDisk([ROOT])
    save(Store(ROOT, Files(disk)), tensors(1), step=1)
    disk.sync_all()
    return disk


def saves_the_second(disk: Disk) -> object:
    """Plan, stage, write, describe and commit step 2."""
    return save(Store(ROOT, Files(disk)), tensors(2), step=2)


def steps_found(disk: Disk) -> list[int]:
    """The steps under a final name; each must hold its tensors whole."""
    store = Store(ROOT, Files(disk))
    found = [step for step in (1, 2) if store.files.find(store.path(f"checkpoint-{step}"))]
    for step in found:
        live = poisoned(tensors(step))
        load(store, f"checkpoint-{step}", live)
        assert differing(live, tensors(step)) == []
    return found


@pytest.mark.promise("X7")
def test_after_every_crash_each_checkpoint_under_a_final_name_is_whole() -> None:
    seen = set[int]()
    for trial in crash_points(with_the_first, saves_the_second, FAULTS):
        for disk in (trial.disk, *(found for _, found in crash_states(trial.disk))):
            steps = steps_found(disk)
            assert steps[0] == 1, str(trial)
            if trial.is_finished:
                assert steps == [1, 2], str(trial)
            seen.add(len(steps))
    assert seen == {1, 2}


def test_an_io_error_raises_an_error_of_ours_only() -> None:
    for trial in crash_points(with_the_first, saves_the_second, ERRORS):
        assert trial.raised is None or isinstance(trial.raised, StorageError | EvidenceMissing), str(trial)


@pytest.mark.parametrize("sync", ["sync_file", "sync_directory"])
def test_a_forgotten_sync_does_not_go_unnoticed(sync: str) -> None:
    disk = with_the_first()
    saves_the_second(FaultyDisk(disk, always(sync, Ignore())))
    whole = 0
    states = [found for _, found in crash_states(disk)]
    for found in states:
        try:
            whole += steps_found(found) == [1, 2]
        except Exception:  # noqa: BLE001 - any complaint is the notice
            continue
    assert whole < len(states)
