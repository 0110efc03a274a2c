"""The manifest's bytes: literal, canonical, and back again."""

import json
import math
import string
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import ManifestDamaged, UnsafeName
from unbroken.store.digest import digest_of
from unbroken.store.manifest import Manifest, Part, Tensor, decode, decode_outline, encode
from unbroken.store.names import KINDS

WHERE = Path("checkpoint-7/manifest.json")
SMALL = Manifest(
    id="j1-7-7b",
    step=7,
    kind="periodic",
    saved_at_ns=123,
    job="j1",
    origin="unbroken",
    parts=(Part("b/w.bin", digest_of([b"x" * 1025], 1024)), Part("a.json", digest_of([b"{}"], 1024))),
    tensors={"w": Tensor("float32", (2, 3), "00ff")},
    metrics={"loss": 0.5, "worst": math.nan},
    metadata={"world_size": 2},
    block_bytes=1024,
)
BODY = (
    b'{"block_bytes":1024,"digest":"xxh3-128","fingerprint":null,"id":"j1-7-7b","job":"j1",'
    b'"kind":"periodic","metadata":{"world_size":2},"metrics":{"loss":0.5,"worst":"nan"},"origin":"unbroken","parts":['
    b'{"bytes":2,"digest":"%s","name":"a.json"},'
    b'{"blocks":"%s%s","bytes":1025,"digest":"%s","name":"b/w.bin"}],'
    b'"saved_at_ns":123,"step":7,"tensors":{"w":["float32",[2,3],"00ff"]}}'
) % tuple(
    value.hex().encode()
    for value in (
        xxhash.xxh3_128_digest(b"{}"),
        xxhash.xxh3_128_digest(b"x" * 1024),
        xxhash.xxh3_128_digest(b"x"),
        xxhash.xxh3_128_digest(xxhash.xxh3_128_digest(b"x" * 1024) + xxhash.xxh3_128_digest(b"x")),
    )
)


def test_the_file_is_these_bytes_and_no_others() -> None:
    proof = xxhash.xxh3_128_hexdigest(BODY).encode()
    assert encode(SMALL) == b'{"body":%s,"digest":"xxh3-128:%s","format":"unbroken.checkpoint/2"}\n' % (BODY, proof)


def test_the_file_is_also_plain_json_that_any_tool_reads() -> None:
    found = json.loads(encode(SMALL))
    assert sorted(found) == ["body", "digest", "format"]
    assert found["body"]["step"] == 7


def test_an_outline_is_that_of_the_bytes_and_they_are_verified_each_time() -> None:
    data = encode(SMALL), encode(replace(SMALL, step=8, metrics={"loss": 0.25}))
    for _ in range(2):
        for each, step, loss in zip(data, (7, 8), (0.5, 0.25), strict=True):
            found = decode_outline(each, WHERE)
            assert (found.step, found.metrics["loss"], dict(found.tensors)) == (step, loss, {})
            assert found.parts == decode(each, WHERE).parts
    with pytest.raises(ManifestDamaged):
        decode_outline(data[0].replace(b'"step":7', b'"step":8'), WHERE)


def test_metrics_that_are_nan_make_the_round_trip() -> None:
    metrics = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": -0.0, "e": 5e-324, "f": 1.7976931348623157e308}
    manifest = Manifest("i", 1, "final", 1, "j", "unbroken", (), metrics=metrics)
    found = decode(encode(manifest), WHERE).metrics
    assert math.isnan(found["a"])
    assert {name: repr(value) for name, value in found.items()} == {n: repr(v) for n, v in metrics.items()}


def test_metadata_with_a_number_that_is_not_finite_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode(Manifest("i", 1, "final", 1, "j", "unbroken", (), metadata={"a": math.nan}))


def test_an_unsafe_name_is_refused_with_the_manifests_path() -> None:
    hostile = Manifest("i", 1, "final", 1, "j", "unbroken", (Part("../x", digest_of([b""])),))
    with pytest.raises(UnsafeName) as refused:
        decode(encode(hostile), WHERE)
    assert refused.value.path == WHERE


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SAFE = st.text(string.ascii_letters + string.digits + "._- äß", min_size=1, max_size=12).map(lambda name: f"n{name}")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
PARTS = st.dictionaries(SAFE, st.binary(max_size=3000), max_size=4)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    block_bytes = draw(st.sampled_from([1024, 1500, 1 << 24]))
    parts = (Part(name, digest_of([data], block_bytes)) for name, data in draw(PARTS).items())
    return Manifest(
        id=draw(st.from_regex(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,127}", fullmatch=True)),
        step=draw(st.integers(0, 2**63 - 1)),
        kind=draw(st.sampled_from(KINDS)),
        saved_at_ns=draw(st.integers(0, 2**63 - 1)),
        job=draw(WORDS),
        origin=draw(WORDS),
        parts=tuple(sorted(parts, key=lambda part: part.name)),
        tensors={
            name: Tensor("float32", tuple(shape), "ab")
            for name, shape in draw(st.dictionaries(WORDS, st.lists(st.integers(0, 9), max_size=3), max_size=3)).items()
        },
        metrics=draw(st.dictionaries(WORDS, st.floats(allow_nan=False), max_size=3)),
        fingerprint=draw(st.none() | WORDS),
        metadata=draw(st.dictionaries(WORDS, JSON, max_size=3)),
        block_bytes=block_bytes,
    )


@given(manifests())
def test_encoding_and_decoding_keep_the_same_bytes(manifest: Manifest) -> None:
    data = encode(manifest)
    found = decode(data, WHERE)
    assert found == manifest
    assert encode(found) == data


@given(manifests())
def test_the_order_in_which_items_are_passed_in_does_not_matter(manifest: Manifest) -> None:
    backwards = Manifest(
        **{
            **vars(manifest),
            "parts": tuple(reversed(manifest.parts)),
            "metadata": dict(reversed(list(manifest.metadata.items()))),
            "metrics": dict(reversed(list(manifest.metrics.items()))),
            "tensors": dict(reversed(list(manifest.tensors.items()))),
        }
    )
    assert encode(backwards) == encode(manifest)
