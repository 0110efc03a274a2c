"""Where a run is: settled when it is made, refused in one error where none can be, and noticed when it is gone."""

import errno
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.unit.state.tiny import learn, quietly, tiny
from unbroken import Run, Settings
from unbroken.errors import BadRunPath, NotAStore, RunGone, StorageFailed, UnbrokenError, render
from unbroken.records.lease import acquire
from unbroken.records.outcome import conclude


@pytest.mark.promise("U7")
def test_a_relative_run_stays_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    objects = tiny()
    run = Run("runs/a", settings=quietly(emergency_dir="dumps", save_steps=1), **objects)
    os.chdir(elsewhere)
    with run:
        for step in run.steps(3):
            if step == 1:
                os.chdir(tmp_path)
            learn(objects)
    assert (home / "runs/a/checkpoints/final").is_dir() and run.directory == home / "runs/a"
    assert not list(elsewhere.iterdir()) and {path.name for path in tmp_path.iterdir()} == {"home", "elsewhere"}


@pytest.mark.promise("U7")
@pytest.mark.parametrize("address", ["s3://bucket/runs/a", "file:///shared/a", Path("gs://bucket/a"), "abfs://x@y/a"])
def test_an_address_is_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | os.PathLike[str]
) -> None:
    # The disk of the working directory may be wiped: what is believed to be in a bucket would be lost.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRunPath) as refused:
        Run(address, settings=quietly(), **tiny())
    assert refused.value.problem == "address" and not list(tmp_path.iterdir())
    with Run(f"./{os.fspath(address)}", settings=quietly(), **tiny()):
        pass


@pytest.mark.promise("U7")
def test_paths_in_the_settings_are_settled_when_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = Settings(load_path="runs/a@5", emergency_dir="fast", persistent_dir="slow", resume="runs/b@7")
    assert asked.load_path == f"{tmp_path}/runs/a@5" and asked.resume == f"{tmp_path}/runs/b@7"
    assert (asked.emergency_dir, asked.persistent_dir) == (f"{tmp_path}/fast", f"{tmp_path}/slow")
    assert [Settings(resume=word).resume for word in ("auto", "scratch", "latest", "700", "checkpoint-7")] == [
        *("auto", "scratch", "latest", "700", "checkpoint-7")
    ]
    with pytest.raises(ValueError, match=r"Settings\.emergency_dir is an empty path"):
        Settings(emergency_dir="")


def delete(run: Path) -> None:
    shutil.rmtree(run)


def move(run: Path) -> None:
    run.rename(run.with_name("moved"))


def train_and_lose(place: Path, lose: Callable[[Path], None]) -> None:
    objects, lost_s = tiny(), 0.0
    with Run(place, settings=quietly(save_steps=40), **objects) as run:
        for step in run.steps(1_000_000):
            learn(objects)
            run.log(loss=1.0)
            time.sleep(0.02)
            if step == 2:
                lose(place)
                lost_s = time.monotonic()
            assert not lost_s or time.monotonic() - lost_s < PATIENCE_S, "it trains on"


@pytest.mark.parametrize("lose", [delete, move])
@pytest.mark.promise("U7")
def test_a_run_that_is_moved_or_deleted_is_reported_as_that_at_once(
    tmp_path: Path, lose: Callable[[Path], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The lease is renewed every quarter of an hour: that is not how it is noticed.
    defaults = acquire.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "ttl_s", 3600.0)
    place = tmp_path / "run"
    with caplog.at_level(logging.INFO), pytest.raises(RunGone, check=lambda each: each.job == 1) as gone:
        train_and_lose(place, lose)
    assert not place.exists(), "nothing is made anew where the run was"
    assert "intact" not in caplog.text
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [record for record in loud if record.name == "unbroken.loop.recorder"]
    assert conclude(gone.value).verdict == "look", "started again it would begin at step 0"


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "read-only"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(mounted)], check=True)
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


def refused(path: str) -> UnbrokenError:
    with pytest.raises(UnbrokenError) as error, Run(path, settings=quietly(), **tiny()):
        pytest.fail("it began")
    return error.value


@pytest.mark.promise("U7")
def test_a_bad_path_is_one_clear_error_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("nowhere/at/all")
    before = set(tmp_path.rglob("*"))
    for path in ("", "\0", "n" * 256, f"new/{'n' * 256}", "dangling", "dangling/a"):
        assert isinstance(refused(path), BadRunPath), path
    for path in ("file", "file/below"):
        found = refused(path)
        assert isinstance(found, NotAStore) and found.path == tmp_path / "file"
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.needs("root")
@pytest.mark.promise("U7")
def test_a_read_only_file_system_is_one_clear_error(read_only: Path) -> None:
    found = refused(str(read_only / "run"))
    assert isinstance(found, StorageFailed) and found.cause == os.strerror(errno.EROFS)
    assert "findmnt" in render(found)
