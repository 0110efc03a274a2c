"""Records with their own checksum: one line of JSON, a body and the digest of its bytes in the file.

``{"body":…,"digest":"xxh3-128:…","format":"…"}`` is the envelope of what is kept; records of work in progress leave
the algorithm and the format out. It never changes: what may change is a body, and then its format's name does. Bodies
that are kept have one spelling, so that the same record is the same bytes. Readers decode the body
and raise the errors; nothing here trusts what it reads.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.files import Files
from unbroken.store.digest import ALGORITHM, HEX_LENGTH, digest_bytes
from unbroken.store.fields import Malformed, parsed

_START: Final = b'{"body":'
_END: Final = re.compile(rb',"digest":"([a-z0-9-]{1,32}):([0-9a-f]{1,256})","format":"([ -!#-\[\]-~]{1,64})"}\n')
_END_LONGEST: Final = 512
_BARE_END_BYTES: Final = len(b',"digest":""}\n') + HEX_LENGTH


@dataclass(frozen=True)
class Envelope:
    """The fields of such a file; the body may be used only if it is verified."""

    body: bytes
    algorithm: str
    proof: str
    form: str

    @property
    def is_verified(self) -> bool:
        """Whether the body has the digest beside it, computed with our algorithm whichever the file names."""
        return digest_bytes(self.body).hex() == self.proof


def sealed(body: bytes, form: str) -> bytes:
    """The file of a body that is of this format."""
    proof = f"{ALGORITHM}:{digest_bytes(body).hex()}".encode()
    return b'%s%s,"digest":"%s","format":"%s"}\n' % (_START, body, proof, form.encode())


def opened(data: bytes) -> Envelope | None:
    """The fields of such a file, not verified yet; None if it has another form."""
    ends = list(_END.finditer(data, max(len(data) - _END_LONGEST, 0)))
    if not data.startswith(_START) or not ends or ends[-1].end() != len(data):
        return None
    return Envelope(data[len(_START) : ends[-1].start()], *(group.decode() for group in ends[-1].groups()))


def sealed_bare(body: bytes) -> bytes:
    """The file of a body that no other version reads: without an algorithm and a format."""
    return b'%s%s,"digest":"%s"}\n' % (_START, body, digest_bytes(body).hex().encode())


def opened_bare(data: bytes) -> bytes | None:
    """The body of such a file; None if its digest does not match."""
    body = data[len(_START) : -_BARE_END_BYTES]
    return body if sealed_bare(body) == data else None


def begins_one(files: Files, path: Path) -> bool:
    """Whether a file begins like an envelope, to distinguish ours from another tool's of the same name.

    Raises:
        StorageFailed: I/O error.
    """
    start = bytearray(len(_START))
    with files.reading(path) as source:
        return source.fill(0, memoryview(start)) == len(start) and start == _START


def canonical(value: object) -> bytes:
    """The one spelling of a JSON value.

    Raises:
        ValueError: a text is not valid Unicode, or a number is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def from_canonical(data: bytes) -> Any:  # noqa: ANN401 -- whatever JSON held
    """The value that is spelled so.

    Raises:
        Malformed: it is spelled in another way.
        ValueError: it is not JSON, or is nested too deeply.
    """
    found = parsed(data)
    # Two readers must never see two values in the same bytes: no key twice, no NaN, one order, one spelling.
    if canonical(found) != data:
        raise Malformed("it is not canonical")
    return found
