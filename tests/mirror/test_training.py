"""A run with mirrors: what is held, what comes back, and what a killed or refused upload leaves."""

import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mirror.made import client_of, opened, run_at
from tests.mirror.servers import BUCKET, Asked, Proxy, environment
from tests.patience import PATIENCE_S
from tests.unit.state.tiny import bits, job, quietly, tiny
from unbroken import Run, Settings
from unbroken.errors import CheckpointsExist, MirrorTaken, MirrorUnreachable, NoCredentials
from unbroken.loop.mirrors import RunMirrors
from unbroken.loop.recorder import SilentRecorder
from unbroken.mirror.background import Mirroring, pending
from unbroken.mirror.remote import store_at
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.run_references import resolve
from unbroken.store.check import Level, verify
from unbroken.store.directory import Store
from unbroken.store.mirrored import Upload, write_mirrors
from unbroken.store.scan import scan


def mirrored(url: str, **changes: object) -> Settings:
    return quietly(mirror=url, **changes)


def remote_names(run: Path, url: str) -> set[str]:
    return set(scan(store_at(client_of(run_at(run), url))).committed)


def eventually(is_so: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    until = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)


@pytest.mark.promise("C4", "M8", "M26")
def test_with_the_local_disk_wiped_a_run_resumes_from_its_mirror_bit_for_bit(anywhere: str, tmp_path: Path) -> None:
    mirror = anywhere
    whole = job(tmp_path / "whole", 9, **tiny())
    assert whole.step == 9
    expected = tiny()
    job(tmp_path / "expected", 9, **expected)
    job(tmp_path / "run", 5, mirrored(mirror), **tiny())
    shutil.rmtree(tmp_path / "run")
    # Other weights: what is not restored would show.
    again = tiny(seed=7)
    with Run(tmp_path / "run", settings=mirrored(mirror), **again) as run:
        assert run.step == 5
    job(tmp_path / "run", 9, mirrored(mirror), **again)
    assert bits(again["model"]) == bits(expected["model"])
    assert not pending(run_at(tmp_path / "run"), mirror)


