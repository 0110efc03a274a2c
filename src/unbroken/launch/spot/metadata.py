"""One question to a machine's metadata service: no proxy, no redirect, no name to look up, little time, few bytes."""

import http.client
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from unbroken.errors import BadSpot

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
