"""The bytes of shards: as the page states them, as golden files keep them, as GPT-Simple writes and reads them."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.format.golden_shards import GOLDEN, SOURCES, TOKENIZER, entries, make
from tests.unit.store.saving import tree
from unbroken.data import open_corpus, seal_shards
from unbroken.data.corpus.listing import LISTING, BakedWindows, decode_listing, encode_listing, read_listing
from unbroken.data.corpus.shards import map_tokens, open_index, write_shard
from unbroken.errors import DataDamaged, ShardDamaged, UnsafeName
from unbroken.files import LOCAL
from unbroken.store.fields import Malformed

PAGE = (Path(__file__).resolve().parents[2] / "docs/internals/shards.md").read_text(encoding="utf-8")
OURS = GOLDEN / "ours"
WEB = OURS / "train" / "web"

# What GPT-Simple's writer was given, and what its golden shards must therefore mean.
DOCUMENTS = (
    "short",
    "a document of forty characters, no more.",
    "exactly 16 bytes",
    "one byte more: 17",
    "Zürich ✓ and a little more than thirty bytes",
)
ITS_PREFIXES = [0, 0, 4, 4, 4, 0, 4, 0, 4, 0, 4, 4, 4]


def on_page(name: str) -> bytes:
    found = re.search(rf"```hex {name}\n(.*?)\n```", PAGE, re.DOTALL)
    assert found is not None
    return bytes.fromhex(found[1])


# ---- the page ----


@pytest.mark.promise("G13")
def test_the_example_of_the_page_is_byte_for_byte_what_the_code_writes(tmp_path: Path) -> None:
    write_shard(LOCAL, tmp_path, "a", [entries([3, 1], [0, 0], 0), entries([8], [2], 7)], token_bytes=2)
    assert (tmp_path / "a.bin").read_bytes() == on_page("bin")
    assert (tmp_path / "a.idx").read_bytes() == on_page("idx")
    assert all(f"`{xxhash.xxh3_128_hexdigest(on_page(name))}`" in PAGE for name in ("bin", "idx"))


@pytest.mark.promise("G13")
def test_ids_of_a_large_vocabulary_take_four_bytes(tmp_path: Path) -> None:
    write_shard(LOCAL, tmp_path, "a", [entries([1, 2], [0, 1], 5)], token_bytes=4)
    assert (tmp_path / "a.bin").read_bytes() == bytes.fromhex("00010000 06000000 00010000")
    assert (tmp_path / "a.idx").read_bytes() == bytes.fromhex(
        "47505453 01000000 04000000 02000000 0000000000000000 0100000000000000 0300000000000000 0000 0100"
    )


def test_every_member_of_the_list_is_on_the_page() -> None:
    body = (WEB / LISTING).read_bytes()
    members = set(re.findall(rb'"([a-z_]+)":', body)) - {b"body", b"format", b"empty"}
    assert all(member.decode() in PAGE for member in members)


# ---- golden ----


@pytest.mark.promise("G13")
def test_our_golden_shards_still_open_and_prove_sound_to_the_last_byte() -> None:
    corpus = open_corpus(OURS, check="full")
    assert [(shard.name, shard.entries, shard.tokens) for shard in corpus.shards] == [
        ("00000-000", 3, 12),
        ("2020/00001-000", 1, 4),
    ]
    assert corpus.tokenizer == TOKENIZER
    assert corpus.digest() == "ad0d5b5fd516ca2aa15e2c1bb2ea7c84"


def test_the_golden_list_is_read_field_by_field_and_encoded_again_to_the_same_bytes() -> None:
    listing = read_listing(WEB / LISTING)
    assert listing.baked == BakedWindows(8, 2)
    assert listing.sources == SOURCES
    assert encode_listing(listing) == (WEB / LISTING).read_bytes()


def test_this_version_writes_the_golden_shards_byte_for_byte(tmp_path: Path) -> None:
    make(tmp_path)
    assert tree(tmp_path) == tree(OURS)


# ---- GPT-Simple ----


@pytest.mark.promise("G13")
@pytest.mark.parametrize(("kind", "token_bytes", "eod"), [("narrow", 2, 256), ("wide", 4, 65_536)])
def test_shards_that_gpt_simple_wrote_are_read(kind: str, token_bytes: int, eod: int) -> None:
    corpus = open_corpus(GOLDEN / f"gpt-simple-{kind}", check="full", vocab_size=eod + 1)
    full, empty = corpus.shards
    assert (full.bucket, full.token_bytes, empty.entries) == ("default", token_bytes, 0)
    offsets, prefixes = full.index.offsets(0, full.entries), full.index.prefixes(0, full.entries)
    assert prefixes.tolist() == ITS_PREFIXES
    tokens = map_tokens(full.bin_path, full.index)
    # What is not repeated gives every document once, but for the last windows that its writer masks whole.
    fresh = np.concatenate(
        [tokens[at + skip : end] for at, end, skip in zip(offsets, offsets[1:], prefixes, strict=False)]
    )
    texts = "".join(map(chr, fresh)).split(chr(eod))
    documents = [document.encode().decode("latin-1") for document in DOCUMENTS]
    assert [text for text in texts if text] == documents


def test_shards_that_gpt_simple_wrote_can_be_sealed(tmp_path: Path) -> None:
    for path in (GOLDEN / "gpt-simple-narrow" / "train").iterdir():
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / path.name).write_bytes(path.read_bytes())
    before = open_corpus(tmp_path)
    seal_shards(tmp_path / "train", TOKENIZER)
    after = open_corpus(tmp_path, check="full")
    assert after.digest() == before.digest()
    assert after.tokenizer == TOKENIZER


def test_gpt_simple_reads_the_shards_we_write() -> None:
    try:
        theirs = importlib.import_module("gpt_simple.pretokenize")
    except ImportError:
        pytest.skip("needs GPT-Simple, which no extra of ours carries")
    code, offsets, prefixes = theirs.read_idx(WEB / "00000-000.idx")
    index = open_index(WEB / "00000-000.idx")
    assert code == index.token_bytes
    assert offsets.tolist() == index.offsets(0, index.entries).tolist()
    assert prefixes.tolist() == index.prefixes(0, index.entries).tolist()


# ---- attacks ----

REFUSALS = (Malformed, ValueError, UnsafeName)


def refused(tmp_path: Path, data: bytes) -> str:
    (tmp_path / LISTING).write_bytes(data)
    with pytest.raises(ShardDamaged) as damaged:
        read_listing(tmp_path / LISTING)
    return damaged.value.complaint


def forged(old: bytes, new: bytes) -> bytes:
    """The golden list with other words and a digest that fits."""
    data = (WEB / LISTING).read_bytes()
    body = data[len(b'{"body":') : data.rindex(b',"digest":"')]
    assert body.count(old) == 1
    body = body.replace(old, new)
    proof = xxhash.xxh3_128_hexdigest(body).encode()
    return b'{"body":' + body + b',"digest":"xxh3-128:' + proof + b'","format":"unbroken.shards/1"}\n'


NAME = b'"name":"00000-000"'
LIES = {
    "climbs out": (NAME, b'"name":"../00000-000"'),
    "absolute path": (NAME, b'"name":"/etc/passwd"'),
    "is hidden": (NAME, b'"name":".tokenize/0"'),
    "not sorted by name": (NAME, b'"name":"9"'),
    "each once": (NAME, b'"name":"2020/00001-000"'),
    "counts and sizes that do not agree": (b'2,"tokens":12}', b'2,"tokens":13}'),
    "a whole number below 4294967296": (b'"entries":3', b'"entries":4294967296'),
    "a whole number below 4611686018427387904": (b'2,"tokens":12}', b'2,"tokens":99999999999999999999}'),
    "a whole number": (b'"entries":3', b'"entries":true'),
    "3 bytes per token": (
        b'54,"index_digest":"389fbc435d14f3d10c6323f7e62662bb","name":"00000-000","token_bytes":2',
        b'54,"index_digest":"389fbc435d14f3d10c6323f7e62662bb","name":"00000-000","token_bytes":3',
    ),
    "'eod_id' in tokenizer": (b'"eod_id":256', b'"eod_id":257'),
    "unknown member 'more'": (b'"options":', b'"more":1,"options":'),
    "lacks 'name'": (NAME + b",", b""),
    "not canonical": (b'"options":', b'"options": '),
    "'digest' in the list is not one of": (b'{"digest":"xxh3-128","options"', b'{"digest":"md5","options"'),
    "of the form [0-9a-f]{32}": (b'"bin_digest":"385a93aff29294390d93d538593b8f3c"', b'"bin_digest":"0"'),
}


@pytest.mark.parametrize("complaint", LIES)
def test_a_list_that_lies_under_a_digest_that_fits_is_refused(tmp_path: Path, complaint: str) -> None:
    assert complaint in refused(tmp_path, forged(*LIES[complaint]))


def test_a_list_of_another_version_is_not_read(tmp_path: Path) -> None:
    data = (WEB / LISTING).read_bytes().replace(b"unbroken.shards/1", b"unbroken.shards/2")
    assert "unbroken.shards/2; this version reads unbroken.shards/1" in refused(tmp_path, data)


def test_deep_nesting_and_wrong_text_are_no_crash(tmp_path: Path) -> None:
    for body in (b"[" * 100_000, b'{"digest":"\xff"}', b"", b"NaN", b'{"a":1,"a":1}'):
        proof = xxhash.xxh3_128_hexdigest(body).encode()
        refused(tmp_path, b'{"body":' + body + b',"digest":"xxh3-128:' + proof + b'","format":"unbroken.shards/1"}\n')


def test_every_flipped_bit_and_every_cut_of_a_list_is_seen() -> None:
    data = (WEB / LISTING).read_bytes()
    damaged = [data[:cut] for cut in range(len(data))]
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << (position % 8)
        damaged.append(bytes(changed))
    for each in damaged:
        with pytest.raises(REFUSALS):
            decode_listing(each)


def test_an_index_with_any_bit_flipped_is_refused_or_still_in_order(tmp_path: Path) -> None:
    data = (GOLDEN / "gpt-simple-narrow" / "train" / "00000.idx").read_bytes()
    path = tmp_path / "a.idx"
    refusals = 0
    # Every third bit: each byte, and each place in a byte, gets its turn.
    for bit in range(0, 8 * len(data), 3):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(changed)
        try:
            index = open_index(path)
            index.require_sound()
        except ShardDamaged:
            refusals += 1
            continue
        lengths = np.diff(index.offsets(0, index.entries))
        assert (lengths >= index.prefixes(0, index.entries)).all()
        assert int(lengths.sum()) == index.tokens
    assert refusals > len(data)


def test_a_list_cannot_make_a_reader_open_what_a_link_leads_to(tmp_path: Path) -> None:
    make(tmp_path)
    folder = tmp_path / "train" / "web"
    for suffix in ("bin", "idx"):
        (folder / f"00000-000.{suffix}").rename(tmp_path / f"secret.{suffix}")
        (folder / f"00000-000.{suffix}").symlink_to(tmp_path / f"secret.{suffix}")
    with pytest.raises(DataDamaged) as found:
        open_corpus(tmp_path)
    assert sum("not a regular file" in finding for finding in found.value.findings) == 2
