"""Manifests that lie, and file systems that play games: data is never code, and nothing leads out of a checkpoint."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.unit.store.saving import save, store_with, tree
from unbroken.errors import CheckpointError, FormatUnknown, ManifestDamaged, StorageFailed, UnsafeName
from unbroken.store.check import Level, verify
from unbroken.store.choose import resume_point
from unbroken.store.digest import digest_bytes
from unbroken.store.directory import Store
from unbroken.store.manifest import decode

WHERE = Path("checkpoint-7/manifest.json")
DIGEST = digest_bytes(b"").hex()
PART = {"bytes": 0, "digest": DIGEST, "name": "a"}
BODY: dict[str, Any] = {
    "block_bytes": 1024,
    "digest": "xxh3-128",
    "fingerprint": None,
    "id": "i",
    "job": "j",
    "kind": "periodic",
    "metadata": {},
    "metrics": {},
    "origin": "unbroken",
    "parts": [PART],
    "saved_at_ns": 1,
    "step": 7,
    "tensors": {},
}


def canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def enveloped(
    body: bytes, *, form: str = "unbroken.checkpoint/2", algorithm: str = "xxh3-128", proof: str | None = None
) -> bytes:
    """A manifest around a body, with a proof that is right unless told otherwise: as a forger would write it."""
    proof = xxhash.xxh3_128_hexdigest(body) if proof is None else proof
    return b'{"body":%s,"digest":"%s:%s","format":"%s"}\n' % (body, algorithm.encode(), proof.encode(), form.encode())


def forged(**changes: object) -> bytes:
    return enveloped(canonical({**BODY, **changes}))


def part(**changes: object) -> list[dict[str, object]]:
    return [{**PART, **changes}]


def named(*names: str) -> list[dict[str, object]]:
    return [{**PART, "name": name} for name in names]


SOUND = forged()


def test_the_forgers_plain_manifest_is_taken() -> None:
    assert decode(SOUND, WHERE).step == 7


NAMES = [
    *("..", "../a", "a/../b", "a/..", "/etc/passwd", "//a", "a\\b", "a\0b", "", "a//b", "a/./b", ".", "./a", "a/"),
    *("manifest.json", "x" * 300, "ä" * 150, "a\nb", "a\x1b[2J", "\ud800"),
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:20]))
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises((UnsafeName, ManifestDamaged)):
        decode(forged(parts=named(name)), WHERE)


BODIES: dict[str, dict[str, object]] = {
    "a file that is also a directory": {"parts": named("a", "a/b")},
    "a file that is also a directory far above": {"parts": named("a", "a/b/c/d")},
    "two parts of one name": {"parts": named("a", "a")},
    "parts out of order": {"parts": named("b", "a")},
    "negative size": {"parts": part(bytes=-1)},
    "size as a float": {"parts": part(bytes=0.0)},
    "size as a truth": {"parts": part(bytes=False)},
    "size as text": {"parts": part(bytes="0")},
    "huge size": {"parts": part(bytes=10**30)},
    "size of another block count": {"parts": part(bytes=1025)},
    "blocks for too many": {"parts": part(blocks=DIGEST * 2)},
    "blocks for one": {"parts": part(blocks=DIGEST)},
    "blocks as null": {"parts": part(blocks=None)},
    "blocks that do not make the digest": {"parts": part(bytes=1025, blocks=DIGEST * 2)},
    "digest in capitals": {"parts": part(digest=DIGEST.upper())},
    "digest with spaces": {"parts": part(digest=f"{DIGEST[:-2]} {DIGEST[-1]}")},
    "short digest": {"parts": part(digest=DIGEST[:-2])},
    "digest that is no hex": {"parts": part(digest="zz" * 16)},
    "a part with more to say": {"parts": part(mode="0777")},
    "a part that is a list": {"parts": [[]]},
    "parts that are an object": {"parts": {}},
    "no block size": {"block_bytes": 0},
    "tiny blocks": {"block_bytes": 1023},
    "huge blocks": {"block_bytes": (1 << 30) + 1},
    "another digest inside": {"digest": "md5"},
    "an unknown kind": {"kind": "weekly"},
    "an unknown member": {"code": "print(1)"},
    "a step before the first": {"step": -1},
    "a step beyond all": {"step": 1 << 63},
    "a step that is a float": {"step": 7.0},
    "a step that is true": {"step": True},
    "an instant beyond every calendar": {"saved_at_ns": 10**40},
    "an id that climbs": {"id": ".."},
    "an id that hides": {"id": ".pin"},
    "an id with a slash": {"id": "a/b"},
    "an endless id": {"id": "x" * 129},
    "an empty id": {"id": ""},
    "a metric that is text": {"metrics": {"loss": "NaN"}},
    "a metric that is whole": {"metrics": {"loss": 1}},
    "a metric that is true": {"metrics": {"loss": True}},
    "a metric beyond all numbers": {"metrics": {"loss": 10**400}},
    "a tensor without a shape": {"tensors": {"w": ["f32", "00"]}},
    "a tensor with a negative size": {"tensors": {"w": ["f32", [-1], "00"]}},
    "a tensor with a true size": {"tensors": {"w": ["f32", [True], "00"]}},
    "metadata that is a list": {"metadata": []},
    "a fingerprint that is a number": {"fingerprint": 5},
    "a name that is no unicode": {"job": "\ud800"},
}


@pytest.mark.parametrize("changes", BODIES.values(), ids=BODIES)
def test_a_body_that_lies_is_refused_although_its_digest_is_right(changes: dict[str, object]) -> None:
    with pytest.raises(ManifestDamaged):
        decode(forged(**changes), WHERE)


@pytest.mark.parametrize("key", BODY)
def test_a_body_without_one_of_its_members_is_refused(key: str) -> None:
    with pytest.raises(ManifestDamaged):
        decode(enveloped(canonical({name: value for name, value in BODY.items() if name != key})), WHERE)


GOOD = canonical(BODY)
OLD = canonical({"facts" if name == "metadata" else name: value for name, value in BODY.items()})
DEEP = b"[" * 100_000 + b"]" * 100_000
RAW = {
    "nothing": b"",
    "no body": enveloped(b""),
    "a list": enveloped(b"[]"),
    "a number": enveloped(b"7"),
    "not utf-8": enveloped(GOOD.replace(b'"j"', b'"\xff"')),
    "utf-16": enveloped(GOOD.decode().encode("utf-16")),
    "an old name in today's format": enveloped(OLD),
    "a name of today in the old format": enveloped(GOOD, form="unbroken.checkpoint/1"),
    "an old name and today's": enveloped(canonical({**BODY, "facts": {}}), form="unbroken.checkpoint/1"),
    "a byte order mark inside": enveloped(b"\xef\xbb\xbf" + GOOD),
    "a byte order mark before": b"\xef\xbb\xbf" + SOUND,
    "deep nesting": enveloped(GOOD.replace(b'"metadata":{}', b'"metadata":{"a":' + DEEP + b"}")),
    "deep nesting never closed": enveloped(b"[" * 200_000),
    "a number of many digits": enveloped(GOOD.replace(b'"step":7', b'"step":' + b"7" * 10_000)),
    "NaN": enveloped(GOOD.replace(b'"metadata":{}', b'"metadata":{"a":NaN}')),
    "Infinity": enveloped(GOOD.replace(b'"metrics":{}', b'"metrics":{"a":Infinity}')),
    "a float too large": enveloped(GOOD.replace(b'"metadata":{}', b'"metadata":{"a":1e999}')),
    "a key twice": enveloped(GOOD.replace(b'"step":7', b'"step":6,"step":7')),
    "spaces": enveloped(GOOD.replace(b'"step":7', b'"step": 7')),
    "another order": enveloped(b'{"tensors":{},' + GOOD[1:].replace(b',"tensors":{}', b"")),
    "escapes that are not needed": enveloped(GOOD.replace(b'"id":"i"', b'"id":"\\u0069"')),
    "a number spelt otherwise": enveloped(GOOD.replace(b'"metadata":{}', b'"metadata":{"a":1.50}')),
    "two documents": SOUND + SOUND,
    "something behind": SOUND + b" ",
    "no line end": SOUND[:-1],
    "a wrong digest": enveloped(GOOD, proof="0" * 32),
    "a short digest": enveloped(GOOD, proof="0"),
    "a digest in capitals": SOUND.replace(b"xxh3-128:", b"XXH3-128:"),
    "a format of nobody": enveloped(GOOD, form="zarr/3"),
    "a format of zero": enveloped(GOOD, form="unbroken.checkpoint/0"),
    "a format without a number": enveloped(GOOD, form="unbroken.checkpoint/"),
    "no format": SOUND.replace(b',"format":"unbroken.checkpoint/2"', b""),
    "zeros": bytes(len(SOUND)),
}


def test_a_body_under_the_old_names_is_taken_in_the_old_format() -> None:
    assert decode(enveloped(OLD, form="unbroken.checkpoint/1"), WHERE).metadata == {}


@pytest.mark.promise("M16")
@pytest.mark.parametrize("data", RAW.values(), ids=RAW)
def test_bytes_that_no_commit_wrote_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestDamaged):
        decode(data, WHERE)


@pytest.mark.parametrize("form", ["unbroken.checkpoint/3", "unbroken.checkpoint/10"])
def test_another_version_is_reported_as_such_whatever_its_body(form: str) -> None:
    for body in (GOOD, b'{"new":1}', b"not json"):
        with pytest.raises(FormatUnknown):
            decode(enveloped(body, form=form, algorithm="blake9", proof="abcdef"), WHERE)


def test_another_digest_is_reported_as_such() -> None:
    with pytest.raises(FormatUnknown, match="blake3"):
        decode(enveloped(GOOD, algorithm="blake3", proof="ab" * 32), WHERE)


@pytest.mark.promise("M16", "M26")
def test_a_manifest_cut_off_at_any_byte_is_refused() -> None:
    for length in range(len(SOUND)):
        with pytest.raises(ManifestDamaged):
            decode(SOUND[:length], WHERE)


@pytest.mark.promise("M16")
def test_one_flipped_bit_anywhere_is_noticed() -> None:
    unknown = set()
    for position in range(len(SOUND)):
        for bit in range(8):
            data = bytearray(SOUND)
            data[position] ^= 1 << bit
            with pytest.raises((ManifestDamaged, FormatUnknown)) as refused:
                decode(bytes(data), WHERE)
            if refused.type is FormatUnknown:
                unknown.add(position)
    # Only the format's number can look like another version's.
    assert unknown == {SOUND.index(b"checkpoint/2") + len(b"checkpoint/")}


def _outside(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b'{"step": 1}')
    return tmp_path / "outside"


def _link_to_outside(checkpoint: Path, outside: Path) -> None:
    (checkpoint / "trainer_state.json").unlink()
    (checkpoint / "trainer_state.json").symlink_to(outside / "secret")


def _link_to_inside(checkpoint: Path, outside: Path) -> None:
    (checkpoint / "trainer_state.json").rename(checkpoint / "real")
    (checkpoint / "trainer_state.json").symlink_to("real")


def _link_to_itself(checkpoint: Path, outside: Path) -> None:
    (checkpoint / "trainer_state.json").unlink()
    (checkpoint / "trainer_state.json").symlink_to("trainer_state.json")


def _directory_is_a_link(checkpoint: Path, outside: Path) -> None:
    (checkpoint / "state").rename(outside / "state")
    (checkpoint / "state").symlink_to(outside / "state")


def _manifest_is_a_link(checkpoint: Path, outside: Path) -> None:
    (checkpoint / "manifest.json").rename(outside / "manifest.json")
    (checkpoint / "manifest.json").symlink_to(outside / "manifest.json")


def _manifest_is_a_fifo(checkpoint: Path, outside: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    os.mkfifo(checkpoint / "manifest.json")


def _fifo(checkpoint: Path, outside: Path) -> None:
    (checkpoint / "trainer_state.json").unlink()
    os.mkfifo(checkpoint / "trainer_state.json")


def _device(checkpoint: Path, outside: Path) -> None:
    (checkpoint / "trainer_state.json").unlink()
    os.mknod(checkpoint / "trainer_state.json", 0o600 | 0o020000, os.makedev(1, 5))


GAMES = [
    _link_to_outside,
    _link_to_inside,
    _link_to_itself,
    _directory_is_a_link,
    _manifest_is_a_link,
    _manifest_is_a_fifo,
    _fifo,
    pytest.param(_device, marks=pytest.mark.needs("root")),
]


@pytest.mark.parametrize("game", GAMES)
def test_links_pipes_and_devices_are_found_without_a_hang_and_survived(
    tmp_path: Path, game: Callable[[Path, Path], None]
) -> None:
    store = store_with(tmp_path / "run", 1, 2)
    outside = _outside(tmp_path)
    game(store.path("checkpoint-2"), outside)
    before = tree(outside)
    for level in Level:
        verdict = verify(store, "checkpoint-2", level)
        assert verdict.is_damaged, level
    choice = resume_point(store, Level.FULL, job="j", at_ns=1)
    assert choice.chosen is not None and choice.chosen.name == "checkpoint-1"
    assert choice.skipped[0].moved_to == "quarantine/checkpoint-2"
    assert tree(outside) == before


def test_a_checkpoint_that_is_itself_a_link_is_never_chosen(tmp_path: Path) -> None:
    store = store_with(tmp_path / "run", 1)
    save(Store(tmp_path / "elsewhere"), 9)
    (store.root / "checkpoint-9").symlink_to(tmp_path / "elsewhere" / "checkpoint-9")
    choice = resume_point(store, Level.FULL, job="j", at_ns=1)
    assert choice.chosen is not None and choice.chosen.name == "checkpoint-1" and choice.skipped == ()
    assert (store.root / "checkpoint-9").is_symlink()


def test_no_byte_outside_is_opened_for_a_name_that_climbs(tmp_path: Path) -> None:
    store = store_with(tmp_path / "run", 1, 2)
    _outside(tmp_path)
    for name in ("../../outside/secret", str(tmp_path / "outside" / "secret")):
        (store.path("checkpoint-2") / "manifest.json").write_bytes(forged(parts=named(name)))
        with pytest.raises(CheckpointError):
            store.read_manifest("checkpoint-2")
        assert verify(store, "checkpoint-2", Level.FULL).checked_bytes == 0


def test_a_manifest_that_is_too_large_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    with (tmp_path / "checkpoint-1" / "manifest.json").open("r+b") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(StorageFailed, match="too large"):
        store.read_manifest("checkpoint-1")
    assert verify(store, "checkpoint-1", Level.QUICK).is_damaged
