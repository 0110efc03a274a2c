"""One shard: what a reader sees of it, what it refuses, and what a writer leaves."""

import resource
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.making import entries_of, make_shard
from unbroken.data.corpus.shards import (
    Entries,
    ShardIndex,
    bin_beside,
    map_tokens,
    open_index,
    token_bytes_for,
    write_shard,
)
from unbroken.errors import ShardDamaged, StorageFailed
from unbroken.files import LOCAL
from unbroken.store.digest import digest_of

DOCUMENTS = [[7, 8, 256], [256], [1, 2, 3, 4, 256]]


def index_bytes(
    offsets: list[int], prefixes: list[int], *, magic: bytes = b"GPTS", version: int = 1, code: int = 2
) -> bytes:
    header = struct.pack("<4sIII", magic, version, code, len(prefixes))
    return header + struct.pack(f"<{len(offsets)}q", *offsets) + struct.pack(f"<{len(prefixes)}H", *prefixes)


@pytest.fixture
def shard(tmp_path: Path) -> ShardIndex:
    make_shard(tmp_path, "00000-000", DOCUMENTS)
    return open_index(tmp_path / "00000-000.idx")


def test_what_was_written_is_read_back(shard: ShardIndex) -> None:
    assert (shard.entries, shard.tokens, shard.token_bytes) == (3, 9, 2)
    assert shard.offsets(0, 3).tolist() == [0, 3, 4, 9]
    assert shard.prefixes(0, 3).tolist() == [0, 0, 0]
    assert map_tokens(bin_beside(shard.path), shard).tolist() == [token for each in DOCUMENTS for token in each]


def test_an_index_is_read_in_ranges(shard: ShardIndex) -> None:
    assert shard.offsets(1, 2).tolist() == [3, 4]
    assert shard.offsets(3, 3).tolist() == [9]
    assert shard.prefixes(2, 2).tolist() == []
    assert shard.offsets(0, 1).dtype == np.int64
    assert shard.prefixes(0, 1).dtype == np.uint16


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (0, 4), (2, 1)])
def test_a_range_outside_of_the_index_is_an_index_error(shard: ShardIndex, first: int, last: int) -> None:
    with pytest.raises(IndexError):
        shard.offsets(first, last)


def test_the_digest_is_that_of_the_files_bytes(shard: ShardIndex) -> None:
    assert shard.digest() == digest_of([shard.path.read_bytes()]).whole


def test_the_record_of_a_writer_is_what_stands_on_disk(tmp_path: Path) -> None:
    record = make_shard(tmp_path, "2020/00012-000", DOCUMENTS, token_bytes=4)
    written = {suffix: (tmp_path / f"2020/00012-000.{suffix}").read_bytes() for suffix in ("bin", "idx")}
    assert (record.name, record.entries, record.tokens) == ("2020/00012-000", 3, 9)
    assert (record.bin_bytes, record.idx_bytes) == (len(written["bin"]), len(written["idx"]))
    assert record.bin_digest == digest_of([written["bin"]]).whole
    assert record.index_digest == digest_of([written["idx"]]).whole
    assert sorted(path.name for path in (tmp_path / "2020").iterdir()) == ["00012-000.bin", "00012-000.idx"]


def test_a_mapped_shard_cannot_be_written_to(shard: ShardIndex) -> None:
    tokens = map_tokens(bin_beside(shard.path), shard)
    assert type(tokens) is np.ndarray
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_a_map_that_the_system_refuses_is_an_error_that_names_the_file(
    shard: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(np, "memmap", refused)
    with pytest.raises(StorageFailed) as refusal:
        map_tokens(bin_beside(shard.path), shard)
    assert refusal.value.path == bin_beside(shard.path)


def test_a_shard_without_entries_is_whole(tmp_path: Path) -> None:
    make_shard(tmp_path, "none", [])
    index = open_index(tmp_path / "none.idx")
    index.require_sound()
    assert (index.entries, index.tokens) == (0, 0)
    assert map_tokens(tmp_path / "none.bin", index).tolist() == []
    assert index.offsets(0, 0).tolist() == [0]


@pytest.mark.parametrize(("vocabulary", "size"), [(257, 2), (65_535, 2), (65_536, 4), (200_000, 4)])
def test_ids_take_two_bytes_below_a_vocabulary_of_65536(vocabulary: int, size: int) -> None:
    assert token_bytes_for(vocabulary) == size


def test_runs_of_entries_are_one_shard(tmp_path: Path) -> None:
    runs = [entries_of([document], [min(1, position)]) for position, document in enumerate(DOCUMENTS)]
    write_shard(LOCAL, tmp_path, "runs", runs, token_bytes=2)
    write_shard(LOCAL, tmp_path, "whole", [entries_of(DOCUMENTS, [0, 1, 1])], token_bytes=2)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"runs.{suffix}").read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()


