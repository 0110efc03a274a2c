"""What cannot work has one clear error each: a few lines, the command that helps, no secret, and nothing lost."""

import base64
import socket
from pathlib import Path

import pytest

from tests.mirror.made import opened, run_at, saved
from tests.mirror.servers import environment
from unbroken.errors import UnbrokenError, render
from unbroken.store.check import Level, verify
from unbroken.store.mirrored import mirrored_ids, read_mirrors


def refused(url: str, tmp_path: Path) -> UnbrokenError:
    """The error of a first job with this mirror, after a look at what the job still has."""
    store = run_at(tmp_path / "run")
    name = saved(store, 10)
    with pytest.raises(UnbrokenError) as caught:
        opened(store, url)
    results = render(caught.value)
    assert len(results.splitlines()) <= 5 and "Traceback" not in results
    everything = results + repr(caught.value) + str(caught.value.__cause__) + str(caught.value.__context__)
    assert "very-secret" not in everything and base64.b64encode(b"a very-secret").decode()[:12] not in everything
    assert verify(store, name, Level.FULL).is_sound
    assert not mirrored_ids(store, url) and not read_mirrors(store)
    return caught.value


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(9).items():
        monkeypatch.setenv(name, value)


@pytest.mark.promise("M8")
@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:9000", "http://", "ftp://127.0.0.1", "http://user:very-secret@host:port", "http://a b"]
)
@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("s3://bucket/run", "AWS_ENDPOINT_URL"),
        ("az://bucket/run", "AZURE_STORAGE_ENDPOINT"),
        ("gs://bucket/run", "GOOGLE_BASE_URL"),
    ],
)
def test_an_endpoint_that_is_no_address_is_named_by_its_variable(
    keys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str, url: str, variable: str
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "tester")
    monkeypatch.setenv(variable, endpoint)
    error = refused(url, tmp_path)
    assert error.kind == "bad-endpoint" and variable in error.headline()
    assert error.help()[0].command.startswith(f"export {variable}=")


def test_a_server_that_is_down_is_named(keys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        # Nobody else may bind it meanwhile, and nobody listens.
        silent.bind(("127.0.0.1", 0))
        port = int(silent.getsockname()[1])
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:very-secret@127.0.0.1:{port}")
        error = refused("s3://bucket/run", tmp_path)
    assert error.kind == "mirror-unreachable"
    assert f"(http://127.0.0.1:{port})" in error.headline()


@pytest.mark.needs("moto")
def test_tls_to_a_plain_server_says_which_scheme_it_has(
    direct: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{direct}")
    error = refused("s3://bucket/run", tmp_path)
    assert error.kind == "mirror-unreachable" and "TLS" in error.headline()


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_file_in_the_place_of_a_directory_is_a_bad_mirror(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"notes")
    error = refused(f"file://{tmp_path}/file{below}", tmp_path)
    assert error.kind == "bad-mirror"
    assert (tmp_path / "file").read_bytes() == b"notes"


@pytest.mark.needs("azurite")
@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({}, "bucket-missing", "no-such-container"),
        ({"AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"another").decode()}, "no-credentials", "refused"),
        ({"AZURE_STORAGE_ACCOUNT_KEY": "very-secret!"}, "no-credentials", "malformed"),
        ({"AZURE_STORAGE_ACCOUNT_NAME": ""}, "no-credentials", "no credentials found"),
    ],
)
def test_each_refusal_of_azure_has_its_own_error(
    azure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], kind: str, words: str
) -> None:
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    error = refused(azure if changed else "az://no-such-container/run", tmp_path)
    assert error.kind == kind and words in error.headline()


@pytest.mark.parametrize("account", ["{very-secret", '{"private_key": "very-secret"}'])
def test_a_malformed_service_account_is_a_matter_of_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, account: str
) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", account)
    error = refused("gs://bucket/run", tmp_path)
    assert error.kind == "no-credentials" and "malformed" in error.headline()
