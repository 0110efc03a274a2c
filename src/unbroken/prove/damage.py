"""Damage to the newest checkpoint, as broken disks and crashes do it; every byte goes through ``files``.

The damaged file replaces the good one atomically, so that a killed prover leaves one or the other. Only runs made by
the prover or the demo are damaged.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from unbroken.files import Source
from unbroken.quoting import amounts
from unbroken.store.check import Level, verify
from unbroken.store.commit import walk_files
from unbroken.store.directory import Store
from unbroken.store.names import MANIFEST, DraftName, scratch
from unbroken.store.scan import newest_first, scan

_CHUNK_BYTES: Final = 1 << 20
_SCRATCH: Final = scratch("damage", "part")


@dataclass(frozen=True)
class Damage:
    """The damage and its checkpoint; ``name`` is None if nothing was damaged, and ``words`` say why."""

    words: str
    name: str | None = None


def do_damage(store: Store, kind: str, where: tuple[float, float], *, job: int) -> Damage:
    """Damage the newest checkpoint, if a good one is left: a run without any cannot resume.

    Args:
        store: the store of a run that is not running.
        kind: ``flip``, ``truncate`` or ``torn``.
        where: which of its files, and where in it, as shares.
        job: the job named as the writer of a torn checkpoint.

    Raises:
        StorageFailed: an I/O error.
    """
    names = newest_first(store, scan(store).committed)
    sound = [name for name in names if verify(store, name, Level.FULL).is_sound]
    if len(sound) < 2:
        return Damage(f"no {kind}: there is no second checkpoint to fall back to")
    name = sound[0]
    if kind == "torn":
        return _tear(store, name, job)
    sizes = sorted((file, size) for file, size in walk_files(store.files, store.path(name)) if size)
    file, size_bytes = sizes[int(where[0] * len(sizes))]
    if kind == "truncate":
        kept = int(where[1] * size_bytes)
        _rewrite(store, name, file, lambda source: _chunks(source, kept))
        return Damage(f"{name}: {file} cut to {amounts.size(kept)} of {amounts.size(size_bytes)}", name)
    bit = int(where[1] * size_bytes * 8)
    _rewrite(store, name, file, lambda source: _flipped(source, size_bytes, bit))
    return Damage(f"{name}: bit {amounts.count(bit)} of {file} flipped", name)


def _tear(store: Store, name: str, job: int) -> Damage:
    """Turn it into what a crash before the commit leaves: a draft without a manifest."""
    draft = store.path(str(DraftName(f"j{job:04}_torn", store.read_manifest(name).step, 1)))
    store.files.publish(store.path(name), draft)
    # crash here: a draft with a manifest: still torn, because of its name.
    store.files.remove_file(draft / MANIFEST)
    return Damage(f"{name}: torn, as if killed before its commit", name)


def _rewrite(store: Store, name: str, file: str, content: Callable[[Source], Iterator[memoryview]]) -> None:
    path = store.path(name) / file
    beside = store.path(_SCRATCH)
    store.files.remove_file(beside)
    with store.files.reading(path) as source:
        store.files.write_new(beside, content(source), durable=False)
    # crash here: the sound file, and a scratch file that the next damage removes.
    store.files.publish(beside, path)


def _chunks(source: Source, until: int) -> Iterator[memoryview]:
    """The first bytes of a file; the buffer is used again for the next chunk."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for start in range(0, until, _CHUNK_BYTES):
        yield buffer[: source.fill(start, buffer[: min(_CHUNK_BYTES, until - start)])]


def _flipped(source: Source, size_bytes: int, bit: int) -> Iterator[memoryview]:
    start = 0
    for chunk in _chunks(source, size_bytes):
        place = bit // 8 - start
        if 0 <= place < len(chunk):
            chunk[place] ^= 1 << bit % 8
        yield chunk
        start += len(chunk)
