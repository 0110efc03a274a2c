"""One server of each kind for all tests of mirrors in a process, and a prefix of its own for each test."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mirror.servers import (
    BUCKET,
    Proxy,
    azure_environment,
    azurite,
    environment,
    from_google,
    google_environment,
    moto,
)


@pytest.fixture(scope="session")
def server() -> Iterator[int]:
    with moto() as port:
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the server; clients of this process go through it."""
    between = Proxy(server)
    for name, value in environment(between.port).items():
        monkeypatch.setenv(name, value)
    yield between
    between.close()


@pytest.fixture
def direct(server: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Clients of this process go straight to the server."""
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def url() -> str:
    return f"s3://{BUCKET}/{secrets.token_hex(6)}/run"


@pytest.fixture(scope="session")
def azure_server() -> Iterator[int]:
    with azurite() as port:
        yield port


@pytest.fixture
def azure(azure_server: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address in a real Azure server; clients of this process reach it."""
    for name, value in azure_environment(azure_server).items():
        monkeypatch.setenv(name, value)
    return f"az://{BUCKET}/{secrets.token_hex(6)}/run"


@pytest.fixture
def google(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address for the Google Cloud client; its condition is translated for the S3 server that answers."""
    between = Proxy(server, from_google)
    for name, value in google_environment(between.port).items():
        monkeypatch.setenv(name, value)
    yield f"gs://{BUCKET}/{secrets.token_hex(6)}/run"
    between.close()


def address_in(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address in a store of this kind that is not used yet."""
    if kind == "file":
        return f"file://{tmp_path}/mirror"
    if kind == "s3":
        request.getfixturevalue("direct")
    found: str = request.getfixturevalue({"s3": "url", "az": "azure", "gs": "google"}[kind])
    return found


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.needs("moto"))])
def mirror(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory, and an S3 server."""
    return address_in(request.param, request, tmp_path)


@pytest.fixture(
    params=[
        "file",
        pytest.param("s3", marks=pytest.mark.needs("moto")),
        pytest.param("az", marks=pytest.mark.needs("azurite")),
        pytest.param("gs", marks=pytest.mark.needs("moto")),
    ]
)
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Every kind of store."""
    return address_in(request.param, request, tmp_path)
