"""Real power cuts: a process is killed before each call, the file system loses what was not synced, and comes back."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.power import PoweredDisk, powered_disk
from tests.crash.scenes import ROOT, SCENES, Mixed, Scene, examine
from tests.crash.syscalls import REPOSITORY, driver, points, strike
from unbroken.store.directory import Store

KINDS = [
    pytest.param("ext4", marks=pytest.mark.needs("strace", "root", "loop", "e2fsprogs")),
    pytest.param("xfs", marks=pytest.mark.needs("strace", "root", "loop", "xfsprogs")),
]
STAGED = [
    scene
    for scene in SCENES
    if scene.title
    in (
        "first save",
        "save of a step that is there",
        "save that releases old ones",
        "sweep",
        "resume with damaged ones",
        "rewind",
        "seal",
    )
]


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PoweredDisk]:
    with powered_disk(request.param, tmp_path) as found:
        yield found


class Plant:
    """A scene on a real disk with a plug."""

    def __init__(self, scene: Scene, disk: PoweredDisk, trace: Path) -> None:
        self.scene = scene
        self.disk = disk
        self.trace = trace
        self._base = disk.mounted / "base"
        self._base.mkdir()
        scene.prepare(Store(self._base / ROOT.name))
        self._copies = 0

    def refresh(self) -> Path:
        """The store as it is before the action, durable."""
        shutil.rmtree(self._here(), ignore_errors=True)
        self._copies += 1
        shutil.copytree(self._base, self._here(), symlinks=True)
        self.disk.sync()
        return self._here() / ROOT.name

    def _here(self) -> Path:
        return self.disk.mounted / f"run-{self._copies}"

    def problem(self, output: str) -> str | None:
        """What does not hold after the power came back."""
        try:
            examine(Store(self._here() / ROOT.name), self.scene, must=self.scene.after if "reached" in output else None)
        except Mixed as problem:
            return str(problem)
        return None


def _cut_everywhere(plant: Plant) -> Iterator[str]:
    title = plant.scene.title
    found = points(title, plant.refresh(), plant.trace)
    assert len(found) > 10
    plant.disk.cut_power()
    if problem := plant.problem("reached"):
        yield f"power cut after the end: {problem}"
    for point in found:
        run = strike(title, plant.refresh(), plant.trace, point, "signal=SIGKILL")
        plant.disk.cut_power()
        if problem := plant.problem(run.stdout):
            yield f"power cut before {point}: {problem}"


@pytest.mark.promise("C2", "G3", "M10", "X7")
@pytest.mark.parametrize("scene", STAGED, ids=str)
@pytest.mark.parametrize("disk", KINDS, indirect=True)
def test_a_power_cut_before_any_call_leaves_the_old_state_or_the_new_one(
    disk: PoweredDisk, scene: Scene, tmp_path: Path
) -> None:
    assert list(_cut_everywhere(Plant(scene, disk, tmp_path / "trace"))) == []


@pytest.mark.parametrize("disk", KINDS, indirect=True)
def test_the_plug_really_is_pulled(disk: PoweredDisk) -> None:
    synced, unsynced = disk.mounted / "synced", disk.mounted / "unsynced"
    synced.write_bytes(b"kept")
    disk.sync()
    unsynced.write_bytes(b"lost")
    os.rename(synced, disk.mounted / "renamed")
    disk.cut_power()
    assert synced.read_bytes() == b"kept"
    assert not unsynced.exists()


@pytest.mark.parametrize("forgotten", ["sync_file", "sync_directory"])
@pytest.mark.parametrize("disk", KINDS, indirect=True)
def test_a_forgotten_sync_would_be_noticed(disk: PoweredDisk, forgotten: str, tmp_path: Path) -> None:
    plant = Plant(STAGED[0], disk, tmp_path / "trace")
    command = [*driver(plant.scene.title, plant.refresh()), forgotten]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    disk.cut_power()
    assert plant.problem(run.stdout) is not None
