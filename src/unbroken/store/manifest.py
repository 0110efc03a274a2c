"""What a checkpoint contains: canonical JSON, a digest for every part and one for itself.

The file is one line, ``{"body":{…},"digest":"xxh3-128:…","format":"unbroken.checkpoint/2"}``, in the form of
``envelope``: no field is read before the body's digest is verified. Decoding treats the file as hostile:
it is data, never code, and every name in it must stay inside the checkpoint.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any, Final

from unbroken.errors import FormatUnknown, ManifestDamaged, UnsafeName
from unbroken.store.digest import ALGORITHM, BLOCK_BYTES, DIGEST_BYTES, HEX_LENGTH, PartDigest
from unbroken.store.envelope import Envelope, canonical, from_canonical, opened, sealed
from unbroken.store.fields import Malformed, Table, are_whole
from unbroken.store.names import KINDS, require_safe
from unbroken.store.old_names import updated

FORMAT: Final = "unbroken.checkpoint/2"
_FORMATS: Final = (FORMAT, "unbroken.checkpoint/1")
_ANY_FORMAT: Final = re.compile(r"unbroken\.checkpoint/[1-9][0-9]*")
FILE_LIMIT_BYTES: Final = 1 << 30
# It names a pin's file, so it must not hide and must not climb.
_ID: Final = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,127}")
_BODY: Final = frozenset(
    {"block_bytes", "digest", "fingerprint", "id", "job", "kind", "metadata", "metrics", "origin", "parts"}
    | {"saved_at_ns", "step", "tensors"}
)
_PART: Final = frozenset({"blocks", "bytes", "digest", "name"})
_HEX: Final = re.compile(r"[0-9a-f]*")
_SMALLEST_BLOCK: Final = 1 << 10
_LARGEST_BLOCK: Final = 1 << 30


@dataclass(frozen=True)
class Part:
    """One file by one writer: its name inside the checkpoint and the digest of its bytes."""

    name: str
    digest: PartDigest

    @property
    def size_bytes(self) -> int:
        """How many bytes it has."""
        return self.digest.size_bytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as a checkpoint holds it; ``digest`` is over its bytes or its live fingerprint, by ``origin``."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


# By the digest of their bytes: a start and every sweep look at the same manifests again, and nearly all of the time to
# decode one goes to its tensors, of which there may be a million.
_OUTLINES: Final[dict[tuple[str, str], "Manifest"]] = {}
_MOST_OUTLINES: Final = 1024


@dataclass(frozen=True)
class Manifest:
    """The contents of one checkpoint.

    ``metadata`` is what the store does not interpret: world size, versions, architecture and config hashes.
    """

    id: str
    step: int
    kind: str
    saved_at_ns: int
    job: str
    origin: str
    parts: tuple[Part, ...]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    fingerprint: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES

    @property
    def size_bytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.size_bytes for part in self.parts)


def encode(manifest: Manifest) -> bytes:
    """The manifest's file, byte for byte the same for the same manifest.

    Raises:
        ValueError: a text is not valid Unicode, or a number in ``metadata`` is not finite.
    """
    head = canonical(
        {
            "block_bytes": manifest.block_bytes,
            "digest": ALGORITHM,
            "fingerprint": manifest.fingerprint,
            "id": manifest.id,
            "job": manifest.job,
            "kind": manifest.kind,
            "metadata": manifest.metadata,
            "metrics": {name: _metric_to_json(value) for name, value in manifest.metrics.items()},
            "origin": manifest.origin,
            "parts": [_part_to_json(part) for part in sorted(manifest.parts, key=lambda part: part.name)],
            "saved_at_ns": manifest.saved_at_ns,
            "step": manifest.step,
        }
    )
    # Last of all members in their order. Put together as text: there may be a million, and a list for each would be
    # looked at by the garbage collector, which holds up the training loop too.
    tensors = ",".join(_spelled(name, manifest.tensors[name]) for name in sorted(manifest.tensors))
    return sealed(b'%s,"tensors":{%s}}' % (head[:-1], tensors.encode()), FORMAT)


def _spelled(name: str, tensor: Tensor) -> str:
    dtype, digest = encode_basestring(tensor.dtype), encode_basestring(tensor.digest)
    return f"{encode_basestring(name)}:[{dtype},[{','.join(map(str, tensor.shape))}],{digest}]"


def decode(data: bytes, path: Path) -> Manifest:
    """The manifest in a file's bytes, its digest verified first; ``path`` is for the error.

    Raises:
        ManifestDamaged: the bytes are not what a commit wrote.
        FormatUnknown: another version's manifest, or a digest this version does not know.
        UnsafeName: a part's name leads out of the checkpoint.
    """
    return _decoded(_verified(data, path), path)


def decode_outline(data: bytes, path: Path) -> Manifest:
    """The manifest without its tensors; its bytes are verified, and decoded only where they are not known.

    Raises:
        UnbrokenError: as ``decode`` raises it.
    """
    found = _verified(data, path)
    return _OUTLINES.get((found.form, found.proof)) or replace(_decoded(found, path), tensors={})


def _decoded(found: Envelope, path: Path) -> Manifest:
    try:
        manifest = _manifest(Table(updated(from_canonical(found.body), found.form), "body"))
    except UnsafeName as refused:
        raise UnsafeName(name=refused.name, reason=refused.reason, path=path) from refused
    except (ValueError, OverflowError, RecursionError, Malformed) as wrong:
        raise ManifestDamaged(path=path, complaint=f"its body does not decode: {_short(wrong)}") from wrong
    if len(_OUTLINES) >= _MOST_OUTLINES:
        _OUTLINES.clear()
    _OUTLINES[found.form, found.proof] = replace(manifest, tensors={})
    return manifest


def _verified(data: bytes, path: Path) -> Envelope:
    found = opened(data)
    if found is None:
        raise ManifestDamaged(path=path, complaint=f"its {len(data)} bytes have not the form of a manifest")
    if not _ANY_FORMAT.fullmatch(found.form):
        raise ManifestDamaged(path=path, complaint=f"its format is called {found.form!r}")
    if found.form not in _FORMATS:
        raise FormatUnknown(path=path, found=found.form, known=_FORMATS)
    is_verified = found.is_verified
    if found.algorithm != ALGORITHM:
        # A body that matches our own digest was written with it: then the algorithm's name is damaged.
        if not is_verified:
            raise FormatUnknown(path=path, found=f"digest {found.algorithm}", known=(ALGORITHM,))
        raise ManifestDamaged(path=path, complaint=f"its digest is called {found.algorithm}")
    if not is_verified:
        raise ManifestDamaged(path=path, complaint="its bytes do not match its own digest")
    return found


def _manifest(body: Table) -> Manifest:
    algorithm = body.text("digest")
    if algorithm != ALGORITHM:
        raise Malformed(f"digest is {algorithm!r}")
    block_bytes = body.whole("block_bytes")
    if not _SMALLEST_BLOCK <= block_bytes <= _LARGEST_BLOCK:
        raise Malformed(f"block_bytes is {block_bytes}")
    body.only(_BODY)
    return Manifest(
        id=body.matching("id", _ID),
        step=body.whole("step"),
        kind=body.one_of("kind", KINDS),
        saved_at_ns=body.whole("saved_at_ns"),
        job=body.text("job"),
        origin=body.text("origin"),
        parts=_parts(body.rows("parts"), block_bytes),
        tensors={name: _tensor(value, name) for name, value in body.table("tensors").items()},
        metrics={name: _metric_from_json(value, name) for name, value in body.table("metrics").items()},
        fingerprint=body.optional_text("fingerprint"),
        metadata=body.table("metadata"),
        block_bytes=block_bytes,
    )


def _part_to_json(part: Part) -> dict[str, Any]:
    shown: dict[str, Any] = {"bytes": part.size_bytes, "digest": part.digest.whole, "name": part.name}
    if len(part.digest.blocks) > 1:
        shown["blocks"] = b"".join(part.digest.blocks).hex()
    return shown


def _parts(rows: Sequence[Table], block_bytes: int) -> tuple[Part, ...]:
    parts = tuple(_part(row, block_bytes) for row in rows)
    if [part.name for part in parts] != sorted(part.name for part in parts):
        raise Malformed("its parts are not in the order of their names")
    names = {part.name for part in parts}
    if len(names) != len(parts):
        raise Malformed("two parts have the same name")
    for name in names:
        above = name
        while "/" in above:
            above = above.rpartition("/")[0]
            if above in names:
                raise Malformed(f"part {above!r} would have to be a file and a directory")
    return parts


def _part(row: Table, block_bytes: int) -> Part:
    row.only(_PART)
    name = require_safe(row.text("name"))
    size_bytes = row.whole("bytes")
    whole = row.matching("digest", _HEX)
    expected = max(1, -(-size_bytes // block_bytes))
    raw = bytes.fromhex(row.matching("blocks", _HEX) if expected > 1 or "blocks" in row else whole)
    if len(raw) != expected * DIGEST_BYTES or len(whole) != HEX_LENGTH or ("blocks" in row) != (expected > 1):
        raise Malformed(f"part {name!r} has digests for {len(raw) // DIGEST_BYTES} blocks, not {expected}")
    digest = PartDigest(size_bytes, tuple(raw[i : i + DIGEST_BYTES] for i in range(0, len(raw), DIGEST_BYTES)))
    if digest.whole != whole:
        raise Malformed(f"part {name!r} has block digests that do not make its digest")
    return Part(name, digest)


def _tensor(value: object, name: str) -> Tensor:
    # A manifest may have a million of them: types are compared directly, which takes a third of the time of ``match``.
    if type(value) is list and len(value) == 3:
        dtype, shape, digest = value
        if type(dtype) is str and type(shape) is list and type(digest) is str and are_whole(shape):
            return Tensor(dtype, tuple(shape), digest)
    raise Malformed(f"tensor {name!r} is not [dtype, shape, digest]")


def _metric_to_json(value: float) -> float | str:
    # JSON has no NaN and no infinity; a metric that left the numbers must not stop a save.
    return float(value) if math.isfinite(value) else str(float(value))


def _metric_from_json(value: object, name: str) -> float:
    match value:
        case "nan" | "inf" | "-inf" | float():
            return float(value)
    raise Malformed(f"metric {name!r} is not a number")


def _short(wrong: Exception) -> str:
    return " ".join(str(wrong).split())[:120] or type(wrong).__name__
