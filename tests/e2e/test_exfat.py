"""A run on a real file system without symlinks and hard links: trained, stopped, resumed, swept."""

import logging
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tests.conftest import SBIN
from tests.unit.state.tiny import job, quietly, tiny
from unbroken import Run
from unbroken.disk import LocalDisk
from unbroken.errors import RunHeld
from unbroken.files import Files
from unbroken.records.lease import acquire, read_current
from unbroken.records.process import process_of, this_holder

SIZE_BYTES = 256 << 20


@pytest.fixture
def exfat(tmp_path: Path) -> Iterator[Path]:
    image, mounted = tmp_path / "image", tmp_path / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(SIZE_BYTES)
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:{SBIN}"}
    subprocess.run(["mkfs.exfat", str(image)], check=True, capture_output=True, env=env)
    device = subprocess.check_output(["losetup", "--find", "--show", str(image)], env=env, text=True).strip()
    try:
        subprocess.run(["mount.exfat-fuse", device, str(mounted)], check=True, capture_output=True, env=env)
        yield mounted
        subprocess.run(["umount", str(mounted)], check=True, env=env)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True, env=env)


@pytest.mark.needs("root", "loop", "exfat")
@pytest.mark.promise("U16")
def test_a_run_on_exfat_is_swept_and_resumes(exfat: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stop(run: Run, step: int) -> None:
        if step == 3:
            run.stop("half way")

    settings = quietly(save_steps=1, keep_last_k=1)
    with caplog.at_level(logging.WARNING):
        assert job(exfat / "run", 6, settings, stop, **tiny()).is_stopped
        assert [path.name for path in (exfat / "run/checkpoints").glob("[!.]*")] == ["checkpoint-4-shutdown"]
        assert job(exfat / "run", 6, settings, **tiny(seed=1)).step == 6
    names = {path.name for path in (exfat / "run/checkpoints").iterdir()}
    assert "final" in names and "latest" not in names and not any(name.startswith(".") for name in names)
    # Once in the life of a process, whoever met it first.
    said = [line for line in caplog.messages if "has no symlinks: `latest` is not kept up to date there" in line]
    assert len(said) <= 1


@pytest.mark.needs("root", "loop", "exfat")
@pytest.mark.promise("U16")
def test_on_exfat_of_many_contenders_one_gets_the_run(exfat: Path) -> None:
    together = Barrier(8)

    def contend(number: int) -> bool:
        together.wait()
        try:
            acquire(
                exfat, this_holder(), token=f"k{number}", now_s=0.0, process_of=process_of, files=Files(LocalDisk())
            )
        except RunHeld:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(contend, range(8))) == 1
    found = read_current(exfat)
    assert found is not None and found.number == 1 and found.token.startswith("k")
    assert [path.name for path in (exfat / ".lease").iterdir()] == ["000001.json"]
