"""Real processes, killed before every call that changes the file system, refused every such call, and short of room."""

import io
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.scenes import PARTS, SCENES, Mixed, Scene, examine, look, nobody_is_live, save
from tests.crash.syscalls import REPOSITORY, driver, points, strike
from unbroken.errors import StorageFailed
from unbroken.store.commit import begin
from unbroken.store.directory import Store

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
    )
]
STORAGE_FAILED = 74


class Workplace:
    """Fresh copies of what stands before a scene."""

    def __init__(self, scene: Scene, directory: Path) -> None:
        self.scene = scene
        self.trace = directory / "trace"
        self.root = directory / "here" / "checkpoints"
        self._base = directory / "base"
        self._base.mkdir()
        scene.prepare(Store(self._base / "checkpoints"))

    def refresh(self) -> None:
        shutil.rmtree(self.root.parent, ignore_errors=True)
        shutil.copytree(self._base, self.root.parent, symlinks=True)

    def problem(self, output: str) -> str | None:
        """What does not hold in what a struck process left."""
        try:
            examine(Store(self.root), self.scene, must=self.scene.after if "reached" in output else None)
        except Mixed as problem:
            return str(problem)
        return None


def _strike_everywhere(place: Workplace, effect: str, codes: tuple[int, ...]) -> Iterator[str]:
    """Every call of a scene that was struck and did not end well."""
    place.refresh()
    found = points(place.scene.title, place.root, place.trace)
    assert len(found) > 5
    assert place.problem("reached") is None
    for point in found:
        place.refresh()
        run = strike(place.scene.title, place.root, place.trace, point, effect)
        problem = place.problem(run.stdout)
        if run.returncode not in codes:
            problem = f"exit {run.returncode}: {run.stderr[-300:]}"
        if problem:
            yield f"{effect} at {point}: {problem}"


@pytest.mark.needs("strace")
@pytest.mark.promise("C2", "G3", "M10", "X7")
@pytest.mark.parametrize("scene", STAGED, ids=str)
def test_a_process_killed_before_any_call_leaves_the_old_state_or_the_new_one(scene: Scene, tmp_path: Path) -> None:
    assert list(_strike_everywhere(Workplace(scene, tmp_path), "signal=SIGKILL", (-9, 137))) == []


@pytest.mark.needs("strace")
@pytest.mark.parametrize("effect", ["error=EIO", "error=ENOSPC"])
def test_a_process_refused_any_call_reports_it_and_loses_nothing(effect: str, tmp_path: Path) -> None:
    scene = next(scene for scene in STAGED if scene.title == "save that releases old ones")
    assert list(_strike_everywhere(Workplace(scene, tmp_path), effect, (0, STORAGE_FAILED))) == []


def test_a_file_that_may_not_grow_gives_a_short_write_then_an_error_and_the_old_state(tmp_path: Path) -> None:
    scene = next(scene for scene in SCENES if scene.title == "save")
    place = Workplace(scene, tmp_path)
    place.refresh()
    run = subprocess.run(
        driver(scene.title, place.root),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50)),
    )
    assert run.returncode == STORAGE_FAILED, run.stderr
    assert "File too large" in run.stderr
    assert "reached" not in run.stdout
    examine(Store(place.root), scene, must=scene.before)


def fill(file: io.FileIO) -> None:
    """Write until the disk is full."""
    while True:
        file.write(bytes(4096))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "small"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mounted)], check=True)
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.needs("root")
def test_a_full_disk_fails_the_save_loudly_and_the_next_one_works_when_there_is_room(small_disk: Path) -> None:
    store = Store(small_disk / "checkpoints")
    save(store, 10, "a")
    draft = begin(store, step=20, job="b")
    with pytest.raises(StorageFailed, match="No space left"):
        draft.write_part(PARTS[1], [bytes(1 << 20)])
    assert look(store) == ((10, "a"), ())
    full = small_disk / "somebody-elses"
    with full.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        fill(file)
    with pytest.raises(StorageFailed, match="No space left"):
        save(store, 20, "b", live=nobody_is_live)
    assert look(store) == ((10, "a"), ())
    full.unlink()
    save(store, 20, "b", live=nobody_is_live)
    assert look(store) == ((20, "b"), ())
