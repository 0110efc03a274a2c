"""Files of documents are found by name, and their documents read whatever the format."""

import gzip
import itertools
import json
import os
import random
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.texts import DOCUMENTS, lines, write_format
from unbroken.data.ingest import documents
from unbroken.data.ingest.documents import BadDocument, DocumentBatch, Reader, Stretch
from unbroken.data.ingest.sources import SUFFIXES, TextSource, find_sources
from unbroken.data.ingest.units import UNIT_BYTES, cut_units
from unbroken.errors import ColumnMissing, NoTextFound, PathMissing, SourceBroken
from unbroken.store.digest import BlockDigester, PartDigest, digest_of


def read(folder: Path, *, field: str = "text") -> tuple[list[str], list[str]]:
    """Every document below a folder, and every complaint."""
    found: list[str] = []
    bad: list[BadDocument] = []
    reader = Reader(folder, field, bad.append)
    for source in find_sources(folder).sources:
        digester = BlockDigester()
        for batch in reader.batches(Stretch(source.name, 0, source.size_bytes), source.kind, digester):
            found += batch.texts
            assert batch.encoded == [text.encode() for text in batch.texts]
        assert digester.finish().whole == digest_of([(folder / source.name).read_bytes()]).whole
    return found, [str(each) for each in bad]


@pytest.mark.promise("G12")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_the_same_documents(suffix: str, tmp_path: Path) -> None:
    write_format(tmp_path / "text", suffix, DOCUMENTS)
    assert read(tmp_path / "text") == (list(DOCUMENTS), [])


def test_files_are_found_in_order_of_name_hidden_ones_are_not_and_others_are_named(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/z.TXT", "a/c.csv", ".hidden.txt", ".git/x.txt", "a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_sources(tmp_path)
    assert [source.name for source in found.sources] == ["a.jsonl", "a/z.TXT", "b.jsonl"]
    assert [source.folder for source in found.sources] == ["", "a", ""]
    assert found.unknown == ("a/c.csv",)


def test_linked_folders_are_read_and_a_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("x")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "web").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "again").symlink_to(tmp_path / "text")
    assert [source.name for source in find_sources(tmp_path / "text").sources] == ["web/a.txt"]


def test_a_folder_without_text_is_refused_and_so_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(NoTextFound) as refusal:
        find_sources(tmp_path)
    assert list(refusal.value.details()) == ["a.csv: unsupported suffix"]
    with pytest.raises(PathMissing):
        find_sources(tmp_path / "absent")


BAD_LINES = {
    b"{": "not JSON",
    b"[1]": "a list, not an object",
    b"17": "a number, not an object",
    b'{"body": "x"}': "no field 'text'",
    b'{"text": null}': "'text' is null, not a string",
    b'{"text": ["x"]}': "'text' is a list, not a string",
    b'{"text": "\xff"}': "not UTF-8: byte 0xff at byte 11",
    b'{"text": "\\ud800"}': "half of a surrogate pair",
    b"[" * 100_000: "nested too deeply",
    b'{"text": ' + b"9" * 5000 + b"}": "a number is too long",
}


@pytest.mark.promise("G12")
@pytest.mark.parametrize("line", BAD_LINES, ids=list(BAD_LINES.values()))
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_bad_line_is_reported_with_file_line_and_reason_and_the_others_are_read(
    line: bytes, suffix: str, tmp_path: Path
) -> None:
    data = lines(["one"]) + b"\n" + line + b"\n" + lines(["two"])[:-1]
    packed = {".jsonl": data, ".jsonl.gz": gzip.compress(data), ".jsonl.zst": zstandard.compress(data)}[suffix]
    (tmp_path / f"a{suffix}").write_bytes(packed)
    found, bad = read(tmp_path)
    assert found == ["one", "two"]
    assert len(bad) == 1
    assert bad[0].startswith(f"a{suffix}:3: ") and BAD_LINES[line] in bad[0]


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(["two"]))
    assert read(tmp_path) == (["one", "two"], [])


def test_a_text_file_that_is_no_utf8_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\xff\n")
    assert read(tmp_path) == ([], ["a.txt:2: not UTF-8: byte 0xff at byte 8"])


@pytest.mark.promise("G12")
@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_file_that_ends_too_early_is_refused_whole(suffix: str, cut: int, tmp_path: Path) -> None:
    write_format(tmp_path / "text", suffix, DOCUMENTS * 20)
    path = tmp_path / "text" / f"all{suffix}"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(SourceBroken) as refusal:
        read(tmp_path / "text")
    assert refusal.value.path == path


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_a_file_that_is_not_what_its_suffix_says_is_refused(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"a{suffix}").write_bytes(b"this is plain text, and long enough for every header there is")
    with pytest.raises(SourceBroken):
        read(tmp_path)


def test_compressed_streams_laid_end_to_end_are_one_file(tmp_path: Path) -> None:
    halves = lines(DOCUMENTS[:20]), lines(DOCUMENTS[20:])
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, halves)) + bytes(100))
    assert read(tmp_path) == (list(DOCUMENTS), [])
    (tmp_path / "a.jsonl.gz").unlink()
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, halves)))
    assert read(tmp_path) == (list(DOCUMENTS), [])


