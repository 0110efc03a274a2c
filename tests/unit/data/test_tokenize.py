"""A folder of text becomes shards: the same whatever the format, the number of workers or the engine."""

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.data.test_tokenizers import Lying
from tests.unit.data.texts import DOCUMENTS, EOD, entries, lines, shards, texts_of, tree, write_format
from unbroken.data.corpus.catalogue import open_corpus
from unbroken.data.corpus.listing import read_listing
from unbroken.data.ingest import units
from unbroken.data.ingest.encoders import ByteEncoder
from unbroken.data.ingest.request import TokenizeOptions, TokenizeRequest
from unbroken.data.ingest.sources import SUFFIXES
from unbroken.data.ingest.text_corpus import open_text_corpus
from unbroken.data.ingest.tokenize import tokenize
from unbroken.data.ingest.train_tokenizer import train_tokenizer
from unbroken.errors import (
    BadDocuments,
    ControlToken,
    DataDamaged,
    ShardsExist,
    SourceBroken,
    SourcesChanged,
    TokenizationUnfinished,
    TokenizedDifferently,
)


def request(folder: Path, output: str = "data/train", **changes: object) -> TokenizeRequest:
    asked = TokenizeRequest(input_dir=folder / "text", output_dir=folder / output, tokenizer="bytes")
    return replace(asked, **changes)  # type: ignore[arg-type]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of text with a file beside, and two in a folder below."""
    for name, part in (("a.jsonl", DOCUMENTS[:15]), ("web/b.jsonl", DOCUMENTS[15:30]), ("web/c.jsonl", DOCUMENTS[30:])):
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_bytes(lines(part))
    return tmp_path


@pytest.fixture
def own_tokenizer(text: Path) -> str:
    """The path of a small BPE."""
    return str(train_tokenizer(text / "text", text / "own.json", vocab_size=400).path)


# ---- bytes ----


