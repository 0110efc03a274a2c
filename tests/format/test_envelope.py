"""The three kinds of records that prove themselves, byte for byte as they stand on disk, literal digests and all."""

from pathlib import Path

from unbroken.data.corpus.listing import BakedWindows, Listing, SourceRecord, TokenizerIdentity, encode_listing
from unbroken.data.corpus.shards import ShardRecord
from unbroken.data.ingest.documents import Stretch
from unbroken.data.ingest.request import TokenizeOptions
from unbroken.data.ingest.sources import TextSource
from unbroken.data.ingest.units import Unit
from unbroken.data.ingest.work_folder import (
    Finished,
    SourceShare,
    TokenizePlan,
    Totals,
    UnitRecord,
    WorkFolder,
)
from unbroken.files import LOCAL
from unbroken.store.digest import digest_of
from unbroken.store.manifest import Manifest, Part, Tensor, encode

TOKENIZER = TokenizerIdentity("bytes", "xxh3-128:" + "ab" * 16, 257, 256)
SHARD = ShardRecord("a-0", entries=2, tokens=9, token_bytes=2, bin_digest="0a" * 16, index_digest="0b" * 16)


def test_a_manifest_is_these_bytes() -> None:
    manifest = Manifest(
        id="j1-7-7b",
        step=7,
        kind="periodic",
        saved_at_ns=123,
        job="j1",
        origin="Zürich",
        parts=(Part("a.json", digest_of([b"{}"])),),
        tensors={"w": Tensor("float32", (2, 3), "00ff")},
        metrics={"loss": 0.5},
    )
    assert encode(manifest) == (
        b'{"body":{"block_bytes":16777216,"digest":"xxh3-128","fingerprint":null,"id":"j1-7-7b","job":"j1",'
        b'"kind":"periodic","metadata":{},"metrics":{"loss":0.5},"origin":"Z\xc3\xbcrich","parts":[{"bytes":2,'
        b'"digest":"dc7048f8f8747f561349cde127705c16","name":"a.json"}],"saved_at_ns":123,"step":7,'
        b'"tensors":{"w":["float32",[2,3],"00ff"]}},"digest":"xxh3-128:ed4f68bd8553a2bfb6b4bb28d0815028",'
        b'"format":"unbroken.checkpoint/2"}\n'
    )


def test_a_list_of_shards_is_these_bytes() -> None:
    source = SourceRecord("Zürich.jsonl", 12, "xxh3-128:" + "cd" * 16, 3, 9, {"empty": 1})
    assert encode_listing(Listing((SHARD,), TOKENIZER, BakedWindows(8, 2), (source,))) == (
        b'{"body":{"digest":"xxh3-128","options":{"max_length":8,"overlap_size":2},"shards":[{"bin_bytes":18,'
        b'"bin_digest":"0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a","entries":2,"idx_bytes":44,'
        b'"index_digest":"0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b","name":"a-0","token_bytes":2,"tokens":9}],'
        b'"sources":[{"digest":"xxh3-128:cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd","documents":3,"name":"Z\xc3\xbcrich.jsonl",'
        b'"size_bytes":12,"skipped":{"empty":1},"tokens":9}],'
        b'"tokenizer":{"digest":"xxh3-128:abababababababababababababababab","eod_id":256,"name":"bytes",'
        b'"vocab_size":257}},"digest":"xxh3-128:9f4624826453b69da7d4aafbe68f7360","format":"unbroken.shards/1"}\n'
    )


def test_the_records_of_a_tokenization_are_these_bytes(tmp_path: Path) -> None:
    bench = WorkFolder(LOCAL, tmp_path)
    stretch = Stretch("Zürich.jsonl", 0, 12)
    plan = TokenizePlan(
        TokenizeOptions(), TOKENIZER, None, (TextSource("Zürich.jsonl", 12),), (Unit("", 0, (stretch,)),)
    )
    bench.begin(plan, tokenizer=None, command="unbroken tokenize", scratch=".writing")
    share = SourceShare(stretch, ("cd" * 16,), {"": 3}, {"": 9})
    assert bench.record(plan, 0, UnitRecord("bytes", {"": [SHARD]}, [share]))
    begun, unit = bench.plan_path.read_bytes(), bench.units_path(plan) / "000000.json"
    assert bench.units_path(plan).name == "units-64b0af937cccf190"
    assert begun == (
        b'{"body":{"eod_token":null,"options":{"max_length":null,"min_text_length":0,"overlap_size":null,'
        b'"shard_tokens":33554432,"text_field":"text","val_fraction":null},"sources":[["Z\\u00fcrich.jsonl",12]],'
        b'"tokenizer":{"digest":"xxh3-128:abababababababababababababababab","eod_id":256,"name":"bytes",'
        b'"vocab_size":257},"units":[["",0,[["Z\\u00fcrich.jsonl",0,12]]]]},'
        b'"digest":"64b0af937cccf190d70a373f6e104a3f"}\n'
    )
    assert unit.read_bytes() == (
        b'{"body":{"engine":"bytes","shards":{"":[{"bin_digest":"0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a","entries":2,'
        b'"index_digest":"0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b","name":"a-0","token_bytes":2,"tokens":9}]},'
        b'"shares":[{"blocks":["cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd"],"documents":{"":3},"skipped":{},'
        b'"stretch":{"first":0,"last":12,"name":"Z\\u00fcrich.jsonl"},"tokens":{"":9}}]},'
        b'"digest":"78e9dd744da252cab5ec9ada3e1a4e02"}\n'
    )
    assert bench.plan() == plan
    finished = Finished(TokenizeOptions(), TOKENIZER, {"Zürich.jsonl": (12, "cd" * 16)}, {"": 1}, Totals(3, 9, 1))
    bench.finish(finished, by="me")
    assert bench.finished_path.read_bytes() == (
        b'{"body":{"options":{"max_length":null,"min_text_length":0,"overlap_size":null,"shard_tokens":33554432,'
        b'"text_field":"text","val_fraction":null},"sources":[["Z\\u00fcrich.jsonl",12,'
        b'"cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd"]],"tokenizer":{"digest":"xxh3-128:abababababababababababababababab",'
        b'"eod_id":256,"name":"bytes","vocab_size":257},"totals":{"documents":3,"shards":1,"skipped":{},"tokens":9},'
        b'"units":{"":1}},"digest":"5830d11bf430a3ba59d846aaec64a753"}\n'
    )
