"""Uploads and downloads through a proxy that drops, refuses, lies and cuts, before a real S3 server."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mirror.made import LARGE, SMALL, client_of, content, opened, run_at, saved, uploaded
from tests.mirror.servers import Asked, Proxy
from tests.unit.state.tiny import bits, job, quietly, tiny
from unbroken import Run
from unbroken.errors import (
    BucketMissing,
    ClockSkewed,
    DamagedCheckpoint,
    MirrorReadOnly,
    MirrorTaken,
    MirrorUnreachable,
    MirrorUnverified,
    NoCredentials,
    StorageError,
    UnbrokenError,
    WrongRegion,
)
from unbroken.mirror.background import pending
from unbroken.mirror.fetch import fetch_checkpoint
from unbroken.mirror.remote import store_at
from unbroken.mirror.transfer import Limits
from unbroken.store.check import Level, verify
from unbroken.store.mirrored import mirrored_ids
from unbroken.store.scan import scan

pytestmark = pytest.mark.needs("moto")


def is_part(asked: Asked) -> bool:
    return asked.method in ("PUT", "POST") and "/checkpoint-" in asked.path and "manifest.json" not in asked.path


def once(fault: str, fits: Callable[[Asked], bool]) -> Callable[[Asked], str | None]:
    struck: list[Asked] = []

    def rule(asked: Asked) -> str | None:
        if struck or not fits(asked):
            return None
        struck.append(asked)
        return fault

    return rule


@pytest.mark.promise("M8", "C4")
@pytest.mark.parametrize("parts", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("fault", ["drop", "error", "lie", "slow", "deaf"])
def test_a_fault_that_passes_is_survived_and_the_copy_is_whole(
    proxy: Proxy, url: str, tmp_path: Path, fault: str, parts: dict[str, int]
) -> None:
    store = run_at(tmp_path / "run")
    name = saved(store, 10, parts)
    mirror = opened(store, url)
    for fits in (is_part, lambda asked: asked.method == "PUT" and "manifest.json" in asked.path):
        if fault == "lie" and fits is not is_part:
            continue
        proxy.rule = once(fault, fits)
        uploaded(store, name, mirror)
        proxy.rule = lambda asked: None
        remote = store_at(mirror.client)
        assert scan(remote).committed == (name,)
        assert verify(remote, name, Level.FULL).is_sound


@pytest.mark.promise("M8")
def test_an_upload_whose_last_answer_is_lost_counts_if_the_bytes_are_there(
    proxy: Proxy, url: str, tmp_path: Path
) -> None:
    store = run_at(tmp_path / "run")
    name = saved(store, 10, LARGE)
    mirror = opened(store, url)
    finished: list[Asked] = []

    def rule(asked: Asked) -> str | None:
        if asked.method == "POST" and "uploadId=" in asked.path:
            finished.append(asked)
            return "deaf"
        return None

    proxy.rule = rule
    uploaded(store, name, mirror)
    # The server knows the upload no more when it is asked again.
    assert finished and verify(store_at(mirror.client), name, Level.FULL).is_sound


@pytest.mark.promise("C4", "M8")
@pytest.mark.parametrize("what", ["part", "manifest"])
def test_a_store_that_says_done_and_keeps_nothing_never_counts_as_a_mirror(
    proxy: Proxy, url: str, tmp_path: Path, what: str
) -> None:
    store = run_at(tmp_path / "run")
    name = saved(store, 10)
    mirror = opened(store, url)
    proxy.rule = lambda asked: "lie" if asked.method == "PUT" and (what == "part") == is_part(asked) else None
    with pytest.raises(MirrorUnverified):
        uploaded(store, name, mirror)
    assert not mirrored_ids(store, url)
    assert pending(store, url) == [name]
    assert not scan(store_at(mirror.client)).committed


@pytest.mark.promise("M26")
def test_a_truncated_body_is_requested_again(proxy: Proxy, url: str, tmp_path: Path) -> None:
    store = run_at(tmp_path / "run")
    name = saved(store, 10, LARGE)
    mirror = opened(store, url)
    uploaded(store, name, mirror)
    proxy.rule = once("cut", lambda asked: asked.method == "GET" and asked.path.endswith("state/a"))
    back = run_at(tmp_path / "back")
    fetch_checkpoint(store_at(mirror.client), name, back, Limits(), job="f", at_ns=1)
    for part, size in LARGE.items():
        assert (back.path(name) / part).read_bytes() == content(part, size, 10)


@pytest.mark.promise("M26")
@pytest.mark.parametrize("fault", ["drop", "error", "slow", "expired", "refused", "garbled"])
def test_a_fault_that_passes_during_a_fetch_is_survived(proxy: Proxy, url: str, tmp_path: Path, fault: str) -> None:
    store = run_at(tmp_path / "run")
    name = saved(store, 10)
    mirror = opened(store, url)
    uploaded(store, name, mirror)
    for what in ("/manifest.json", "/state/a"):
        proxy.rule = lambda asked: None
        remote = store_at(client_of(store, url))
        if what == "/state/a" or fault != "garbled":
            proxy.rule = once(fault, lambda asked, what=what: asked.method == "GET" and asked.path.endswith(what))  # type: ignore[misc]
        back = run_at(tmp_path / "back" / what.strip("/").replace("/", "-"))
        fetch_checkpoint(remote, name, back, Limits(), job="f", at_ns=1)
        assert verify(back, name, Level.FULL).is_sound


@pytest.mark.promise("M26")
def test_bytes_that_are_wrong_each_time_are_never_fetched(proxy: Proxy, url: str, tmp_path: Path) -> None:
    store = run_at(tmp_path / "run")
    name = saved(store, 10)
    mirror = opened(store, url)
    uploaded(store, name, mirror)
    proxy.rule = lambda asked: "garbled" if asked.method == "GET" and asked.path.endswith("/state/a") else None
    back = run_at(tmp_path / "back")
    with pytest.raises(DamagedCheckpoint):
        fetch_checkpoint(store_at(mirror.client), name, back, Limits(), job="f", at_ns=1)
    assert not scan(back).committed and not scan(back).torn


@pytest.mark.promise("C4")
@pytest.mark.parametrize("fault", ["drop", "error", "slow", "expired"])
def test_a_fault_that_passes_during_a_direct_resume_is_survived(
    proxy: Proxy, url: str, tmp_path: Path, fault: str
) -> None:
    trained, run = tiny(), tmp_path / "run"
    job(run, 4, quietly(checkpoints=url), **trained)
    struck: list[Asked] = []

    def rule(asked: Asked) -> str | None:
        if struck or asked.method != "GET" or "/final/state/" not in asked.path:
            return None
        struck.append(asked)
        return fault

    proxy.rule = rule
    again = tiny(seed=7)
    with Run(run, settings=quietly(checkpoints=url), **again) as resumed:
        assert resumed.step == 4
    assert struck and bits(again["model"]) == bits(trained["model"])


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("expired", NoCredentials, "expired"),
        ("refused", NoCredentials, "refused"),
        ("skewed", ClockSkewed, "clock"),
        ("elsewhere", WrongRegion, "region"),
        ("denied", MirrorReadOnly, "permission"),
        ("error", MirrorUnreachable, "HTTP 500"),
    ],
)
def test_each_refusal_of_a_store_has_its_own_error(
    proxy: Proxy, url: str, tmp_path: Path, fault: str, error: type[UnbrokenError], words: str
) -> None:
    store = run_at(tmp_path / "run")
    saved(store, 10)
    proxy.rule = lambda asked: fault if asked.method in ("PUT", "POST") else None
    with pytest.raises(error) as refused:
        opened(store, url)
    assert isinstance(refused.value, StorageError)
    assert words in refused.value.headline()
    assert "secret" not in repr(refused.value) + str(refused.value.__cause__) + str(refused.value.__context__ or "")
    if error is WrongRegion:
        assert "eu-west-1" in refused.value.help()[0].command
    # Nothing is lost, and nothing counts.
    assert verify(store, "checkpoint-10", Level.FULL).is_sound
    assert not mirrored_ids(store, url)


def test_a_head_that_is_refused_without_a_reason_gets_that_of_a_listing(proxy: Proxy, url: str, tmp_path: Path) -> None:
    store = run_at(tmp_path / "run")
    mirror = opened(store, url)
    proxy.rule = lambda asked: "skewed"
    with pytest.raises(ClockSkewed):
        mirror.client.find("x")


def test_a_missing_bucket_and_missing_credentials_are_named(
    direct: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run_at(tmp_path / "run")
    saved(store, 10)
    with pytest.raises(BucketMissing) as refused:
        opened(store, "s3://no-such-bucket/run")
    assert refused.value.bucket == "no-such-bucket"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(NoCredentials) as none:
        opened(store, "s3://bucket/run")
    assert none.value.problem == "none"


def test_a_prefix_of_another_run_is_refused_and_stays_as_it_was(direct: int, url: str, tmp_path: Path) -> None:
    first, second = run_at(tmp_path / "run"), run_at(tmp_path / "elsewhere" / "run")
    name = saved(first, 10)
    mirror = opened(first, url)
    uploaded(first, name, mirror)
    saved(second, 10, job="b")
    with pytest.raises(MirrorTaken):
        opened(second, url)
    remote = store_at(mirror.client)
    assert remote.read_manifest(name).id == first.read_manifest(name).id
    assert verify(remote, name, Level.FULL).is_sound