@pytest.mark.promise("G13")
def test_the_bytes_of_a_shard_are_these(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(lines(["hi", "", "é"]))
    tokenize(request(tmp_path))
    assert (tmp_path / "data/train/00000-000.bin").read_bytes() == b"h\0i\0\x00\x01\xc3\x00\xa9\x00\x00\x01"
    expected = b"GPTS" + struct.pack("<III3q2H", 1, 2, 2, 0, 3, 6, 0, 0)
    assert (tmp_path / "data/train/00000-000.idx").read_bytes() == expected
    listing = read_listing(tmp_path / "data/train/shards.json")
    assert listing.tokenizer == ByteEncoder.identity
    assert [(s.name, s.documents, s.tokens, s.skipped) for s in listing.sources] == [("a.jsonl", 2, 6, {"empty": 1})]


@pytest.mark.promise("G12")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_the_same_shards(suffix: str, tmp_path: Path) -> None:
    write_format(tmp_path / "text", suffix, DOCUMENTS)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.jsonl").write_bytes(lines(DOCUMENTS))
    tokenize(request(tmp_path))
    tokenize(request(tmp_path, "expected", input_dir=tmp_path / "plain"))
    assert shards(tmp_path / "data/train") == shards(tmp_path / "expected")
    assert texts_of(tmp_path / "data/train") == list(DOCUMENTS)


def test_folders_are_kept_and_open_as_buckets(text: Path) -> None:
    report = tokenize(request(text))
    corpus = open_corpus(text / "data", check="full")
    assert [(bucket.name, bucket.entries) for bucket in corpus.buckets] == [("default", 15), ("web", 25)]
    assert corpus.tokenizer == ByteEncoder.identity
    assert report.totals.documents == 40 and report.totals.shards == 2
    assert report.totals.tokens == sum(len(document.encode()) + 1 for document in DOCUMENTS)
    assert not (text / "data/train/.tokenize").exists()


@pytest.mark.promise("G12")
def test_any_number_of_workers_and_any_engine_make_the_same_files(
    text: Path, own_tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 1000)
    asked = request(text, tokenizer=own_tokenizer, options=TokenizeOptions(shard_tokens=150, val_fraction="1/4"))
    tokenize(asked)
    expected = tree(text / "data/train")
    assert len(expected) > 20
    for output, changes in {
        "one": {"num_workers": 1},
        "three": {"num_workers": 3},
        "slow": {"accelerate": False},
    }.items():
        tokenize(replace(asked, output_dir=text / output, **changes))  # type: ignore[arg-type]
        assert tree(text / output) == expected, output


def test_a_shard_is_no_larger_than_requested_and_a_longer_document_stands_alone(text: Path) -> None:
    tokenize(request(text, options=TokenizeOptions(shard_tokens=80)))
    listing = read_listing(text / "data/train/shards.json")
    assert all(shard.tokens <= 80 or shard.entries == 1 for shard in listing.shards)
    assert any(shard.entries > 1 for shard in listing.shards)
    assert texts_of(text / "data/train") == list(DOCUMENTS[:15])


@pytest.mark.promise("G13")
def test_baked_windows_hold_every_token_once_and_end_with_eod_only_at_the_end(tmp_path: Path) -> None:
    documents = ["x" * length for length in (1, 7, 8, 9, 20)]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(lines(documents))
    tokenize(request(tmp_path, options=TokenizeOptions(max_length=8, overlap_size=3)))
    found = list(entries(tmp_path / "data/train"))
    assert all(len(entry) <= 8 and EOD not in entry[:-1] for entry in found)
    assert [entry[-1] for entry in found].count(EOD) == len(documents)
    corpus = open_corpus(tmp_path / "data", check="full")
    prefixes = corpus.shards[0].index.prefixes(0, corpus.shards[0].entries)
    fresh = sum(len(entry) for entry in found) - int(prefixes.sum())
    assert fresh == sum(len(document) + 1 for document in documents)
    listing = read_listing(tmp_path / "data/train/shards.json")
    assert listing.baked is not None and (listing.baked.max_length, listing.baked.overlap_size) == (8, 3)


def test_baked_windows_without_overlap_still_train_every_token(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(lines(["x" * 20]))
    tokenize(request(tmp_path, options=TokenizeOptions(max_length=8, overlap_size=0)))
    found = list(entries(tmp_path / "data/train"))
    # The first token of a document is the only one that nothing predicts.
    assert sum(len(entry) - 1 for entry in found) == 20


def test_a_share_of_the_documents_overlaps_by_chance_decided_by_their_text(tmp_path: Path) -> None:
    documents = [f"{number:03} " + "x" * 12 for number in range(200)]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(lines(documents))
    options = TokenizeOptions(max_length=8, overlap_size=4, overlap_probability="7/10")
    tokenize(request(tmp_path, options=options))
    found = list(entries(tmp_path / "data/train"))
    # 17 tokens: 4 windows with an overlap of 4, 3 with one of 1.
    assert len(found) in range(3 * 200 + 115, 3 * 200 + 165)
    corpus = open_corpus(tmp_path / "data", check="full")
    prefixes = corpus.shards[0].index.prefixes(0, corpus.shards[0].entries)
    assert set(prefixes.tolist()) == {0, 1, 4}
    assert sum(map(len, found)) - int(prefixes.sum()) == 200 * 17


def test_the_same_text_goes_to_the_same_side_whatever_file_it_stands_in(tmp_path: Path) -> None:
    documents = [f"document {number}" for number in range(300)]
    (tmp_path / "text" / "web").mkdir(parents=True)
    (tmp_path / "text" / "web" / "a.jsonl").write_bytes(lines(documents))
    (tmp_path / "text" / "web" / "b.jsonl").write_bytes(lines(documents[::-1]))
    tokenize(request(tmp_path, "data", options=TokenizeOptions(val_fraction="1/10")))
    val, train = texts_of(tmp_path / "data/val/web"), texts_of(tmp_path / "data/train/web")
    assert sorted(val + train) == sorted(documents * 2)
    assert not set(val) & set(train) and 30 < len(val) < 100
    assert {bucket.name for bucket in open_corpus(tmp_path / "data", "val").buckets} == {"web"}


def test_short_and_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(lines(["", "ab", "abc", "äöü"]))
    report = tokenize(request(tmp_path, options=TokenizeOptions(min_text_length=3)))
    assert texts_of(tmp_path / "data/train") == ["abc", "äöü"]
    assert report.totals.skipped == {"empty": 1, "short": 1}


# ---- documents that cannot be used ----


@pytest.mark.promise("G12")
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_documents_are_named_together_and_nothing_of_them_is_published(text: Path, workers: int) -> None:
    (text / "text" / "web" / "b.jsonl").write_bytes(lines(DOCUMENTS[15:17]) + b"oops\n" + b'{"txt": 1}\n' * 30)
    with pytest.raises(BadDocuments) as refusal:
        tokenize(request(text, num_workers=workers))
    problems = list(refusal.value.details())
    assert len(problems) == 20 and refusal.value.is_more
    assert problems[0].startswith("web/b.jsonl:3: ") and problems[1].startswith("web/b.jsonl:4: ")
    assert not (text / "data/train/web").exists()
    with pytest.raises(TokenizationUnfinished) as unfinished:
        open_corpus(text / "data")
    assert unfinished.value.command == request(text).command()
    report = tokenize(request(text, num_workers=workers, skip_bad=True))
    assert report.totals.skipped == {"no-text": 30, "not-json": 1}
    assert texts_of(text / "data/train/web") == [*DOCUMENTS[15:17], *DOCUMENTS[30:]]


def test_a_truncated_file_is_never_skipped(tmp_path: Path) -> None:
    write_format(tmp_path / "text", ".jsonl.gz", DOCUMENTS)
    path = tmp_path / "text" / "all.jsonl.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(SourceBroken):
        tokenize(request(tmp_path, skip_bad=True))
    path.write_bytes(whole)
    assert tokenize(request(tmp_path)).totals.documents == len(DOCUMENTS), "repaired, it is read"


def test_a_vocabulary_that_spells_its_end_of_document_like_text_is_refused(text: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    stock = Tokenizer(models.WordLevel({"a": 0, "ok": 1}, unk_token="a"))
    stock.pre_tokenizer = pre_tokenizers.Whitespace()
    stock.save(str(text / "own.json"))
    with pytest.raises(ControlToken) as refusal:
        tokenize(request(text, tokenizer=str(text / "own.json"), eod_token="ok"))
    assert refusal.value.place == "a.jsonl:1"
    assert not shards(text / "data/train")


def test_a_file_that_is_repaired_is_read_and_what_was_done_before_is_kept(text: Path) -> None:
    good = (text / "text" / "web" / "b.jsonl").read_bytes()
    tokenize(request(text, "expected"))
    (text / "text" / "web" / "b.jsonl").write_bytes(good + b"oops\n")
    with pytest.raises(BadDocuments):
        tokenize(request(text))
    (text / "text" / "web" / "b.jsonl").write_bytes(good)
    report = tokenize(request(text))
    assert (report.kept_units, report.new_units) == (1, 1)
    assert tree(text / "data/train") == tree(text / "expected")


def test_text_that_changed_after_it_was_published_is_refused_before_the_rest_is_done(text: Path) -> None:
    web = text / "text" / "web" / "b.jsonl"
    good = web.read_bytes()
    web.write_bytes(good + b"oops\n")
    with pytest.raises(BadDocuments):
        tokenize(request(text))
    web.write_bytes(good)
    _flip(text / "text" / "a.jsonl")
    with pytest.raises(SourcesChanged) as refusal:
        tokenize(request(text))
    assert refusal.value.changed == ("a.jsonl",)


# ---- an engine that is wrong ----


def test_an_engine_that_differs_once_is_dropped_for_everything(
    text: Path, own_tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gigatoken

    (text / "text" / "zoo.jsonl").write_bytes(lines(["a zebra", "no"]))
    asked = request(text, tokenizer=own_tokenizer)
    tokenize(replace(asked, output_dir=text / "expected", accelerate=False))
    real = gigatoken.Tokenizer.from_json
    monkeypatch.setattr(units, "UNIT_BYTES", 100)
    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", lambda content: Lying(real(content), b"zebra"))
    report = tokenize(asked)
    assert "gigatoken was dropped" in report.engine and "zebra" in report.engine
    assert sorted(map(tuple, entries(text / "data/train"))) == sorted(map(tuple, entries(text / "expected")))


def test_what_a_dropped_engine_made_before_is_made_again(
    text: Path, own_tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gigatoken

    from unbroken.data.ingest import fast_engine

    (text / "text" / "zoo.jsonl").write_bytes(lines(["a zebra", "no"]))
    monkeypatch.setattr(units, "UNIT_BYTES", 100)
    asked = request(text, tokenizer=own_tokenizer)
    tokenize(replace(asked, output_dir=text / "expected", accelerate=False))
    real = gigatoken.Tokenizer.from_json
    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", lambda content: Lying(real(content), b"s"))
    checked = fast_engine.FastEngine.check

    def blind(self: fast_engine.FastEngine, batch: object, found: object, firsts: object) -> None:
        if b"zebra" in b"".join(batch.encoded):  # type: ignore[attr-defined]
            raise fast_engine.EnginesDiffer("zebra")

    monkeypatch.setattr(fast_engine.FastEngine, "check", blind)
    report = tokenize(asked)
    assert checked is not blind and "zebra" in report.engine
    assert tree(text / "data/train") == tree(text / "expected")


# ---- again, more, other ----


def test_the_same_command_twice_has_nothing_to_do(text: Path) -> None:
    tokenize(request(text))
    before = tree(text / "data")
    report = tokenize(request(text))
    assert not report.is_new and report.totals.documents == 40
    os.utime(text / "text" / "a.jsonl")
    assert not tokenize(request(text)).is_new, "touched, but the same bytes"
    assert tree(text / "data") == before


def test_shards_that_went_away_are_not_nothing_to_do(text: Path) -> None:
    tokenize(request(text))
    (text / "data/train/web/00000-000.bin").unlink()
    with pytest.raises(DataDamaged) as refusal:
        tokenize(request(text))
    assert list(refusal.value.details()) == ["web/00000-000.bin: is missing"]


def _flip(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"says", b"SAYS", 1))


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + lines(["more"]))


@pytest.mark.parametrize("change", [_flip, _grow, Path.unlink])
def test_text_that_changed_or_went_away_is_refused_by_name(text: Path, change: Callable[[Path], None]) -> None:
    tokenize(request(text))
    before = tree(text / "data")
    change(text / "text" / "web" / "b.jsonl")
    with pytest.raises(SourcesChanged) as refusal:
        tokenize(request(text, add=True))
    assert [line.split(":")[0] for line in refusal.value.details()] == ["web/b.jsonl"]
    assert tree(text / "data") == before


def test_new_text_is_refused_until_it_is_requested_and_then_leaves_the_old_shards_alone(text: Path) -> None:
    tokenize(request(text))
    before = shards(text / "data")
    (text / "text" / "web" / "a-new.jsonl").write_bytes(lines(["new"]))
    (text / "text" / "books").mkdir()
    (text / "text" / "books" / "one.txt").write_text("book")
    with pytest.raises(SourcesChanged) as refusal:
        tokenize(request(text))
    assert refusal.value.help()[0].command.endswith(" --add")
    report = tokenize(request(text, add=True))
    after = shards(text / "data")
    assert {name: after[name] for name in before} == before
    assert sorted(after.keys() - before.keys()) == [
        *("train/books/00000-000.bin", "train/books/00000-000.idx"),
        *("train/web/00001-000.bin", "train/web/00001-000.idx"),
    ]
    assert report.totals.documents == 42
    assert open_corpus(text / "data", check="full").shards
    assert not tokenize(request(text)).is_new
    assert not tokenize(request(text, add=True)).is_new


def test_other_options_are_refused_each_by_name(text: Path, own_tokenizer: str) -> None:
    tokenize(request(text))
    with pytest.raises(TokenizedDifferently) as refusal:
        tokenize(request(text, tokenizer=own_tokenizer, options=TokenizeOptions(min_text_length=9, text_field="body")))
    names = [name for name, _, _ in refusal.value.differences]
    assert names == ["tokenizer", "end of document", "text_field", "min_text_length"]


def test_shards_of_another_tool_are_left_alone(text: Path) -> None:
    (text / "data/train/web").mkdir(parents=True)
    (text / "data/train/web/old.idx").write_bytes(b"")
    with pytest.raises(ShardsExist):
        tokenize(request(text))
    assert tree(text / "data") == {"train/web/old.idx": b""}


# ---- text on the fly ----


@pytest.mark.promise("G19")
def test_text_is_a_corpus_at_once_and_other_text_is_another(tmp_path: Path) -> None:
    write_format(tmp_path / "raw" / "train" / "web", ".jsonl", DOCUMENTS)
    corpus = open_text_corpus(tmp_path / "raw", "train", "bytes", tmp_path / "cache")
    assert [(bucket.name, bucket.entries) for bucket in corpus.buckets] == [("web", 40)]
    made = tree(tmp_path / "cache")
    assert open_text_corpus(tmp_path / "raw", "train", "bytes", tmp_path / "cache") == corpus
    assert tree(tmp_path / "cache") == made
    path = tmp_path / "raw" / "train" / "web" / "all.jsonl"
    stamp = path.stat().st_mtime_ns
    _flip(path)
    os.utime(path, ns=(stamp, stamp))
    other = open_text_corpus(tmp_path / "raw", "train", "bytes", tmp_path / "cache")
    assert other.root != corpus.root
    assert texts_of(corpus.shards[0].directory) == list(DOCUMENTS)


def test_progress_counts_every_byte_that_is_read(text: Path) -> None:
    import contextlib
    from collections.abc import Iterator

    results: list[int] = []
    totals: list[int] = []

    @contextlib.contextmanager
    def progress(total_bytes: int) -> Iterator[Callable[[int], None]]:
        totals.append(total_bytes)
        yield results.append

    tokenize(request(text, num_workers=2), progress=progress)
    assert sum(results) == totals[0] == sum(path.stat().st_size for path in (text / "text").rglob("*.jsonl"))
