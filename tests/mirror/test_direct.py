"""Checkpoints that go straight to an object store: killed, wiped, contested, refused, damaged."""

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import unbroken
from tests.mirror.made import client_of, opened, run_at, uploaded
from tests.mirror.servers import BUCKET, Asked, Proxy, environment
from tests.mirror.test_training import eventually
from tests.patience import PATIENCE_S
from tests.unit.state.tiny import bits, job, quietly, tiny
from unbroken import Run, Settings
from unbroken.errors import (
    BadMirror,
    CheckpointsElsewhere,
    MirrorReadOnly,
    MirrorTaken,
    MirrorUnverified,
    NoUsableCheckpoint,
    Superseded,
)
from unbroken.mirror import ownership
from unbroken.mirror.client import open_client
from unbroken.mirror.direct import DirectDraft
from unbroken.mirror.remote import store_at
from unbroken.mirror.transfer import LEAST_MEMORY_BYTES, Limits
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.store.check import Level, verify
from unbroken.store.digest import digest_of
from unbroken.store.directory import Store
from unbroken.store.scan import read_quietly, scan

ROOT = Path(__file__).resolve().parents[2]
_JOB = """
import sys
from pathlib import Path
from tests.unit.state.tiny import job, quietly, tiny
job(Path(sys.argv[1]), 1_000_000, quietly(checkpoints=sys.argv[2], keep_last_k=2), **tiny())
"""


def direct(url: str, **changes: object) -> Settings:
    return quietly(checkpoints=url, **changes)


def there(run: Path, url: str) -> Store:
    return store_at(client_of(run_at(run), url))


def steps(store: Store) -> list[int]:
    found = (read_quietly(store, name) for name in scan(store).committed)
    return sorted(manifest.step for manifest in found if manifest is not None)


