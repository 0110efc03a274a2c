"""Real S3 and Azure servers on loopback, and a proxy before one that fails as networks and stores do."""

import base64
import contextlib
import email.utils
import functools
import hashlib
import hmac
import http.client
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.patience import PATIENCE_S
from tests.ports import free_port

MOTO = Path(__file__).resolve().parents[2] / ".moto" / "bin" / "moto_server"
AZURITE = Path(__file__).resolve().parents[2] / ".azurite" / "node_modules" / ".bin" / "azurite-blob"
BUCKET = "bucket"
# How often a server is started at most, each time with another port.
_STARTS = 5
_ACCOUNT = "tester"
_ACCOUNT_KEY = base64.b64encode(b"a very-secret-key of an account on loopback").decode()
_XML = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>no</Message>{more}</Error>'


def environment(port: int, **changes: str) -> dict[str, str]:
    """The environment of a client of a server on loopback; never the metadata service of a cloud."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "very-secret-key",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        **changes,
    }


def azure_environment(port: int, **changes: str) -> dict[str, str]:
    """The environment of a client of azurite."""
    return {
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{_ACCOUNT}",
        "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": _ACCOUNT_KEY,
        **changes,
    }


def google_environment(port: int) -> dict[str, str]:
    """The environment of a Google Cloud client of a server on loopback; asks nobody for a token."""
    account = {"client_email": "", "private_key": "", "private_key_id": "", "disable_oauth": True}
    return {"GOOGLE_BASE_URL": f"http://127.0.0.1:{port}", "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}


def ask(port: int, method: str, path: str, headers: Mapping[str, str] | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


@contextlib.contextmanager
def moto() -> Iterator[int]:
    """A moto server with one bucket; yields its port."""
    command = [str(MOTO), "-H", "127.0.0.1", "-p"]
    with _serving(lambda port: [*command, str(port)], lambda port: ask(port, "PUT", f"/{BUCKET}")) as port:
        yield port


@contextlib.contextmanager
def azurite() -> Iterator[int]:
    """An azurite server with one container, which checks signatures; yields its port."""
    command = [str(AZURITE), "--blobHost", "127.0.0.1", "--inMemoryPersistence"]
    command += ["--disableTelemetry", "--skipApiVersionCheck", "--silent", "--blobPort"]
    accounts = {"AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_ACCOUNT_KEY}"}
    with _serving(lambda port: [*command, str(port)], _make_container, accounts) as port:
        yield port


@contextlib.contextmanager
def _serving(
    command: Callable[[int], list[str]], is_up: Callable[[int], int], more: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Start a server; where another program takes its port meanwhile and it ends, again with another port."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | dict(more or {})
    for _ in range(_STARTS):
        port = free_port()
        server = subprocess.Popen(command(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=clean)
        try:
            if _comes_up(server, functools.partial(is_up, port)):
                yield port
                return
        finally:
            server.kill()
            server.wait()
    raise AssertionError(f"{command(0)[0]} ended {_STARTS} times before it answered")


def _comes_up(server: "subprocess.Popen[bytes]", is_up: Callable[[], int]) -> bool:
    """Wait until a server answers; False if it ends before."""
    until = time.monotonic() + PATIENCE_S
    while server.poll() is None:
        try:
            status = is_up()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
            continue
        assert status in (200, 201) or server.poll() is not None, f"the server on loopback answers {status}"
        return server.poll() is None
    return False


def _make_container(port: int) -> int:
    """Create the container with a signed request: the client library makes none."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    stated = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    signed = "PUT" + "\n" * 12 + stated + f"/{_ACCOUNT}/{_ACCOUNT}/{BUCKET}\nrestype:container"
    digest = hmac.new(base64.b64decode(_ACCOUNT_KEY), signed.encode(), hashlib.sha256).digest()
    headers |= {"Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}", "Content-Length": "0"}
    return ask(port, "PUT", f"/{_ACCOUNT}/{BUCKET}?restype=container", headers)


