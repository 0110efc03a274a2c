"""A mirror that is away is never taken for an empty one, and one that belongs to a run of the same name is named."""

import json
import logging
import shutil
import socket
from pathlib import Path

import pytest

from tests.conftest import Tool
from tests.mirror.made import client_of, run_at, saved
from tests.unit.state.tiny import job, quietly, tiny
from unbroken import Run
from unbroken.errors import MirrorMissing, MirrorTaken
from unbroken.mirror.background import pending
from unbroken.mirror.remote import store_at
from unbroken.store.mirrored import read_run_id
from unbroken.store.scan import scan


@pytest.mark.promise("C4", "M9")
def test_a_mirror_that_was_moved_away_is_not_made_anew_and_nothing_is_swept_that_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, disk = tmp_path / "a", tmp_path / "disk"
    disk.mkdir()
    mirror = f"file://{disk}/a"
    job(run, 4, quietly(mirror=mirror), **tiny())
    (disk / "a").rename(disk / "moved")
    with caplog.at_level(logging.WARNING, logger="unbroken"):
        job(run, 8, quietly(mirror=mirror, keep_last_k=1, mirror_wait_seconds=0), **tiny())
    assert not (disk / "a").exists()
    assert "no record of this run" in caplog.text
    assert "checkpoint-6" in (held := pending(run_at(run), mirror)) and len(held) > 1
    (disk / "moved").rename(disk / "a")
    job(run, 10, quietly(mirror=mirror), **tiny())
    assert not pending(run_at(run), mirror)


@pytest.mark.promise("M9")
def test_a_mirror_that_goes_away_during_training_is_not_made_anew(tmp_path: Path) -> None:
    run, mirror = tmp_path / "a", f"file://{tmp_path}/m"

    def body(run_: Run, step: int) -> None:
        if step == 5:
            (tmp_path / "m").rename(tmp_path / "moved")

    job(run, 4, quietly(mirror=mirror), **tiny())
    job(run, 8, quietly(mirror=mirror, mirror_wait_seconds=0), body, **tiny())
    assert not (tmp_path / "m").exists()
    assert len(pending(run_at(run), mirror)) > 1


@pytest.mark.promise("C4")
@pytest.mark.parametrize("setting", ["mirror", "checkpoints"])
def test_with_the_disk_of_a_mirror_not_mounted_a_wiped_run_does_not_start_over(tmp_path: Path, setting: str) -> None:
    run, disk = tmp_path / "a", tmp_path / "disk"
    (disk / "runs").mkdir(parents=True)
    settings = quietly(**{setting: f"file://{disk}/runs/a"})
    job(run, 4, settings, **tiny())
    shutil.rmtree(run)
    disk.rename(tmp_path / "unmounted")
    disk.mkdir()
    with pytest.raises(MirrorMissing) as missing:
        job(run, 4, settings, **tiny())
    assert missing.value.help()[0].command == f"mkdir -p {disk}/runs"
    assert not list(disk.iterdir())


@pytest.mark.promise("C4")
def test_checkpoints_that_were_moved_away_do_not_make_a_run_start_over(tmp_path: Path) -> None:
    run, settings = tmp_path / "a", quietly(checkpoints=f"file://{tmp_path}/store")
    job(run, 4, settings, **tiny())
    (tmp_path / "store").rename(tmp_path / "moved")
    with pytest.raises(MirrorMissing):
        job(run, 6, settings, **tiny())
    assert not (tmp_path / "store").exists()


def test_a_prefix_that_was_emptied_is_begun_again_only_when_asked(unbroken: Tool, mirror: str, tmp_path: Path) -> None:
    store = run_at(tmp_path / "run")
    name = saved(store, 10)
    assert unbroken("mirror", "run", "--to", mirror).returncode == 0
    client = client_of(store, mirror)
    client.delete([found.key for found in client.listing("")])
    for dry in ((), ("--dry-run",)):
        ended = unbroken("mirror", "run", "--json", *dry)
        assert ended.returncode == 74 and json.loads(ended.stdout)["kind"] == "mirror-missing"
    assert not list(client.listing(""))
    assert unbroken("mirror", "run", "--to", mirror).returncode == 0
    assert scan(store_at(client)).committed == (name,)


def test_a_run_of_the_same_name_elsewhere_is_refused_while_the_mirrors_run_is_there(
    mirror: str, tmp_path: Path
) -> None:
    first, second = tmp_path / "runs" / "a", tmp_path / "other" / "a"
    job(first, 6, quietly(mirror=mirror), **tiny())
    with pytest.raises(MirrorTaken, match=str(first)):
        job(second, 2, quietly(mirror=mirror), **tiny())
    assert read_run_id(run_at(second)) is None


@pytest.mark.promise("C4")
@pytest.mark.parametrize("place", ["same", "other"])
def test_a_wiped_run_says_which_run_it_continues(
    mirror: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    first = tmp_path / "runs" / "a"
    job(first, 4, quietly(mirror=mirror), **tiny())
    id_ = read_run_id(run_at(first))
    shutil.rmtree(first)
    again = first if place == "same" else tmp_path / "other" / "a"
    with caplog.at_level(logging.INFO, logger="unbroken"):
        job(again, 6, quietly(mirror=mirror), **tiny())
    [said] = [record for record in caplog.records if "continuing the run" in record.getMessage()]
    assert said.levelno == (logging.INFO if place == "same" else logging.WARNING)
    for word in (id_, str(first), socket.gethostname(), mirror, "step 4"):
        assert str(word) in said.getMessage()
    # Said once: from now on the run knows who it is.
    caplog.clear()
    job(again, 8, quietly(mirror=mirror), **tiny())
    assert "continuing the run" not in caplog.text


def test_a_mirror_from_before_paths_were_recorded_is_recognised_by_name(mirror: str, tmp_path: Path) -> None:
    run = tmp_path / "a"
    job(run, 2, quietly(mirror=mirror), **tiny())
    client = client_of(run_at(run), mirror)
    record = json.loads(client.read(".mirror/run.json", 0, 10_000))
    data = json.dumps({key: record[key] for key in ("schema", "run", "name")}).encode()
    client.put(".mirror/run.json", iter([data]), len(data), in_flight=1)
    shutil.rmtree(run)
    with Run(tmp_path / "elsewhere" / "a", settings=quietly(mirror=mirror), **tiny()) as resumed:
        assert resumed.step == 2
