"""A mirror that is away is never taken for an empty one, and one that belongs to a run of the same name is named."""

import json
import logging
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Tool
from tests.mirror.made import client_of, opened, run_at, saved, uploaded
from tests.patience import PATIENCE_S
from tests.unit.state.tiny import job, quietly, tiny
from unbroken import Run
from unbroken.errors import MirrorMissing, MirrorTaken, UnbrokenError
from unbroken.mirror.background import Mirroring, pending
from unbroken.mirror.remote import store_at
from unbroken.mirror.transfer import Limits
from unbroken.store.keep import LastK
from unbroken.store.mirrored import Upload, read_run_id
from unbroken.store.scan import scan
from unbroken.store.sweep import settle


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.01)


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


@pytest.mark.promise("C4", "M9")
@pytest.mark.parametrize("how", ["moved", "emptied", "not named"])
def test_a_job_does_not_sweep_what_only_a_mirror_that_it_has_not_seen_is_recorded_to_hold(
    tmp_path: Path, how: str
) -> None:
    run, mirror = tmp_path / "a", f"file://{tmp_path}/m"
    job(run, 4, quietly(mirror=mirror), **tiny())
    before = set(scan(run_at(run)).committed)
    assert len(before) > 1 and not pending(run_at(run), mirror)
    (tmp_path / "m").rename(tmp_path / "moved")
    if how == "emptied":
        (tmp_path / "m").mkdir()
    named = None if how == "not named" else mirror
    job(run, 8, quietly(mirror=named, keep_last_k=1, mirror_wait_seconds=0), **tiny())
    assert before <= set(scan(run_at(run)).committed)
    shutil.rmtree(tmp_path / "m", ignore_errors=True)
    (tmp_path / "moved").rename(tmp_path / "m")
    job(run, 10, quietly(mirror=mirror, keep_last_k=1), **tiny())
    assert scan(run_at(run)).committed == ("final",)
    assert before <= set(scan(store_at(client_of(run_at(run), mirror))).committed)


@pytest.mark.promise("C4", "M9")
def test_a_job_whose_mirror_is_moved_away_does_not_sweep_what_is_there_until_it_was_compared_again(
    tmp_path: Path,
) -> None:
    run, there, moved = tmp_path / "a", tmp_path / "m", tmp_path / "moved"
    store, refusals = run_at(run), list[UnbrokenError]()
    names = [saved(store, step) for step in (10, 20)]
    mirror = opened(store, f"file://{there}")
    for name in names:
        uploaded(store, name, mirror)

    class Hears:
        def mirrored(self, upload: Upload, seconds: float) -> None:
            raise AssertionError(upload)

        def refused(self, mirror: str, name: str, error: UnbrokenError) -> None:
            refusals.append(error)

    there.rename(moved)
    mirroring = Mirroring(store, [mirror], Limits(), Hears(), job="m")
    mirroring.start()
    try:
        wait_until(lambda: bool(refusals))
        assert mirroring.missing() == {mirror.url}
        settle(store, names[-1], (LastK(1),), job="m", is_live=lambda draft: False, away=mirroring.missing())
        assert set(scan(store).committed) == set(names)
        moved.rename(there)
        wait_until(lambda: not mirroring.missing())
    finally:
        mirroring.close()
    settle(store, names[-1], (LastK(1),), job="m", is_live=lambda draft: False, away=mirroring.missing())
    assert scan(store).committed == (names[-1],)


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


@pytest.mark.promise("C4", "M4")
def test_a_wiped_run_finds_its_id_in_the_second_mirror_before_it_begins_the_first(tmp_path: Path) -> None:
    run, settings = tmp_path / "a", quietly(mirror=f"file://{tmp_path}/m, file://{tmp_path}/n")
    job(run, 4, settings, **tiny())
    id_ = read_run_id(run_at(run))
    shutil.rmtree(run)
    shutil.rmtree(tmp_path / "m")
    with Run(run, settings=settings, **tiny()) as resumed:
        assert resumed.step == 4
    assert read_run_id(run_at(run)) == id_
    for name in "mn":
        record = tmp_path / name / "checkpoints" / ".mirror" / "run.json"
        assert json.loads(record.read_bytes())["run"] == id_


@pytest.mark.promise("C4")
@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_a_second_run_does_not_take_over_checkpoints_whose_run_is_on_this_machine(
    tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "runs" / "a", tmp_path / "other" / "a"
    settings = quietly(checkpoints=f"file://{tmp_path}/store")
    job(first, 4, settings, **tiny())
    if host == "here":
        with pytest.raises(MirrorTaken, match=str(first)):
            job(second, 2, settings, **tiny())
        shutil.rmtree(first)
    else:
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
    with Run(second, settings=settings, **tiny()) as resumed:
        assert resumed.step == 4


@pytest.mark.parametrize("data", [b"", b'{"schema": "unb'])
def test_a_damaged_record_of_a_mirror_stops_no_job_that_has_local_checkpoints(
    mirror: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes, unbroken: Tool
) -> None:
    run = tmp_path / "a"
    job(run, 4, quietly(mirror=mirror), **tiny())
    client = client_of(run_at(run), mirror)
    client.put(".mirror/run.json", iter([data]), len(data), in_flight=1)
    with caplog.at_level(logging.WARNING, logger="unbroken"):
        job(run, 8, quietly(mirror=mirror, mirror_wait_seconds=0), **tiny())
    assert "the record .mirror/run.json is damaged" in caplog.text
    assert len(pending(run_at(run), mirror)) > 1
    shown = json.loads(unbroken("mirror", "a", "--json").stdout)
    assert shown["kind"] == "mirror-damaged"
    client.delete([".mirror/run.json"])
    assert unbroken("mirror", "a", "--to", mirror).returncode == 0
    assert not pending(run_at(run), mirror)


def test_a_mirror_that_is_away_does_not_keep_the_others_from_being_served(unbroken: Tool, tmp_path: Path) -> None:
    store = run_at(tmp_path / "run")
    names = {saved(store, 10)}
    away, there = f"file://{tmp_path}/m", f"file://{tmp_path}/n"
    assert unbroken("mirror", "run", "--to", away, "--to", there).returncode == 0
    shutil.rmtree(tmp_path / "m")
    names.add(saved(store, 20))
    ended = unbroken("mirror", "run", "--json")
    shown = json.loads(ended.stdout)
    assert ended.returncode == 74 and shown["kind"] == "mirror-incomplete"
    assert away in ended.stdout and "no record of this run" in ended.stdout
    assert set(scan(store_at(client_of(store, there))).committed) == names
    assert not (tmp_path / "m").exists()


def test_with_its_checkpoints_gone_a_run_starts_over_as_the_help_says(tmp_path: Path) -> None:
    run, settings = tmp_path / "a", quietly(checkpoints=f"file://{tmp_path}/store")
    job(run, 4, settings, **tiny())
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(MirrorMissing) as missing:
        job(run, 6, settings, **tiny())
    [remedy] = missing.value.help()
    subprocess.run(remedy.command, shell=True, check=True)
    with Run(run, settings=settings, **tiny()) as begun:
        assert begun.step == 0