@dataclass(frozen=True)
class Asked:
    """One request: what it is, and the how-manieth of its method."""

    method: str
    path: str
    nth: int
    headers: Mapping[str, str] = field(default_factory=dict)


# What becomes of a request: None passes it on; else one of the words below.
Rule = Callable[[Asked], str | None]
FAULTS = (
    *("drop", "error", "lie", "garbled", "cut", "expired"),
    *("refused", "skewed", "elsewhere", "denied", "slow", "deaf"),
)


class Proxy:
    """Passes requests on to a server, but for those that its rule spoils."""

    def __init__(self, upstream: int, translate: Callable[[dict[str, str]], dict[str, str]] = dict) -> None:
        self.rule: Rule = lambda asked: None
        self._translate = translate
        self.seen: list[Asked] = []
        self._upstream = upstream
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *words: object) -> None:
                pass

            def _handle(self) -> None:
                outer.handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815 -- the names of http.server

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        with self._lock:
            nth = self._counts[request.command] = self._counts.get(request.command, 0) + 1
            asked = Asked(request.command, request.path, nth, dict(request.headers.items()))
            self.seen.append(asked)
        fault = self.rule(asked)
        if fault == "slow":
            time.sleep(0.3)
            fault = None
        if fault == "drop":
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault in (None, "cut", "garbled", "deaf"):
            status, headers, answer = self._pass_on(asked, body)
            if fault == "deaf":
                # Done there, and nobody hears of it here.
                request.connection.shutdown(socket.SHUT_RDWR)
                return
            if fault == "garbled" and answer:
                # The right length and status, and one wrong byte.
                middle = len(answer) // 2
                answer = answer[:middle] + bytes([answer[middle] ^ 1]) + answer[middle + 1 :]
        else:
            status, headers, answer = _spoiled(fault)
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        size = int(headers.get("Content-Length", len(answer)))
        if "Content-Length" not in headers:
            request.send_header("Content-Length", str(size))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(answer[: len(answer) // 2] if fault == "cut" else answer)
        if fault == "cut":
            request.connection.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, asked: Asked, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=PATIENCE_S)
        try:
            headers = self._translate(dict(asked.headers))
            connection.request(asked.method, asked.path, body=body, headers=headers)
            answer = connection.getresponse()
            data = answer.read()
            dropped = ("transfer-encoding", "connection", "content-length")
            given = {name: value for name, value in answer.getheaders() if name.lower() not in dropped}
            given["Content-Length"] = answer.getheader("Content-Length") or str(len(data))
            return answer.status, given, data
        finally:
            connection.close()


def from_google(headers: dict[str, str]) -> dict[str, str]:
    """The headers of a request in Google Cloud's XML interface as S3 states them: the condition and who asks."""
    dropped = ("x-goog-if-generation-match", "authorization")
    kept = {name: value for name, value in headers.items() if name.lower() not in dropped}
    is_condition = any(name.lower() == dropped[0] and value == "0" for name, value in headers.items())
    # The S3 server behind wants a signature and does not check it.
    kept["Authorization"] = "AWS4-HMAC-SHA256 Credential=tester/20260101/us-east-1/s3/aws4_request, Signature=0"
    return {**kept, "If-None-Match": "*"} if is_condition else kept


def _spoiled(fault: str) -> tuple[int, dict[str, str], bytes]:
    if fault == "lie":
        return 200, {"ETag": '"0123456789abcdef0123456789abcdef"'}, b""
    status, code, more = {
        "error": (500, "InternalError", ""),
        "expired": (400, "ExpiredToken", ""),
        "refused": (403, "InvalidAccessKeyId", ""),
        "skewed": (403, "RequestTimeTooSkewed", ""),
        "elsewhere": (400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>"),
        "denied": (403, "AccessDenied", ""),
    }[fault]
    return status, {"Content-Type": "application/xml"}, _XML.format(code=code, more=more).encode()