def child(run: Path, url: str, env: dict[str, str]) -> "subprocess.Popen[bytes]":
    env = {**os.environ, **env, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", _JOB, str(run), url], env=env, cwd=ROOT)


def kill(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def bits_of_whole_run(directory: Path, total: int) -> dict[str, bytes]:
    objects = tiny()
    job(directory, total, **objects)
    return bits(objects["model"])


@pytest.fixture
def s3() -> str:
    return f"s3://{BUCKET}/{secrets.token_hex(6)}/run"


@pytest.fixture(
    params=[
        "file",
        pytest.param("s3", marks=pytest.mark.needs("moto")),
        pytest.param("az", marks=pytest.mark.needs("azurite")),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path, s3: str) -> str:
    if request.param == "file":
        (tmp_path / "shared").mkdir()
        return f"file://{tmp_path}/shared/run"
    if request.param == "az":
        found: str = request.getfixturevalue("azure")
        return found
    request.getfixturevalue("direct")
    return s3


@pytest.mark.promise("C4", "X7")
def test_a_run_killed_and_its_directory_wiped_resumes_bit_for_bit(url: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = child(run, url, {})
    try:
        while len(found := steps(there(run, url))) < 2 or found[-1] < 6:
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        kill(process)
    # Nothing but small records was written here.
    assert sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) < 100_000
    assert not scan(run_at(run)).committed
    shutil.rmtree(run)
    newest = steps(there(run, url))[-1]
    # Other weights: what is not restored would show.
    again = tiny(seed=7)
    with Run(run, settings=direct(url), **again) as resumed:
        assert resumed.step == newest
    job(run, newest + 3, direct(url), **again)
    assert bits(again["model"]) == bits_of_whole_run(tmp_path / "whole", newest + 3)
    store = there(run, url)
    assert steps(store)[-1] == newest + 3
    assert all(verify(store, name, Level.FULL).is_sound for name in scan(store).committed)
    # What the killed job was writing is gone, and what is kept is what the policy keeps.
    assert not scan(store).uploading and len(steps(store)) == 3
    loaded = tiny(seed=8)
    unbroken.load(url, model=loaded["model"])
    assert bits(loaded["model"]) == bits(again["model"])


@pytest.mark.promise("X7")
@pytest.mark.needs("moto")
@pytest.mark.parametrize("where", ["part", "manifest"])
def test_a_job_killed_inside_a_save_leaves_no_checkpoint_and_its_name_is_not_used_again(
    proxy: Proxy, s3: str, tmp_path: Path, where: str
) -> None:
    run, reached, gate = tmp_path / "run", threading.Event(), threading.Event()

    def rule(asked: Asked) -> str | None:
        is_manifest = asked.path.endswith("/manifest.json")
        if asked.method == "PUT" and "/checkpoint-4/" in asked.path and is_manifest == (where == "manifest"):
            reached.set()
            gate.wait(PATIENCE_S)
            # The request of a dead client: the server never gets it.
            return "drop"
        return None

    proxy.rule = rule
    process = child(run, s3, environment(proxy.port))
    try:
        assert reached.wait(PATIENCE_S)
    finally:
        kill(process)
    proxy.rule = lambda asked: None
    gate.set()
    shutil.rmtree(run)
    assert steps(there(run, s3)) == [2]
    again = tiny(seed=7)
    job(run, 5, direct(s3), **again)
    assert bits(again["model"]) == bits_of_whole_run(tmp_path / "whole", 5)
    # A writer that is slow and not dead could still send parts of checkpoint-4.
    assert set(scan(there(run, s3)).committed) == {"checkpoint-2", "checkpoint-4.2", "final"}
    assert not scan(there(run, s3)).uploading


@pytest.mark.promise("C4")
def test_of_two_jobs_without_a_shared_disk_the_first_one_commits_nothing_more(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two machines: each has a directory of its own, and no lease of the other.
    one, two, seen = tmp_path / "one" / "run", tmp_path / "two" / "run", list[int]()

    def is_overtaken(run: Run, step: int) -> None:
        seen.append(step)
        if step == 3:
            eventually(lambda: steps(there(one, url)) == [2], "the first checkpoint")
            monkeypatch.setattr(ownership, "socket", SimpleNamespace(gethostname=lambda: "two"))
            with Run(two, settings=direct(url), **tiny(seed=7)) as second:
                assert second.step == 2

    with pytest.raises(Superseded):
        job(one, 20, direct(url), is_overtaken, **tiny())
    assert steps(there(one, url)) == [2]
    assert len(seen) < 8, "the first job went on for long"
    job(two, 6, direct(url), **tiny())
    assert steps(there(two, url)) == [2, 4, 6]


def test_the_address_of_another_run_is_refused(url: str, tmp_path: Path) -> None:
    job(tmp_path / "run", 2, direct(url), **tiny())
    with pytest.raises(MirrorTaken):
        job(tmp_path / "other", 2, direct(url), **tiny())


@pytest.mark.promise("C4")
@pytest.mark.needs("moto")
@pytest.mark.parametrize("fault", ["denied", "lie"])
def test_a_save_that_the_store_refuses_is_reported_and_training_continues(
    proxy: Proxy, s3: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    run = tmp_path / "run"
    is_part = "state/" if fault == "lie" else ""
    proxy.rule = lambda asked: fault if asked.method == "PUT" and f"/checkpoint-4/{is_part}" in asked.path else None
    with caplog.at_level(logging.INFO, logger="unbroken"):
        objects = tiny()
        job(run, 8, direct(s3), **objects)
    assert caplog.text and "very-secret" not in caplog.text
    assert steps(there(run, s3)) == [2, 6, 8]
    [failed] = read_history(Layout(run)).of_kind("save-failed")
    kind = MirrorReadOnly.kind if fault == "denied" else MirrorUnverified.kind
    assert (failed.values["step"], failed.values["cause"]) == (4, kind)
    assert bits(objects["model"]) == bits_of_whole_run(tmp_path / "whole", 8)
    # The parts that were sent are gone.
    assert not any(found.key.startswith("checkpoint-4/") for found in client_of(run_at(run), s3).listing(""))


@pytest.mark.needs("moto")
@pytest.mark.parametrize("fault", ["expired", "lie"])
def test_a_part_whose_keys_expired_or_whose_bytes_were_lost_is_sent_again(
    proxy: Proxy, s3: str, tmp_path: Path, fault: str
) -> None:
    spoiled: list[str] = []

    def rule(asked: Asked) -> str | None:
        is_part = asked.method == "PUT" and "/checkpoint-2/state/__0_0" in asked.path
        if is_part and not spoiled:
            spoiled.append(asked.path)
            return fault
        return None

    proxy.rule = rule
    job(tmp_path / "run", 3, direct(s3), **tiny())
    assert spoiled and steps(there(tmp_path / "run", s3)) == [2, 3]


@pytest.mark.needs("moto")
def test_a_store_that_cannot_be_read_is_no_reason_to_start_over(proxy: Proxy, s3: str, tmp_path: Path) -> None:
    job(tmp_path / "run", 2, direct(s3), **tiny())
    shutil.rmtree(tmp_path / "run")
    proxy.rule = lambda asked: "denied"
    with pytest.raises(MirrorReadOnly):
        job(tmp_path / "run", 4, direct(s3), **tiny())


@pytest.mark.promise("M26")
def test_a_damaged_object_is_skipped_and_never_chosen_again(url: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job(run, 5, direct(url), **tiny())
    client = client_of(run_at(run), url)
    key = "final/state/__0_0.distcp"
    data = bytearray(client.read(key, 0, 1 << 20))
    data[len(data) // 2] ^= 1
    client.put(key, iter([bytes(data)]), len(data), in_flight=1)
    objects = tiny(seed=7)
    job(run, 7, direct(url), **objects)
    assert bits(objects["model"]) == bits_of_whole_run(tmp_path / "whole", 7)
    [skipped] = read_history(Layout(run)).of_kind("checkpoint-skipped")
    assert skipped.values["name"] == "final"
    found = scan(there(run, url))
    assert found.quarantined == ("final",) and "final" not in found.committed and "final.2" in found.committed


def test_a_run_whose_checkpoints_there_are_all_damaged_does_not_start_over(tmp_path: Path) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/shared/run"
    (tmp_path / "shared").mkdir()
    job(run, 1, direct(url), **tiny())
    (tmp_path / "shared/run/checkpoints/final/state/__0_0.distcp").write_bytes(b"rot")
    for _ in range(2):
        with pytest.raises(NoUsableCheckpoint):
            job(run, 2, direct(url), **tiny())


@pytest.mark.promise("G6")
def test_what_the_policy_releases_is_deleted_there_after_the_commit(url: str, tmp_path: Path) -> None:
    job(tmp_path / "run", 9, direct(url, keep_last_k=1, keep_milestone_every=4), **tiny())
    assert steps(there(tmp_path / "run", url)) == [4, 8, 9]
    client = client_of(run_at(tmp_path / "run"), url)
    assert not any(found.key.startswith(("checkpoint-2/", "checkpoint-6/")) for found in client.listing(""))


def test_a_run_goes_back_there_and_stays_on_its_branch_with_its_directory_wiped(url: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job(run, 8, direct(url, keep_last_k=None), **tiny())
    with Run(run, settings=direct(url, resume="4"), **tiny(seed=7)) as resumed:
        assert resumed.step == 4
    shutil.rmtree(run)
    objects = tiny(seed=7)
    with Run(run, settings=direct(url), **objects) as resumed:
        assert resumed.step == 4
    job(run, 7, direct(url, keep_last_k=None), **objects)
    assert steps(there(run, url)) == [2, 4, 6, 7]
    assert "checkpoint-6.2" in scan(there(run, url)).committed


def test_a_job_that_looks_in_another_place_than_the_newest_checkpoint_is_refused(tmp_path: Path) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/shared/run"
    (tmp_path / "shared").mkdir()
    job(run, 3, quietly(), **tiny())
    with pytest.raises(CheckpointsElsewhere) as refused:
        job(run, 5, direct(url), **tiny())
    assert refused.value.help()[0].command.startswith("unbroken mirror ")
    # As the help says.
    for name in scan(run_at(run)).committed:
        uploaded(run_at(run), name, opened(run_at(run), url))
    with Run(run, settings=direct(url), **tiny(seed=7)) as resumed:
        assert resumed.step == 3
    job(run, 5, direct(url), **tiny())
    with pytest.raises(CheckpointsElsewhere, match="shared/run") as refused:
        job(run, 7, quietly(), **tiny())
    assert refused.value.help()[0].command.startswith("unbroken fetch ")


# ---- one part ----


def _chunks(size: int, chunk: int = 3_000_001) -> Iterator[bytes]:
    for start in range(0, size, chunk):
        yield bytes([start % 251]) * min(chunk, size - start)


@pytest.mark.needs("moto")
def test_a_large_part_is_sent_in_pieces_with_bounded_memory(direct: int, s3: str) -> None:
    from unbroken.mirror.address import parse_address

    client, size = open_client(parse_address(s3)), 100 << 20
    draft = DirectDraft(client, "checkpoint-1", Limits(LEAST_MEMORY_BYTES), size)
    tracemalloc.start()
    try:
        part = draft.write_part("state/a", _chunks(size))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert part.digest == digest_of(_chunks(size))
    assert peak < 2 * LEAST_MEMORY_BYTES < size
    found = client.find("checkpoint-1/state/a")
    assert found is not None and found.size_bytes == size


@pytest.mark.parametrize("size", [0, 7, 16 << 20, (16 << 20) + 1])
def test_a_part_of_any_size_is_what_was_sent(tmp_path: Path, size: int) -> None:
    from unbroken.mirror.address import parse_address

    client = open_client(parse_address(f"file://{tmp_path}/shared"))
    part = DirectDraft(client, "checkpoint-1", Limits(), size).write_part("state/a", _chunks(size))
    assert part.digest == digest_of(_chunks(size)) and part.size_bytes == size
    assert (tmp_path / "shared/checkpoint-1/state/a").read_bytes() == b"".join(_chunks(size))


def test_settings_refuse_what_does_not_go_with_an_object_store(tmp_path: Path) -> None:
    with pytest.raises(BadMirror):
        Settings(checkpoints="runs/a")
    for name, value in (("mirror", "file:///x/y"), ("emergency_dir", str(tmp_path))):
        with pytest.raises(ValueError, match=name):
            quietly(checkpoints="file:///a/b", **{name: value})
    assert Settings(checkpoints="s3://bucket/runs/a/").checkpoints == "s3://bucket/runs/a"