def test_rows_of_parquet_that_are_no_text_are_reported_and_a_missing_column_is_refused(tmp_path: Path) -> None:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    table = pyarrow.table({"text": pyarrow.array([b"one", None, b"\xff", b"two"], pyarrow.binary())})
    parquet.write_table(table, tmp_path / "a.parquet")
    found, bad = read(tmp_path)
    assert found == ["one", "two"]
    assert [each.split(": ")[0] for each in bad] == ["a.parquet:2", "a.parquet:3"]
    with pytest.raises(ColumnMissing, check=lambda lacking: lacking.column == "body") as missing:
        read(tmp_path, field="body")
    assert missing.value.columns == (("text", "binary"),)


# ---- stretches and units ----


@given(
    documents=st.lists(st.text(max_size=30), max_size=12),
    cuts=st.lists(st.integers(0, 600), max_size=6),
    has_end=st.booleans(),
)
def test_wherever_a_file_is_cut_every_line_is_read_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], cuts: list[int], has_end: bool
) -> None:
    folder = tmp_path_factory.mktemp("text")
    data = b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in documents)
    data = data if has_end else data[:-1]
    (folder / "a.jsonl").write_bytes(data)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    bad: list[BadDocument] = []
    found: list[str] = []
    for first, last in itertools.pairwise(bounds):
        digester = BlockDigester()
        for batch in Reader(folder, "text", bad.append).batches(Stretch("a.jsonl", first, last), "jsonl", digester):
            found += batch.texts
        assert digester.finish() == digest_of([data[first:last]])
    assert (found, bad) == (documents, [])


def test_a_bad_line_in_the_middle_of_a_file_is_reported_with_its_own_number(tmp_path: Path) -> None:
    data = lines(["x" * 50] * 10) + b"oops\n" + lines(["y"])
    (tmp_path / "a.jsonl").write_bytes(data)
    for first in (1, 300, data.index(b"oops")):
        bad: list[BadDocument] = []
        stretch = Stretch("a.jsonl", first, len(data))
        assert sum(
            len(b.texts) for b in Reader(tmp_path, "text", bad.append).batches(stretch, "jsonl", BlockDigester())
        )
        assert [each.line for each in bad] == [11]


def test_units_cover_every_file_once_and_hang_on_names_and_sizes_alone() -> None:
    sources = [
        TextSource("big.jsonl", 3 * UNIT_BYTES + 5),
        *(TextSource(f"small-{n}.jsonl", UNIT_BYTES // 3) for n in range(7)),
        TextSource("web/one.jsonl.gz", UNIT_BYTES),
        TextSource("web/two.txt", 10),
    ]
    units = list(cut_units(sources, {"web": 4}))
    assert units == list(cut_units(sources[::-1], {"web": 4}))
    assert [unit.number for unit in units if unit.folder == ""] == list(range(7))
    assert [unit.number for unit in units if unit.folder == "web"] == [4, 5]
    for source in sources:
        pieces = [s for unit in units for s in unit.stretches if s.name == source.name]
        assert pieces[0].first == 0 and pieces[-1].last == source.size_bytes
        assert all(a.last == b.first and a.last % UNIT_BYTES == 0 for a, b in itertools.pairwise(pieces))


def test_digests_of_stretches_make_up_that_of_the_file() -> None:
    data = bytes(range(251)) * (5 * UNIT_BYTES // 2 // 251)
    pieces = [data[start : start + UNIT_BYTES] for start in range(0, len(data), UNIT_BYTES)]
    blocks = tuple(block for piece in pieces for block in digest_of([piece]).blocks)
    assert PartDigest(len(data), blocks).whole == digest_of([data]).whole


def test_a_batch_refuses_what_is_no_character() -> None:
    batch = DocumentBatch()
    problem = batch.add("\ud800", 1)
    assert problem is not None and problem.cause == "not-utf-8"
    assert batch.texts == []


def test_a_name_that_no_list_could_hold_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    with pytest.raises(SourceBroken, match="its name is not UTF-8"):
        find_sources(tmp_path)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_document_larger_than_memory_is_refused_before_it_is_held(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LONGEST_BYTES", 100_000)
    monkeypatch.setattr(documents, "READ_BYTES", 4096)
    # Of letters that do not shrink much: what is inflated in one go is small as it is.
    drawn = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=200_000)
    write_format(tmp_path / "text", suffix, ["".join(drawn)])
    with pytest.raises(SourceBroken, match="more than 100,000 bytes"):
        read(tmp_path / "text")


def test_a_link_to_nothing_and_a_pipe_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(SourceBroken, match="a link to a missing file") as refused:
        find_sources(tmp_path)
    assert refused.value.path == tmp_path / "a.jsonl"
    (tmp_path / "a.jsonl").unlink()
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(SourceBroken, match="not a regular file"):
        find_sources(tmp_path)
