"""The page about the format is exact: its own example, built from it with JSON and xxhash alone, is what we write."""

import json
import math
import re
from pathlib import Path

import xxhash

from unbroken.store.digest import digest_of
from unbroken.store.manifest import Manifest, Part, Tensor, decode, encode

PAGE = (Path(__file__).resolve().parents[2] / "docs/internals/format.md").read_text(encoding="utf-8")
CONTENT = {"trainer_state.json": b'{"step":7}', "state/w.bin": b"a" * 1024 + b"b"}


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)\n```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def example() -> bytes:
    """The example's file, put together as the page says."""
    body = block("json").replace("\n", "").encode()
    assert json.dumps(json.loads(body), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() == body
    proof = xxhash.xxh3_128_hexdigest(body)
    assert f"Its digest is `{proof}`" in PAGE
    return b'{"body":' + body + block("text").encode() + b"\n"


def test_the_example_is_byte_for_byte_what_the_code_writes() -> None:
    parts = tuple(Part(name, digest_of([data], 1024)) for name, data in CONTENT.items())
    manifest = Manifest(
        id="j0001_k3-7-17979cfe362a0000",
        step=7,
        kind="periodic",
        saved_at_ns=1_700_000_000_000_000_000,
        job="j0001_k3",
        origin="unbroken",
        parts=parts,
        tensors={"w": Tensor("float32", (2, 3), "0f" * 16)},
        metrics={"loss": 2.5, "worst": math.nan},
        metadata={"world_size": 2},
        block_bytes=1024,
    )
    assert encode(manifest) == example()
    assert f"the file has {len(example()):,} bytes" in PAGE


def test_the_example_decodes_and_its_digests_are_those_of_the_bytes_it_names() -> None:
    found = decode(example(), Path("manifest.json"))
    assert {part.name: part.size_bytes for part in found.parts} == {name: len(data) for name, data in CONTENT.items()}
    for part in found.parts:
        data = CONTENT[part.name]
        blocks = [xxhash.xxh3_128_digest(data[at : at + 1024]) for at in range(0, len(data), 1024)]
        assert list(part.digest.blocks) == blocks
        whole = blocks[0] if len(blocks) == 1 else xxhash.xxh3_128_digest(b"".join(blocks))
        assert part.digest.whole == whole.hex()
        assert all(value.hex() in PAGE for value in blocks)


def test_every_member_of_the_body_is_on_the_page_and_no_other() -> None:
    listed = re.findall(r"^\| `([a-z_]+)` \|", PAGE, re.MULTILINE)
    assert listed == sorted(json.loads(example())["body"])


def test_the_escapes_are_those_the_page_names() -> None:
    text = '"\\/\n\t\r\b\f\x01\x1f\x7fä\u2028😀'
    manifest = Manifest("i", 1, "final", 1, text, "o", ())
    expected = '"\\"\\\\/\\n\\t\\r\\b\\f\\u0001\\u001f\x7fä\u2028😀"'
    assert f'"job":{expected},'.encode() in encode(manifest)
    assert decode(encode(manifest), Path("manifest.json")).job == text