BAD_RUNS = {
    "does not fit into 2 bytes": entries_of([[65_536]]),
    "disagree": Entries(np.arange(3, dtype=np.uint16), np.array([2]), np.zeros(1, np.uint16)),
    "longer than its entry": entries_of([[1, 2]], [3]),
}


@pytest.mark.parametrize("complaint", BAD_RUNS)
def test_a_writer_refuses_what_no_reader_could_use_and_leaves_nothing(tmp_path: Path, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        write_shard(LOCAL, tmp_path, "bad", [entries_of([[1]]), BAD_RUNS[complaint]], token_bytes=2)
    assert list(tmp_path.iterdir()) == []


BAD_INDEXES = {
    "too few for a header": b"GPTS\x01\x00",
    "begins with b'GPTT'": index_bytes([0, 3], [0], magic=b"GPTT"),
    "version is 2": index_bytes([0, 3], [0], version=2),
    "token type is 3": index_bytes([0, 3], [0], code=3),
    "it has 33 bytes; 1 entries take 34": index_bytes([0, 3], [0])[:-1],
    "it has 35 bytes; 1 entries take 34": index_bytes([0, 3], [0]) + b"\x00",
    "starts at token 1, not at 0": index_bytes([1, 3], [0]),
    "last offset is -3": index_bytes([0, -3], [0]),
}


@pytest.mark.parametrize("complaint", BAD_INDEXES)
def test_an_index_that_breaks_a_rule_is_refused_by_name(tmp_path: Path, complaint: str) -> None:
    path = tmp_path / "web.idx"
    path.write_bytes(BAD_INDEXES[complaint])
    with pytest.raises(ShardDamaged) as refused:
        open_index(path)
    assert complaint in refused.value.complaint
    assert refused.value.path == path


BAD_ENTRIES = {
    "entry 1 starts at token 5 but ends before it, at token 4": index_bytes([0, 5, 4, 9], [0, 0, 0]),
    "entry 0 starts at token 0 but ends before it, at token -1": index_bytes([0, -1, 9], [0, 0]),
    "entry 1 starts at token 99 but ends before it, at token 9": index_bytes([0, 99, 9], [0, 0]),
    "entry 1 has 2 tokens but a prefix of 3": index_bytes([0, 3, 5, 9], [0, 3, 0]),
}


@pytest.mark.parametrize("complaint", BAD_ENTRIES)
def test_entries_that_break_a_rule_are_named(tmp_path: Path, complaint: str) -> None:
    path = tmp_path / "web.idx"
    path.write_bytes(BAD_ENTRIES[complaint])
    with pytest.raises(ShardDamaged) as refused:
        open_index(path).require_sound()
    assert refused.value.complaint == complaint


def test_a_single_range_never_hands_out_an_offset_beyond_the_tokens(tmp_path: Path) -> None:
    path = tmp_path / "web.idx"
    path.write_bytes(index_bytes([0, 3, 99, 9], [0, 0, 0]))
    with pytest.raises(ShardDamaged, match="exceed its 9 tokens"):
        open_index(path).offsets(1, 2)


def test_disorder_is_seen_where_two_stretches_of_a_long_index_meet(tmp_path: Path) -> None:
    entries = (1 << 18) + 5
    offsets = np.arange(entries + 1)
    offsets[1 << 18] = 0
    path = tmp_path / "web.idx"
    path.write_bytes(
        struct.pack("<4sIII", b"GPTS", 1, 2, entries)
        + offsets.astype("<i8").tobytes()
        + np.zeros(entries, "<u2").tobytes()
    )
    with pytest.raises(ShardDamaged, match="entry 262,143 starts at token 262,143"):
        open_index(path).require_sound()


@pytest.mark.parametrize("change", [-2, 2, -18])
def test_a_bin_of_another_size_is_refused_before_it_is_mapped(shard: ShardIndex, change: int) -> None:
    path = bin_beside(shard.path)
    path.write_bytes((path.read_bytes() + b"\x00" * 2)[: 18 + change])
    with pytest.raises(ShardDamaged, match=f"it has {18 + change} bytes; its index says 18"):
        map_tokens(path, shard)


def test_a_bin_that_is_not_there_is_named(shard: ShardIndex) -> None:
    bin_beside(shard.path).unlink()
    with pytest.raises(ShardDamaged, match="missing"):
        map_tokens(bin_beside(shard.path), shard)


def test_an_index_that_shrinks_after_it_was_opened_is_refused(shard: ShardIndex) -> None:
    shard.path.write_bytes(shard.path.read_bytes()[:20])
    with pytest.raises(ShardDamaged, match="became shorter"):
        shard.offsets(0, 3)


def test_a_missing_index_is_a_storage_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed) as refused:
        open_index(tmp_path / "none.idx")
    assert refused.value.path == tmp_path / "none.idx"


