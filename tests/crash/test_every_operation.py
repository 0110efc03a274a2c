"""Every file operation of every scene, met by a kill, a refusal, a short write and a power cut."""

import errno
import random
import shutil
from pathlib import Path

import pytest

from tests.crash.scenes import ROOT, SCENES, Label, Mixed, Scene, examine
from unbroken.disk import Disk, LocalDisk
from unbroken.errors import StorageError
from unbroken.files import Files
from unbroken.store.directory import Store
from unbroken.testing import (
    ERRORS,
    Kill,
    Killed,
    MemoryDisk,
    Operation,
    Refuse,
    Trial,
    crash_points,
    crash_states,
    tree,
)

every_scene = pytest.mark.parametrize("scene", SCENES, ids=str)
KILLS = (Kill("before"), Kill("during"), Kill("after"))


class Stage:
    """A scene on a disk in memory; ``reached`` says whether the action got to where its result must last."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.reached = False
        self._seen: set[object] = set()

    def fresh(self) -> MemoryDisk:
        disk = MemoryDisk()
        self.scene.prepare(Store(ROOT, Files(disk)))
        disk.sync_all()
        return disk

    def act(self, disk: Disk) -> None:
        self.reached = False
        self.scene.act(Store(ROOT, Files(disk)), self._reach)

    def _reach(self) -> None:
        self.reached = True

    def examine(self, disk: MemoryDisk, where: str, must: Label | None, next_job: str = "next") -> None:
        """Look at a disk that a fault left; one that was looked at before is not looked at again."""
        state = (must, *sorted(tree(disk).items()))
        if state in self._seen:
            return
        self._seen.add(state)
        _examine(Store(ROOT, Files(disk)), self.scene, where, must, next_job)

    def must_find(self, trial: Trial[MemoryDisk]) -> Label | None:
        """The checkpoint that has to be there now; None while the deciding move is on its way."""
        if self.reached:
            return self.scene.after
        if self.scene.publishes and not any(map(self._publishes, trial.operations)):
            return self.scene.before
        return None

    def _publishes(self, operation: Operation) -> bool:
        return operation.name == "rename" and operation.path.name == self.scene.publishes


def _examine(store: Store, scene: Scene, where: str, must: Label | None, next_job: str) -> None:
    try:
        examine(store, scene, must=must, next_job=next_job)
    except Mixed as problem:
        raise AssertionError(f"{where}: {problem}") from problem


@every_scene
@pytest.mark.promise("C2", "G3", "X7")
def test_a_kill_at_any_operation_leaves_the_old_state_or_the_new_one(scene: Scene) -> None:
    stage = Stage(scene)
    for trial in crash_points(stage.fresh, stage.act, KILLS):
        must = stage.must_find(trial)
        assert trial.is_finished or isinstance(trial.raised, Killed)
        stage.examine(trial.disk, str(trial), must)


@every_scene
@pytest.mark.promise("C2", "G3", "M10", "X7")
def test_a_power_cut_at_any_operation_leaves_the_old_state_or_the_new_one(scene: Scene) -> None:
    stage = Stage(scene)
    for trial in crash_points(stage.fresh, stage.act):
        must = stage.must_find(trial)
        for words, disk in crash_states(trial.disk, random.Random(str(trial)), subsets=4):
            stage.examine(disk, f"{trial}, then {words}", must)


@every_scene
@pytest.mark.promise("C2", "G3", "X7")
def test_an_error_at_any_operation_is_reported_and_the_next_save_of_the_same_job_works(scene: Scene) -> None:
    stage = Stage(scene)
    for trial in crash_points(stage.fresh, stage.act, ERRORS):
        must = stage.must_find(trial)
        assert trial.is_finished or isinstance(trial.raised, StorageError), str(trial)
        stage.examine(trial.disk, str(trial), must, next_job="c")


@every_scene
def test_a_refused_look_at_the_disk_never_costs_a_checkpoint(scene: Scene) -> None:
    stage = Stage(scene)
    for trial in crash_points(stage.fresh, stage.act, (Refuse(errno.EIO),), with_reads=True):
        if trial.operation is None or trial.operation.is_mutating:
            continue
        assert trial.is_finished or isinstance(trial.raised, StorageError), str(trial)
        stage.examine(trial.disk, str(trial), stage.must_find(trial))


@every_scene
def test_a_power_cut_after_a_refusal_leaves_the_old_state_or_the_new_one(scene: Scene) -> None:
    stage = Stage(scene)
    for trial in crash_points(stage.fresh, stage.act, (Refuse(errno.EIO),)):
        must = stage.must_find(trial)
        for words, disk in crash_states(trial.disk):
            stage.examine(disk, f"{trial}, then {words}", must)


@every_scene
def test_a_kill_on_the_machines_own_disk_leaves_the_old_state_or_the_new_one(scene: Scene, tmp_path: Path) -> None:
    stage = Stage(scene)
    base, here = tmp_path / "base", tmp_path / "here"
    base.mkdir()
    scene.prepare(Store(base / "checkpoints"))

    def fresh() -> Disk:
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(base, here, symlinks=True)
        return LocalDisk()

    def act(disk: Disk) -> None:
        stage.reached = False
        scene.act(Store(here / "checkpoints", Files(disk)), stage._reach)

    for trial in crash_points(fresh, act):
        _examine(Store(here / "checkpoints"), scene, str(trial), scene.after if stage.reached else None, "next")
