"""The address of a mirror: scheme, bucket and prefix. Text only; holds no credentials and refuses any."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from unbroken.errors import BadMirror

SCHEMES: Final = ("s3", "gs", "az", "file")
_BUCKET: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{1,221}[0-9A-Za-z]")
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class Address:
    """One place in an object store, or a directory for ``file``; ``prefix`` has no slash at its ends."""

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        if self.scheme == "file":
            # What `parse_address` would read otherwise: an escape, options, an anchor.
            return f"file:///{self.prefix.replace('%', '%25').replace('?', '%3F').replace('#', '%23')}"
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def below(self, name: str) -> "Address":
        """The address of a name under this one."""
        return Address(self.scheme, self.bucket, f"{self.prefix}/{name}".strip("/"))

    @property
    def directory(self) -> Path:
        """The directory of a ``file`` address."""
        return Path("/") / self.prefix


def address_of(directory: Path) -> Address:
    """The address of a local directory."""
    return Address("file", "", str(directory.absolute()).strip("/"))


def is_url(text: str) -> bool:
    """Whether a text is meant as an address and not as a path."""
    return _URL.match(text) is not None


def is_server(text: str) -> bool:
    """Whether a text is the address of an HTTP server."""
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and text.isprintable() and " " not in text


def addresses_in(text: str) -> list[str]:
    """The addresses in a text that may hold several, separated by commas."""
    return list(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))


def parse_address(text: str) -> Address:
    """The address in a text.

    Raises:
        BadMirror: it is none, or holds credentials or options: those come from the environment, never from an address
            that is written to records and logs.
    """
    if not is_url(text):
        raise BadMirror(text=text, complaint="it has no scheme")
    if sum(map(is_url, addresses_in(text))) > 1:
        raise BadMirror(text=text, complaint="it has several addresses, and only one can be given here")
    parts = urlsplit(text)
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        # The text itself may hold a secret.
        shown = f"{parts.scheme}://…@{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise BadMirror(text=shown, complaint="credentials do not belong into an address")
    if parts.query or parts.fragment:
        raise BadMirror(text=f"{parts.scheme}://{parts.netloc}{parts.path}", complaint="it has options behind a ? or #")
    if parts.scheme not in SCHEMES:
        raise BadMirror(text=text, complaint=f"the scheme {parts.scheme} is unknown")
    pieces = parts.path.strip("/").split("/") if parts.path.strip("/") else []
    if any(piece in ("", ".", "..") for piece in pieces) or not text.isprintable():
        raise BadMirror(text=text, complaint="it has an empty piece, a dot piece or an unprintable character")
    if parts.scheme == "file":
        if parts.netloc or not pieces:
            raise BadMirror(text=text, complaint="a directory has three slashes: file:///shared/mirror")
        return Address("file", "", "/".join(map(unquote, pieces)))
    if not _BUCKET.fullmatch(parts.netloc):
        raise BadMirror(text=text, complaint=f"'{parts.netloc}' is no bucket name")
    return Address(parts.scheme, parts.netloc, "/".join(pieces))