@pytest.mark.promise("M26")
def test_of_a_damaged_checkpoint_only_the_damaged_part_is_fetched(mirror: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job(run, 4, mirrored(mirror), **tiny())
    [part] = (run / "checkpoints" / "final" / "state").glob("*.distcp")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    again = tiny(seed=7)
    with Run(run, settings=mirrored(mirror), **again) as resumed:
        assert resumed.step == 4
    [fetched] = read_history(Layout(run)).of_kind("mirror-fetch")
    assert fetched.values["parts"] == [f"state/{part.name}"] and not fetched.values["is_whole"]
    assert verify(run_at(run), "final", Level.FULL).is_sound
    assert not scan(run_at(run)).quarantined


@pytest.mark.promise("M26")
def test_a_stale_local_copy_gives_way_to_a_fresh_one_in_the_mirror(mirror: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job(run, 3, mirrored(mirror), **tiny())
    shutil.copytree(run, tmp_path / "old", symlinks=True)
    job(run, 8, mirrored(mirror), **tiny())
    shutil.rmtree(run)
    (tmp_path / "old").rename(run)
    with Run(run, settings=mirrored(mirror), **tiny(seed=7)) as resumed:
        assert resumed.step == 8


@pytest.mark.promise("M9", "C17")
@pytest.mark.needs("moto")
def test_what_is_not_mirrored_is_held_also_after_a_restart_and_swept_once_it_is(
    proxy: Proxy, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    settings = mirrored(url, keep_last_k=1, mirror_wait_seconds=0)
    proxy.rule = lambda asked: "denied" if "/checkpoint-" in asked.path or "/final" in asked.path else None
    with caplog.at_level(logging.INFO, logger="unbroken"):
        job(run, 6, settings, **tiny())
    held = {"checkpoint-2", "checkpoint-4", "final"}
    assert held <= set(scan(run_at(run)).committed)
    assert "checkpoint-2" in caplog.text and "very-secret" not in caplog.text
    # Another job, the mirror still away: the records are on disk, so nothing is swept.
    job(run, 8, settings, **tiny())
    assert held <= set(scan(run_at(run)).committed) | {"checkpoint-6"}
    status = subprocess.run(
        [sys.executable, "-m", "unbroken", "status", str(run), "--json"], capture_output=True, text=True, check=True
    )
    [lag] = json.loads(status.stdout)["mirrors"]
    assert len(lag["pending"]) == len(pending(run_at(run), url)) >= 4
    assert lag["refusal"]
    proxy.rule = lambda asked: None
    job(run, 9, mirrored(url, keep_last_k=1), **tiny())
    assert not pending(run_at(run), url)
    assert set(scan(run_at(run)).committed) == {"final"}
    assert {"checkpoint-2", "checkpoint-4"} <= remote_names(run, url)


@pytest.mark.promise("M9")
@pytest.mark.needs("moto")
def test_rotation_waits_for_a_slow_upload(proxy: Proxy, url: str, tmp_path: Path) -> None:
    run, gate = tmp_path / "run", threading.Event()

    def rule(asked: Asked) -> str | None:
        if asked.method == "PUT" and "/checkpoint-2/" in asked.path:
            gate.wait(PATIENCE_S)
        return None

    proxy.rule = rule
    seen: list[set[str]] = []

    def body(run_: Run, step: int) -> None:
        seen.append({name for name in os.listdir(run / "checkpoints") if name.startswith("checkpoint-")})
        if step == 11:
            gate.set()

    job(run, 12, mirrored(url, keep_last_k=1), body, **tiny())
    assert all("checkpoint-2" in names for names in seen[4:])
    assert "checkpoint-2" in remote_names(run, url)
    assert set(scan(run_at(run)).committed) == {"final"}


@pytest.mark.needs("moto")
def test_expired_credentials_are_renewed_from_the_file_and_never_written_anywhere(
    proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, keys = tmp_path / "run", tmp_path / "credentials"
    keys.write_text("[default]\naws_access_key_id = OLDKEY\naws_secret_access_key = old-very-secret\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    refused = threading.Event()

    def rule(asked: Asked) -> str | None:
        if "OLDKEY" in asked.headers.get("authorization", "") and "/checkpoint-4/" in asked.path:
            refused.set()
            return "expired"
        return None

    proxy.rule = rule

    def body(run_: Run, step: int) -> None:
        if step == 5:
            assert refused.wait(PATIENCE_S)
            keys.write_text("[default]\naws_access_key_id = NEWKEY\naws_secret_access_key = new-very-secret\n")

    job(run, 6, mirrored(url), body, **tiny())
    assert not pending(run_at(run), url)
    written = [path for path in run.rglob("*") if path.is_file()]
    assert written and not any(b"very-secret" in path.read_bytes() for path in written)
    assert any("NEWKEY" in asked.headers.get("authorization", "") for asked in proxy.seen)


@pytest.mark.promise("C4")
@pytest.mark.needs("moto")
def test_a_run_never_starts_over_because_its_mirror_is_away(proxy: Proxy, url: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job(run, 4, mirrored(url), **tiny())
    shutil.rmtree(run)
    proxy.rule = lambda asked: "error"
    with pytest.raises(MirrorUnreachable):
        job(run, 4, mirrored(url), **tiny())
    assert not scan(run_at(run)).committed


@pytest.mark.needs("moto")
def test_with_local_checkpoints_a_mirror_that_went_away_does_not_stop_training(
    proxy: Proxy, url: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job(run, 4, mirrored(url), **tiny())
    proxy.rule = lambda asked: "refused"
    job(run, 6, mirrored(url, mirror_wait_seconds=0), **tiny())
    proxy.rule = lambda asked: None
    job(run, 8, mirrored(url), **tiny())
    assert not pending(run_at(run), url)
    # One that never worked is met where somebody is looking.
    proxy.rule = lambda asked: "refused"
    with pytest.raises(NoCredentials):
        job(tmp_path / "new", 2, mirrored(f"s3://{BUCKET}/other/new"), **tiny())


def test_a_run_that_starts_over_gives_up_what_its_mirror_has(mirror: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job(run, 6, mirrored(mirror), **tiny())
    shutil.rmtree(run)
    with pytest.raises(CheckpointsExist):
        job(run, 2, mirrored(mirror, resume="scratch"), **tiny())
    job(run, 2, mirrored(mirror, resume="scratch", force=True), **tiny())
    shutil.rmtree(run)
    with Run(run, settings=mirrored(mirror), **tiny()) as resumed:
        assert resumed.step == 2


def test_a_run_that_went_back_is_not_brought_forward_by_its_mirror(mirror: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job(run, 8, mirrored(mirror, keep_last_k=1), **tiny())
    # Swept here, so it comes from the mirror.
    with Run(run, settings=mirrored(mirror, resume="4"), **tiny()) as resumed:
        assert resumed.step == 4
    shutil.rmtree(run)
    with Run(run, settings=mirrored(mirror), **tiny()) as resumed:
        assert resumed.step == 4


@pytest.mark.needs("moto")
def test_with_the_disk_wiped_one_of_two_mirrors_is_enough(proxy: Proxy, url: str, tmp_path: Path) -> None:
    run, second = tmp_path / "run", f"file://{tmp_path}/second/run"
    (tmp_path / "second").mkdir()
    both = mirrored(f"{url}, {second}")
    hasty = mirrored(f"{url}, {second}", mirror_wait_seconds=0)
    job(run, 4, both, **tiny())
    shutil.rmtree(run)
    proxy.rule = lambda asked: "error"
    with Run(run, settings=hasty, **tiny()) as resumed:
        assert resumed.step == 4
    job(run, 6, hasty, **tiny())
    assert pending(run_at(run), url)
    proxy.rule = lambda asked: None
    job(run, 8, both, **tiny())
    assert not pending(run_at(run), url) and not pending(run_at(run), second)
    # One that never worked is met where somebody is looking, though another one works.
    proxy.rule = lambda asked: "error"
    fresh = mirrored(f"s3://{BUCKET}/other/new, file://{tmp_path}/second/new")
    with pytest.raises(MirrorUnreachable):
        job(tmp_path / "new", 2, fresh, **tiny())


@pytest.mark.needs("moto")
@pytest.mark.parametrize("sent_while", ["training", "waiting"])
def test_a_signal_that_arrives_during_the_wait_for_uploads_ends_it(
    proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent_while: str
) -> None:
    run, is_cut = tmp_path / "run", list[bool]()
    job(run, 2, mirrored(url), **tiny())
    wait = Mirroring.wait

    def signalled_wait(self: Mirroring, timeout_s: float, *, is_cut_short: Callable[[], bool] = bool) -> bool:
        if sent_while == "waiting":
            os.kill(os.getpid(), signal.SIGTERM)
        is_cut.append(is_cut_short())
        return wait(self, timeout_s, is_cut_short=is_cut_short)

    def body(run: Run, step: int) -> None:
        if sent_while == "training" and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Mirroring, "wait", signalled_wait)
    proxy.rule = lambda asked: "refused" if asked.method == "PUT" else None
    # A launcher may send the signal that stops the job to several processes: it must not cut the wait short.
    job(run, 4, mirrored(url, mirror_wait_seconds=3, catch_signals=True), body, **tiny())
    assert is_cut[-1] == (sent_while == "waiting")
    assert pending(run_at(run), url)
    ended = "stopped" if sent_while == "training" else "completed"
    assert read_history(Layout(run)).of_kind("job-end")[-1].text("status") == ended


@pytest.mark.parametrize(
    ("request_", "reached"), [({"resume": "4"}, 7), ({"resume": "scratch", "force": True}, 3)], ids=["step", "scratch"]
)
def test_a_request_is_carried_out_once_though_the_disk_is_wiped_between_jobs(
    mirror: str, tmp_path: Path, request_: dict[str, Any], reached: int
) -> None:
    run = tmp_path / "run"
    job(run, 8, mirrored(mirror), **tiny())
    # A scheduler repeats the same command, on a node whose disk is empty.
    job(run, reached, mirrored(mirror, **request_), **tiny())
    for further in (1, 2):
        shutil.rmtree(run)
        with Run(run, settings=mirrored(mirror, **request_), **tiny()) as resumed:
            assert resumed.step == reached + further - 1
        job(run, reached + further, mirrored(mirror, **request_), **tiny())
        assert not pending(run_at(run), mirror)


def test_a_new_run_with_the_mirror_of_another_is_refused(mirror: str, tmp_path: Path) -> None:
    job(tmp_path / "run", 2, mirrored(mirror), **tiny())
    with pytest.raises(MirrorTaken):
        job(tmp_path / "other", 2, mirrored(mirror), **tiny())


def test_a_checkpoint_in_a_mirror_is_loaded_where_it_is(mirror: str, tmp_path: Path) -> None:
    import unbroken

    trained = tiny()
    job(tmp_path / "run", 4, mirrored(mirror), **trained)
    shutil.rmtree(tmp_path / "run")
    other = tiny(seed=7)
    unbroken.load(f"{mirror}@4", model=other["model"])
    assert bits(other["model"]) == bits(trained["model"])


def test_a_run_starts_from_a_checkpoint_in_a_mirror_with_ranged_reads(mirror: str, tmp_path: Path) -> None:
    trained = tiny()
    job(tmp_path / "run", 4, mirrored(mirror), **trained)
    shutil.rmtree(tmp_path / "run")
    other = tiny(seed=7)
    with Run(tmp_path / "next", settings=quietly(load_path=f"{mirror}@4"), **other) as started:
        assert started.step == 4
    assert bits(other["model"]) == bits(trained["model"])
    # The ranks of a world are told of it by a message.
    found = resolve(f"{mirror}@4")
    copy = pickle.loads(pickle.dumps(found))
    assert copy.store.read_manifest(copy.name) == found.store.read_manifest(str(found.name))


_JOB = """
import os
import signal
import sys
from pathlib import Path
from tests.unit.state.tiny import job, quietly, tiny
from unbroken.files import Files
from unbroken.store.names import MIRROR
really = Files.create_once
def killed(files, path, data, **how):
    if path.parent.name == MIRROR and b'"checkpoint-2"' in data:
        (path.parent / how["scratch"]).write_bytes(data[:20])
        os.kill(os.getpid(), signal.SIGKILL)
    return really(files, path, data, **how)
if sys.argv[4] == "ledger":
    Files.create_once = killed
job(Path(sys.argv[1]), int(sys.argv[3]), quietly(mirror=sys.argv[2], save_steps=2), **tiny())
"""


@pytest.mark.promise("C4", "M9", "X7")
@pytest.mark.needs("moto")
@pytest.mark.parametrize("where", ["part", "manifest", "ledger"])
def test_a_job_killed_during_an_upload_leaves_it_pending_and_the_next_one_finishes_it(
    proxy: Proxy, url: str, tmp_path: Path, where: str
) -> None:
    run, reached, gate = tmp_path / "run", threading.Event(), threading.Event()

    def rule(asked: Asked) -> str | None:
        is_manifest = asked.path.endswith("/manifest.json")
        if where == "ledger" or asked.method != "PUT" or "/checkpoint-2/" not in asked.path:
            return None
        if is_manifest == (where == "manifest"):
            reached.set()
            gate.wait(PATIENCE_S)
        return None

    proxy.rule = rule
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, **environment(proxy.port), "PYTHONPATH": str(root)}
    child = subprocess.Popen([sys.executable, "-c", _JOB, str(run), url, "3", where], env=env, cwd=root)
    try:
        if where == "ledger":
            # It kills itself in the middle of the record; the mirror has the whole checkpoint by then.
            assert child.wait(PATIENCE_S) == -signal.SIGKILL
        else:
            assert reached.wait(PATIENCE_S)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    # Killed in the middle of a request: the server may have it or not.
    proxy.rule = lambda asked: None
    gate.set()
    store = run_at(run)
    assert "checkpoint-2" in pending(store, url)
    assert verify(store, "checkpoint-2", Level.FULL).is_sound
    opened(store, url)
    step = max(store.read_manifest(name).step for name in scan(store).committed)
    again = subprocess.run(
        [sys.executable, "-c", _JOB, str(run), url, str(step + 2), ""],
        env=env,
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stderr
    assert not pending(store, url)
    remote = store_at(client_of(store, url))
    assert all(verify(remote, name, Level.FULL).is_sound for name in scan(remote).committed)
    assert "checkpoint-2" in scan(remote).committed


def test_a_job_without_a_mirror_says_that_the_run_has_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mirror = f"file://{tmp_path}/mirror"
    job(tmp_path / "run", 2, mirrored(mirror), **tiny())
    with caplog.at_level(logging.WARNING, logger="unbroken"):
        job(tmp_path / "run", 8, quietly(keep_last_k=1), **tiny())
    assert mirror in caplog.text
    # Not mirrored, so not swept.
    assert len(scan(run_at(tmp_path / "run")).committed) > 1


def test_a_job_whose_settings_bring_back_a_mirror_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = f"file://{tmp_path}/one", f"file://{tmp_path}/other"
    job(tmp_path / "run", 2, mirrored(one), **tiny())
    # As `unbroken mirror --forget one --to other` does.
    write_mirrors(run_at(tmp_path / "run"), (other,), job="j0")
    with caplog.at_level(logging.WARNING, logger="unbroken"):
        job(tmp_path / "run", 4, mirrored(one), **tiny())
        [said] = [each.getMessage() for each in caplog.records if "from now on" in each.message]
        assert one in said and other in said
        job(tmp_path / "run", 6, mirrored(one), **tiny())
    assert caplog.text.count("from now on") == 1


def test_an_upload_is_logged_after_the_save_it_belongs_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mirrors = RunMirrors(Store(tmp_path), quietly(), SilentRecorder(), job="j0")
    mirrors.start()
    uploads = [Upload("file:///m", f"id{step}", f"checkpoint-{step}", f"checkpoint-{step}", 1) for step in (1, 2)]

    def logged() -> list[str]:
        return [name for each in caplog.messages for name in each.split() if name.startswith("checkpoint-")]

    with caplog.at_level(logging.INFO, logger="unbroken"):
        for each in uploads:
            mirrors.mirrored(each, 0.5)
        assert not logged()
        mirrors.saved("checkpoint-2")
        assert logged() == ["checkpoint-2"]
        # Its save was never logged, as after an error.
        mirrors.close()
    assert logged() == ["checkpoint-2", "checkpoint-1"]


def test_settings_refuse_what_is_no_mirror() -> None:
    from unbroken.errors import BadMirror

    for text in ("/shared/mirror", "ftp://host/x", "s3://key:secret@bucket/x", "s3://bucket/x?token=secret"):
        with pytest.raises(BadMirror) as refused:
            Settings(mirror=text)
        assert "secret" not in str(refused.value) + str(refused.value.at())
    with pytest.raises(ValueError, match="mirror_memory_bytes"):
        Settings(mirror="file:///x/y", mirror_memory_bytes=1)
    assert Settings(mirror="file:///x/y, s3://bucket/a/").mirrors == ("file:///x/y", "s3://bucket/a")