def test_huge_counts_in_a_header_allocate_nothing(tmp_path: Path) -> None:
    path = tmp_path / "web.idx"
    path.write_bytes(struct.pack("<4sIII", b"GPTS", 1, 2, 0xFFFF_FFFF) + b"\x00" * 64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ShardDamaged, match="4,294,967,295 entries take 42,949,672,974"):
        open_index(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_an_offset_beyond_every_disk_is_refused_by_the_size_of_the_bin(tmp_path: Path) -> None:
    (tmp_path / "web.idx").write_bytes(index_bytes([0, (1 << 63) - 1], [0]))
    (tmp_path / "web.bin").write_bytes(b"\x00" * 8)
    index = open_index(tmp_path / "web.idx")
    with pytest.raises(ShardDamaged, match="its index says 18,446,744,073,709,551,614"):
        map_tokens(tmp_path / "web.bin", index)


MAPPING = """
import sys
from pathlib import Path
from unbroken.data.corpus.catalogue import open_corpus
from unbroken.data.corpus.shards import map_tokens

(shard,) = open_corpus(Path(sys.argv[1])).shards
tokens = map_tokens(shard.bin_path, shard.index)
assert sum(int(tokens[at]) for at in range(0, len(tokens), len(tokens) // 1000)) == 0
# Mapped pages are the page cache's and go under pressure; what a process holds for itself is anonymous.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["RssAnon"].split()[0]))
"""
CHECKING = """
import resource, sys
from pathlib import Path
from unbroken.data.corpus.catalogue import open_corpus

open_corpus(Path(sys.argv[1]), check="full")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def held_kb(program: str, root: Path, tokens: int) -> int:
    """How much memory a process holds that does this with a corpus of so many tokens, all of them 0."""
    folder = root / str(tokens) / "train"
    folder.mkdir(parents=True)
    with (folder / "sparse.bin").open("wb") as file:
        file.truncate(2 * tokens)
    ends = [tokens // 1_000 * entry for entry in range(1_001)]
    (folder / "sparse.idx").write_bytes(index_bytes(ends, [0] * 1_000))
    return int(subprocess.check_output([sys.executable, "-c", program, str(folder.parent)], text=True))


@pytest.mark.promise("G14")
def test_memory_is_flat_from_ten_million_to_a_billion_mapped_tokens(tmp_path: Path) -> None:
    assert held_kb(MAPPING, tmp_path, 1_000_000_000) - held_kb(MAPPING, tmp_path, 10_000_000) < 8 << 10


@pytest.mark.promise("G14")
def test_the_full_check_of_a_large_shard_takes_the_memory_of_one_block(tmp_path: Path) -> None:
    assert held_kb(CHECKING, tmp_path, 100_000_000) - held_kb(CHECKING, tmp_path, 10_000_000) < 8 << 10
