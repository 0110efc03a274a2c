"""How each cloud is asked whether it will take this machine away. A service is asked by one thread."""

import http.client
import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from unbroken.errors import BadSpot
from unbroken.launch.spot.notices import Cloud, Notice, Unreadable, read_aws, read_azure, read_gcp

# ---- one question ----

ADDRESS: Final = "UNBROKEN_SPOT_ADDRESS"
STANDARD: Final = "169.254.169.254"
TIMEOUT_S: Final = 2.0
_LIMIT_BYTES: Final = 1 << 16
_HTTP: Final = 80


@dataclass(frozen=True)
class Address:
    """Where a metadata service is asked."""

    host: str = STANDARD
    port: int = _HTTP


@dataclass(frozen=True)
class Answer:
    """What the service said."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class Silent(OSError):
    """The service did not answer, or not in HTTP."""


def find_address(environ: Mapping[str, str]) -> Address:
    """The address every cloud uses, or another one of this machine that is named for a test.

    Raises:
        BadSpot: the address is neither on this machine nor the standard one.
    """
    text = environ.get(ADDRESS, "").strip()
    if not text:
        return Address()
    host, colon, port = text.removeprefix("http://").rstrip("/").rpartition(":")
    if not colon:
        host, port = port, str(_HTTP)
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise BadSpot(source=ADDRESS, value=text, complaint="it is no HOST:PORT")
    try:
        # A name is refused: whoever answers for it could be anywhere.
        found = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        raise BadSpot(source=ADDRESS, value=text, complaint="its host is no numeric address") from None
    if not found.is_loopback and str(found) != STANDARD:
        complaint = f"only an address of this machine itself, or {STANDARD}, is asked"
        raise BadSpot(source=ADDRESS, value=text, complaint=complaint)
    return Address(str(found), int(port))


def ask(
    address: Address,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Answer:
    """Ask once.

    Raises:
        Silent: nobody answered in time, or with something that is no HTTP.
    """
    # http.client and not urllib: it knows neither proxies from the environment nor redirects.
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        connection.request(method, path, headers={"Connection": "close", **(headers or {})})
        answer = connection.getresponse()
        body = answer.read(_LIMIT_BYTES)
        return Answer(answer.status, body, {name.lower(): value for name, value in answer.getheaders()})
    except (OSError, http.client.HTTPException) as silence:
        raise Silent(str(silence) or type(silence).__name__) from silence
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

    def ask(self) -> Notice | None:
        """Whether there is a notice now.

        Raises:
            Silent: the service did not answer.
            Unreadable: it answered something else than it should.
        """


class Aws:
    """EC2's: a token first (IMDSv2), then the action, which is not found as long as there is none."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._token: str | None = None

    def ask(self) -> Notice | None:
        """Whether there is a notice now; see ``Service``."""
        answer = self._action()
        if answer.status == _UNAUTHORIZED:
            # The token has expired, or the machine is another one after a hibernation.
            self._token = None
            answer = self._action()
        if answer.status == _NOT_FOUND:
            return None
        return read_aws(_good(answer, _AWS_ACTION))

    def _action(self) -> Answer:
        if self._token is None:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
            answer = ask(self._address, _AWS_SESSION, method="PUT", headers=ttl)
            self._token = _plain(_good(answer, _AWS_SESSION))
        return ask(self._address, _AWS_ACTION, headers={"X-aws-ec2-metadata-token": self._token})


class Gcp:
    """Compute Engine's: two values, each of which proves by a header of its own that it is from there."""

    def __init__(self, address: Address, clock: Callable[[], float]) -> None:
        self._address, self._clock = address, clock
        self._seen: Notice | None = None

    def ask(self) -> Notice | None:
        """Whether there is a notice now; see ``Service``."""
        # Kept: the answer names no time, so the 30 s are counted from when it was first seen.
        if self._seen is None:
            preempted, maintenance = self._value(_GCP_PREEMPTED), self._value(_GCP_MAINTENANCE)
            self._seen = read_gcp(preempted, maintenance, now_s=self._clock())
        return self._seen

    def _value(self, path: str) -> bytes:
        answer = ask(self._address, path, headers=_GCP_FLAVOR)
        if answer.headers.get("metadata-flavor") != _GCP_FLAVOR["Metadata-Flavor"]:
            raise Unreadable(f"{path}: the answer does not say that it is Google's")
        return _good(answer, path)


class Azure:
    """Azure's scheduled events, which are never acknowledged here: that would only hasten them."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._machine: str | None = None

    def ask(self) -> Notice | None:
        """Whether there is a notice now; see ``Service``."""
        if self._machine is None:
            self._machine = _plain(_good(ask(self._address, _AZURE_NAME, headers=_AZURE_HEADER), _AZURE_NAME))
        return read_azure(_good(ask(self._address, _AZURE_EVENTS, headers=_AZURE_HEADER), _AZURE_EVENTS), self._machine)


def service_of(cloud: Cloud, address: Address, clock: Callable[[], float]) -> Service:
    """The service of a cloud."""
    if cloud == "aws":
        return Aws(address)
    return Gcp(address, clock) if cloud == "gcp" else Azure(address)


def _good(answer: Answer, path: str) -> bytes:
    if answer.status != _OK:
        raise Silent(f"{path} answered {answer.status}")
    return answer.body


def _plain(body: bytes) -> str:
    """A token or a name; it goes into a header or is compared, so nothing but one printable word will do."""
    text = body.decode("ascii", errors="replace").strip()
    if not text or not text.isascii() or not text.isprintable():
        raise Unreadable("a token or a name is no plain text")
    return text
