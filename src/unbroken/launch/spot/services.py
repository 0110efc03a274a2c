"""Clients of the metadata services that announce a preemption; each is used by one thread."""

import http.client
import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from unbroken.errors import BadSpot
from unbroken.launch.spot.notices import Cloud, Notice, Unreadable, read_aws, read_azure, read_gcp

# ---- one HTTP request ----

ADDRESS: Final = "UNBROKEN_SPOT_ADDRESS"
STANDARD: Final = "169.254.169.254"
TIMEOUT_S: Final = 2.0
_LIMIT_BYTES: Final = 1 << 16
_HTTP: Final = 80


@dataclass(frozen=True)
class ServiceAddress:
    """The address of a metadata service."""

    host: str = STANDARD
    port: int = _HTTP


@dataclass(frozen=True)
class Response:
    """A response of the service."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class Unreachable(OSError):
    """The service did not respond, or not with HTTP."""


def find_address(environ: Mapping[str, str]) -> ServiceAddress:
    """The address that all clouds use, or a loopback address from the environment, for tests.

    Raises:
        BadSpot: the address is neither loopback nor the standard one.
    """
    text = environ.get(ADDRESS, "").strip()
    if not text:
        return ServiceAddress()
    host, colon, port = text.removeprefix("http://").rstrip("/").rpartition(":")
    if not colon:
        host, port = port, str(_HTTP)
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise BadSpot(source=ADDRESS, value=text, complaint="it is not HOST:PORT")
    try:
        # No host names: a name could resolve to any machine.
        found = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        raise BadSpot(source=ADDRESS, value=text, complaint="its host is not a numeric address") from None
    if not found.is_loopback and str(found) != STANDARD:
        complaint = f"it must be a loopback address or {STANDARD}"
        raise BadSpot(source=ADDRESS, value=text, complaint=complaint)
    return ServiceAddress(str(found), int(port))


def request(
    address: ServiceAddress,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Response:
    """Send one request.

    Raises:
        Unreachable: no response in time, or not with HTTP.
    """
    # http.client, not urllib: it uses no proxies from the environment and follows no redirects.
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        connection.request(method, path, headers={"Connection": "close", **(headers or {})})
        response = connection.getresponse()
        body = response.read(_LIMIT_BYTES)
        return Response(response.status, body, {name.lower(): value for name, value in response.getheaders()})
    except (OSError, http.client.HTTPException) as silence:
        raise Unreachable(str(silence) or type(silence).__name__) from silence
    finally:
        connection.close()


# ---- the services ----

_TOKEN_TTL_S: Final = 21_600
_AWS_SESSION: Final = "/latest/api/token"
_AWS_ACTION: Final = "/latest/meta-data/spot/instance-action"
_GCP_PREEMPTED: Final = "/computeMetadata/v1/instance/preempted"
_GCP_MAINTENANCE: Final = "/computeMetadata/v1/instance/maintenance-event"
_GCP_FLAVOR: Final = {"Metadata-Flavor": "Google"}
_AZURE_EVENTS: Final = "/metadata/scheduledevents?api-version=2020-07-01"
_AZURE_NAME: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_AZURE_HEADER: Final = {"Metadata": "true"}
_OK, _UNAUTHORIZED, _NOT_FOUND = 200, 401, 404


class Service(Protocol):
    """One cloud's metadata service."""

    def poll(self) -> Notice | None:
        """The current notice, if any.

        Raises:
            Unreachable: the service did not respond.
            Unreadable: the response is not in the documented form.
        """


class Aws:
    """EC2: a token first (IMDSv2), then the action; 404 while there is none."""

    def __init__(self, address: ServiceAddress) -> None:
        self._address = address
        self._token: str | None = None

    def poll(self) -> Notice | None:
        """The current notice; see ``Service``."""
        response = self._action()
        if response.status == _UNAUTHORIZED:
            # The token has expired, or the instance changed after a hibernation.
            self._token = None
            response = self._action()
        if response.status == _NOT_FOUND:
            return None
        return read_aws(_good(response, _AWS_ACTION))

    def _action(self) -> Response:
        if self._token is None:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
            response = request(self._address, _AWS_SESSION, method="PUT", headers=ttl)
            self._token = _plain(_good(response, _AWS_SESSION))
        return request(self._address, _AWS_ACTION, headers={"X-aws-ec2-metadata-token": self._token})


class Gcp:
    """Compute Engine: two values, each with a header that identifies the service."""

    def __init__(self, address: ServiceAddress, clock: Callable[[], float]) -> None:
        self._address, self._clock = address, clock
        self._seen: Notice | None = None

    def poll(self) -> Notice | None:
        """The current notice; see ``Service``."""
        # Kept: the response has no time, so the 30 s count from when it was first seen.
        if self._seen is None:
            preempted, maintenance = self._value(_GCP_PREEMPTED), self._value(_GCP_MAINTENANCE)
            self._seen = read_gcp(preempted, maintenance, now_s=self._clock())
        return self._seen

    def _value(self, path: str) -> bytes:
        response = request(self._address, path, headers=_GCP_FLAVOR)
        if response.headers.get("metadata-flavor") != _GCP_FLAVOR["Metadata-Flavor"]:
            raise Unreadable(f"{path}: the response lacks the header Metadata-Flavor: Google")
        return _good(response, path)


class Azure:
    """Azure scheduled events, never acknowledged: that would only hasten them."""

    def __init__(self, address: ServiceAddress) -> None:
        self._address = address
        self._machine: str | None = None

    def poll(self) -> Notice | None:
        """The current notice; see ``Service``."""
        if self._machine is None:
            self._machine = _plain(_good(request(self._address, _AZURE_NAME, headers=_AZURE_HEADER), _AZURE_NAME))
        return read_azure(
            _good(request(self._address, _AZURE_EVENTS, headers=_AZURE_HEADER), _AZURE_EVENTS), self._machine
        )


def service_of(cloud: Cloud, address: ServiceAddress, clock: Callable[[], float]) -> Service:
    """The service of a cloud."""
    if cloud == "aws":
        return Aws(address)
    return Gcp(address, clock) if cloud == "gcp" else Azure(address)


def _good(response: Response, path: str) -> bytes:
    if response.status != _OK:
        raise Unreachable(f"{path} answered {response.status}")
    return response.body


def _plain(body: bytes) -> str:
    """A token or a name: one printable word, since it goes into a header or is compared."""
    text = body.decode("ascii", errors="replace").strip()
    if not text or not text.isascii() or not text.isprintable():
        raise Unreadable("a token or a name is not printable text")
    return text
