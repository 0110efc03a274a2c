"""Folders that each framework wrote by itself: sealed and verified, and the framework still resumes from them."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("deepspeed")
pytest.importorskip("accelerate")

from tests.frameworks.forking import Jobs, forking
from unbroken.store.check import Level, verify
from unbroken.store.directory import Store
from unbroken.store.seal import seal

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@dataclass(frozen=True)
class Written:
    """Who writes a folder, which one it is, and how a second job resumes from it."""

    job: dict[str, Any]
    folder: str
    origin: str
    step: int
    resumes: dict[str, Any] = field(default_factory=dict)


LIGHTNING: dict[str, Any] = {"plain": True, "trainer": {"max_steps": 4}}
DEEPSPEED: dict[str, Any] = {"of": "deepspeed", "plain": True, "stage": 2, "steps": 4}
ACCELERATE: dict[str, Any] = {"of": "accelerate", "plain": True, "project": {"automatic_checkpoint_naming": True}}
LONGER: dict[str, Any] = {"trainer": {"max_steps": 6}}
FOLDERS = {
    "lightning": Written(LIGHTNING, "models", "lightning", 4, LONGER),
    "lightning with deepspeed": Written({**LIGHTNING, "zero": 2}, "models/last.ckpt", "deepspeed", 4, LONGER),
    "deepspeed": Written(DEEPSPEED, "global_step4", "deepspeed", 4, {"steps": 6}),
    "accelerate": Written(ACCELERATE, "checkpoints/checkpoint_7", "accelerate", 32, {"resume": 8}),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with forking(tmp_path_factory.mktemp("jobs"), "tests.frameworks.zero_fits") as started:
        yield started


@pytest.mark.promise("X6")
@pytest.mark.parametrize("framework", FOLDERS)
def test_what_a_framework_wrote_by_itself_is_sealed_verified_and_still_loaded_by_it(
    jobs: Jobs, tmp_path: Path, framework: str
) -> None:
    written, run = FOLDERS[framework], tmp_path / "run"
    environ = {} if framework == "accelerate" else ALONE
    ended = jobs.run(run, environ, **written.job)
    assert ended.code == 0, ended.said
    folder = run / written.folder
    before = tmp_path / "before"
    shutil.copytree(folder, before)
    store = Store(folder.parent)
    sealed = seal(store, folder.name, at_ns=time.time_ns(), step=written.step)
    assert (sealed.manifest.origin, sealed.manifest.step) == (written.origin, written.step)
    assert verify(store, folder.name, Level.FULL).is_sound
    names = [path.relative_to(before) for path in before.rglob("*") if path.is_file()]
    assert names and all((folder / name).read_bytes() == (before / name).read_bytes() for name in names)
    # One bit of its largest file.
    damaged = Store(tmp_path / "damaged")
    shutil.copytree(folder, damaged.root / folder.name, symlinks=True)
    largest = damaged.root / folder.name / max(names, key=lambda name: (before / name).stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert not verify(damaged, folder.name, Level.FULL).is_sound
    resumed = jobs.run(run, environ, **{**written.job, **written.resumes})
    assert resumed.code == 0 and resumed.result is not None, resumed.said
    assert resumed.result.get("trained", 2) == 2 and resumed.result.get("first", 4) == 4
