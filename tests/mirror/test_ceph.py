"""The same against a production S3 server: Ceph's RADOS Gateway, which checks signatures, times and conditions."""

import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mirror.made import LARGE, content, opened, run_at, saved, uploaded
from tests.mirror.servers import environment
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.unit.state.tiny import bits, job, quietly, tiny
from unbroken import Run
from unbroken.errors import BucketMissing, MirrorReadOnly, NoCredentials
from unbroken.mirror.address import parse_address
from unbroken.mirror.client import open_client
from unbroken.mirror.fetch import fetch_checkpoint
from unbroken.mirror.remote import store_at
from unbroken.mirror.transfer import Limits
from unbroken.store.check import Level, verify
from unbroken.store.scan import scan

pytestmark = [pytest.mark.needs("ceph", "root"), pytest.mark.timeout(1200)]
SCRIPT = Path(__file__).with_name("ceph_rgw.sh")
_MAKE_BUCKET = """
import boto3, json, sys, time
client = boto3.client("s3", endpoint_url=sys.argv[1], aws_access_key_id="tester",
    aws_secret_access_key="very-secret-key", region_name="us-east-1")
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    try:
        client.create_bucket(Bucket="bucket")
        break
    except Exception:
        time.sleep(0.5)
else:
    raise SystemExit("no gateway")
statement = {"Effect": "Allow", "Principal": {"AWS": ["arn:aws:iam:::user/reader"]},
    "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": ["arn:aws:s3:::bucket", "arn:aws:s3:::bucket/*"]}
client.put_bucket_policy(Bucket="bucket", Policy=json.dumps({"Version": "2012-10-17", "Statement": [statement]}))
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    directory, port = tmp_path_factory.mktemp("ceph"), free_port()
    # As long as it takes: pytest's own limit ends what hangs.
    try:
        subprocess.run(["bash", SCRIPT, "up", directory, str(port), str(free_port())], check=True)
        python = Path(__file__).resolve().parents[2] / ".moto" / "bin" / "python"
        subprocess.run([python, "-c", _MAKE_BUCKET, f"http://127.0.0.1:{port}", str(PATIENCE_S)], check=True)
        yield port
    finally:
        subprocess.run(["bash", SCRIPT, "down", directory], check=False, timeout=PATIENCE_S)


@pytest.fixture
def ceph(gateway: int, monkeypatch: pytest.MonkeyPatch) -> int:
    for name, value in environment(gateway).items():
        monkeypatch.setenv(name, value)
    return gateway


@pytest.fixture
def prefix() -> str:
    return f"s3://bucket/{secrets.token_hex(6)}/run"


@pytest.mark.promise("M8", "C4")
@pytest.mark.needs("moto")
def test_a_checkpoint_is_uploaded_in_pieces_verified_by_the_stores_checksum_and_fetched(
    ceph: int, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run_at(tmp_path / "run")
    name = saved(store, 10, LARGE)
    mirror = opened(store, prefix)
    read: list[str] = []
    really = mirror.client.read

    def noted(key: str, start: int, end: int) -> bytes:
        read.append(key)
        return really(key, start, end)

    monkeypatch.setattr(mirror.client, "read", noted)
    uploaded(store, name, mirror)
    # Not one part was read back: the checksum of the store is that of the bytes.
    assert not any("/state/" in key for key in read)
    remote = store_at(mirror.client)
    assert verify(remote, name, Level.FULL).is_sound
    back = run_at(tmp_path / "back")
    fetch_checkpoint(remote, name, back, Limits(), job="f", at_ns=1)
    assert all((back.path(name) / part).read_bytes() == content(part, size, 10) for part, size in LARGE.items())


@pytest.mark.needs("moto")
def test_of_sixteen_writers_at_the_same_moment_one_creates(ceph: int, prefix: str) -> None:
    clients = [open_client(parse_address(prefix)) for _ in range(16)]
    start, made, lock = threading.Barrier(16), list[bool](), threading.Lock()

    def create(number: int) -> None:
        start.wait()
        is_ours = clients[number].create("contested", f"writer {number}".encode())
        with lock:
            made.append(is_ours)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.count(True) == 1 and len(made) == 16


@pytest.mark.promise("C4", "M8")
@pytest.mark.needs("moto")
@pytest.mark.parametrize("setting", ["mirror", "checkpoints"])
def test_a_run_whose_disk_is_wiped_resumes_from_the_gateway_bit_for_bit(
    ceph: int, prefix: str, tmp_path: Path, setting: str
) -> None:
    run, settings, whole = tmp_path / "run", quietly(**{setting: prefix}), tiny()
    job(tmp_path / "whole", 7, **whole)
    job(run, 4, settings, **tiny())
    shutil.rmtree(run)
    again = tiny(seed=7)
    with Run(run, settings=settings, **again) as resumed:
        assert resumed.step == 4
    job(run, 7, settings, **again)
    assert bits(again["model"]) == bits(whole["model"])
    remote = store_at(open_client(parse_address(f"{prefix}/checkpoints")))
    assert all(verify(remote, name, Level.FULL).is_sound for name in scan(remote).committed)
    assert max(remote.read_manifest(name).step for name in scan(remote).committed) == 7


@pytest.mark.needs("moto", "faketime")
def test_wrong_keys_a_read_only_user_a_missing_bucket_and_a_wrong_clock_have_their_own_errors(
    ceph: int, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run_at(tmp_path / "run")
    saved(store, 10)
    with pytest.raises(BucketMissing):
        opened(store, "s3://no-such-bucket/run")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with pytest.raises(NoCredentials):
        opened(store, prefix)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-key")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    with pytest.raises(MirrorReadOnly):
        opened(store, prefix)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    skewed = subprocess.run(
        ["faketime", "3 hours ago", sys.executable, "-m", "unbroken", "mirror", "run", "--to", prefix, "--json"],
        cwd=tmp_path,
        env={**os.environ, **environment(ceph)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert skewed.returncode == 74 and '"clock-skewed"' in skewed.stdout, skewed.stdout + skewed.stderr
