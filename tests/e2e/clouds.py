"""Metadata services of three clouds on loopback, as strict about their protocol as the real ones."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.patience import PATIENCE_S

MACHINE = "worker-7"


@dataclass
class Cloud:
    """What a service knows and was asked; change it while it runs."""

    kind: str
    port: int = 0
    notice: bytes | None = None
    tokens: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    is_hanging: bool = False
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {"UNBROKEN_SPOT": self.kind, "UNBROKEN_SPOT_ADDRESS": self.address}

    def expire(self) -> None:
        """Take back every token that was given."""
        self.tokens[:] = [f"gone {token}" for token in self.tokens]

    def announce(self, in_s: float = 120.0) -> None:
        """Say that this machine goes."""
        at = time.time() + in_s
        if self.kind == "aws":
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
            self.notice = json.dumps({"action": "terminate", "time": stamp}).encode()
        elif self.kind == "gcp":
            self.notice = b"TRUE"
        else:
            self.notice = azure_events("Preempt", MACHINE, formatdate(at, usegmt=True))


def azure_events(what: str, machine: str, at: str = "") -> bytes:
    event = {"EventId": "1", "EventType": what, "EventStatus": "Scheduled", "Resources": [machine], "NotBefore": at}
    return json.dumps({"DocumentIncarnation": 1, "Events": [event]}).encode()


@contextlib.contextmanager
def serving(kind: str) -> Iterator[Cloud]:
    """A service that runs while the block does."""
    cloud = Cloud(kind)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- its name there
            pass

        def do_PUT(self) -> None:
            self._answer("PUT")

        def do_GET(self) -> None:
            self._answer("GET")

        def _answer(self, method: str) -> None:
            cloud.asked.append(f"{method} {self.path}")
            if cloud.is_hanging:
                cloud.released.wait(PATIENCE_S)
            status, body = _reply(cloud, method, self.path, {k.lower(): v for k, v in self.headers.items()})
            self.send_response(status)
            if cloud.kind == "gcp":
                self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    cloud.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield cloud
    finally:
        cloud.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _reply(cloud: Cloud, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    return {"aws": _aws, "gcp": _gcp, "azure": _azure}[cloud.kind](cloud, method, path, headers)


def _aws(cloud: Cloud, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    if path == "/latest/api/token":
        ttl = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
        if method != "PUT" or not ttl.isdecimal() or not 1 <= int(ttl) <= 21_600 or "x-forwarded-for" in headers:
            return 400, b""
        cloud.tokens.append(f"token-{len(cloud.tokens)}==")
        return 200, cloud.tokens[-1].encode()
    if headers.get("x-aws-ec2-metadata-token") not in cloud.tokens:
        return 401, b"<html>Unauthorized</html>"
    if path != "/latest/meta-data/spot/instance-action" or cloud.notice is None:
        return 404, b"<html>Not Found</html>"
    return 200, cloud.notice


def _gcp(cloud: Cloud, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    if headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in headers:
        return 403, b""
    if path == "/computeMetadata/v1/instance/preempted":
        return 200, cloud.notice if cloud.notice in (b"TRUE", b"garbage") else b"FALSE"
    if path == "/computeMetadata/v1/instance/maintenance-event":
        return 200, cloud.notice if cloud.notice is not None and b"_ON_HOST" in cloud.notice else b"NONE"
    return 404, b""


def _azure(cloud: Cloud, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    asked = urlsplit(path)
    if headers.get("metadata") != "true" or "api-version" not in parse_qs(asked.query):
        return 400, b'{"error":"Bad request"}'
    if asked.path == "/metadata/instance/compute/name":
        return 200, MACHINE.encode()
    if asked.path == "/metadata/scheduledevents":
        return 200, cloud.notice or b'{"DocumentIncarnation":0,"Events":[]}'
    return 404, b""


@contextlib.contextmanager
def loopback_only() -> Iterator[list[object]]:
    """Refuse every connection of this process that leaves it for another machine; yields where it went."""
    connect = socket.socket.connect
    went: list[object] = []

    def guarded(self: socket.socket, address: object) -> None:
        went.append(address)
        host = address[0] if isinstance(address, tuple) else ""
        if self.family in (socket.AF_INET, socket.AF_INET6) and not str(host).startswith(("127.", "::1")):
            raise AssertionError(f"a connection to {address!r}")
        connect(self, address)  # type: ignore[arg-type]

    socket.socket.connect = guarded  # type: ignore[method-assign,assignment]
    try:
        yield went
    finally:
        socket.socket.connect = connect  # type: ignore[method-assign]
