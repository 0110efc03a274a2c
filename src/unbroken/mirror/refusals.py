"""Which error a refusal of an object store is, from the words of the client library.

Stores state a code (``NoSuchBucket``); the library passes it on in its text, with the URL and no credentials. Only
code, status and region are taken from that text, so that nothing else of it reaches a log or a record.
"""

import re
from typing import Final

from unbroken.errors import (
    BucketMissing,
    ClockSkewed,
    MirrorReadOnly,
    MirrorUnreachable,
    NoCredentials,
    UnbrokenError,
    WrongRegion,
)
from unbroken.mirror.address import Address

_CODE: Final = re.compile(r"<Code>([A-Za-z.]{1,64})</Code>")
_STATUS: Final = re.compile(r"status code: ([1-5][0-9]{2})")
_REGION: Final = re.compile(r"<Region>([a-z0-9-]{1,32})</Region>|x-amz-bucket-region[^a-z0-9]+([a-z0-9-]{1,32})")
_METADATA_SERVICES: Final = ("/latest/api/token", "/latest/meta-data", "/computeMetadata/", "/metadata/identity")

_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound"})
_SKEWED: Final = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_EXPIRED: Final = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
_REFUSED: Final = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthenticationFailed", "InvalidAuthenticationInfo"}
    | {"NoAuthenticationInformation", "InvalidSecurity", "AuthenticationRequired"}
)
# What the library says of a key that is no base64, and of a service account that cannot be read.
_UNREADABLE: Final = ("Invalid Access Key", "Unable to open service account", "Unable to decode service account")
_ELSEWHERE: Final = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "TemporaryRedirect"}
)


def code_of(text: str) -> str | None:
    """The code that a store gave, if the library's text has one."""
    found = _CODE.search(text)
    return found[1] if found else None


def classified(text: str, address: Address, operation: str, server: str = "") -> UnbrokenError:
    """The error for a refusal; ``text`` is what the library said, ``operation`` what was asked of which server."""
    mirror, code = str(address), code_of(text) or ""
    status = int(found[1]) if (found := _STATUS.search(text)) else None
    if code in _NO_BUCKET:
        return BucketMissing(mirror=mirror, bucket=address.bucket)
    if code in _SKEWED:
        return ClockSkewed(mirror=mirror)
    if code in _EXPIRED:
        return NoCredentials(mirror=mirror, problem="expired")
    if code in _REFUSED or "Server failed to authenticate the request" in text:
        return NoCredentials(mirror=mirror, problem="refused")
    if any(words in text for words in _UNREADABLE):
        return NoCredentials(mirror=mirror, problem="unreadable")
    if any(service in text for service in _METADATA_SERVICES) or "Missing" in text[:40]:
        return NoCredentials(mirror=mirror, problem="none")
    if code in _ELSEWHERE or status == 301 or "incorrectly configured region" in text:
        region = next((group for found in _REGION.finditer(text) for group in found.groups() if group), None)
        return WrongRegion(mirror=mirror, region=region)
    if status == 401:
        return NoCredentials(mirror=mirror, problem="refused")
    if status == 403:
        return MirrorReadOnly(mirror=mirror, operation=operation)
    asked = f" ({server})" if server else ""
    return MirrorUnreachable(mirror=mirror, operation=operation, cause=_cause(text, code, status) + asked)


def _cause(text: str, code: str, status: int | None) -> str:
    if status is not None:
        return f"HTTP {status}" + (f" {code}" if code else "")
    for words, cause in (
        ("Connection refused", "connection refused"),
        ("dns error", "the host name is unknown"),
        ("InvalidContentType", "the server does not speak TLS: its address begins with http://"),
        ("InvalidCertificate", "the TLS certificate of the server is not trusted"),
        ("Connection reset", "the server closed the connection: perhaps its address begins with https://"),
        ("operation timed out", "timed out"),
        ("TimedOut", "timed out"),
        ("kind: Timeout", "timed out"),
        ("kind: Connect", "no connection"),
        ("error decoding response body", "the answer was cut short"),
        ("kind: Interrupted", "the connection broke"),
    ):
        if words in text:
            return cause
    return "the request did not succeed"
