"""A data folder: what is found in it, and what is refused, by name and all at once."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.data.making import BYTES, make_bucket, make_shard
from unbroken.data import open_corpus, seal_shards
from unbroken.data.corpus.listing import TokenizerIdentity
from unbroken.errors import (
    DataDamaged,
    DataMissing,
    PathMissing,
    TokenizationUnfinished,
    TokenizersDiffer,
    WouldOverwrite,
)

WEB = {"00000-000": [[1, 2, 256], [3, 256]], "2020/00001-000": [[4, 256]]}
CODE = {"00000-000": [[5, 6, 7, 256]]}
OTHER = TokenizerIdentity("other", "c" * 32, 300, 299)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    make_bucket(tmp_path / "train" / "web", WEB)
    make_bucket(tmp_path / "train" / "code", CODE)
    return tmp_path


def findings(data: Path, check: str = "quick") -> tuple[str, ...]:
    with pytest.raises(DataDamaged) as refused:
        open_corpus(data, check="full" if check == "full" else "quick")
    return refused.value.findings


# ---- what is found ----


def test_folders_are_buckets_and_everything_is_sorted(data: Path) -> None:
    corpus = open_corpus(data)
    assert [bucket.name for bucket in corpus.buckets] == ["code", "web"]
    assert [shard.name for shard in corpus.buckets[1].shards] == ["00000-000", "2020/00001-000"]
    assert (corpus.buckets[1].entries, corpus.buckets[1].tokens) == (3, 7)
    assert corpus.tokenizer == BYTES
    shard = corpus.buckets[1].shards[1]
    assert shard.bin_path == data / "train" / "web" / "2020" / "00001-000.bin"
    assert shard.index.offsets(0, 1).tolist() == [0, 2]
    assert shard.bin_digest is not None


def test_loose_shards_are_the_bucket_default(tmp_path: Path) -> None:
    make_bucket(tmp_path / "train", {"a": [[1, 256]]})
    corpus = open_corpus(tmp_path)
    assert [bucket.name for bucket in corpus.buckets] == ["default"]
    assert corpus.shards[0].idx_path == tmp_path / "train" / "a.idx"


def test_the_validation_split_is_a_folder_beside(data: Path) -> None:
    make_bucket(data / "val" / "web", {"a": [[1, 256]]})
    assert [shard.name for shard in open_corpus(data, "val").shards] == ["a"]


def test_one_list_may_speak_for_several_buckets(tmp_path: Path) -> None:
    make_bucket(tmp_path / "train", {"web/a": [[1, 256]], "code/b": [[2, 256]], "c": [[3, 256]]})
    corpus = open_corpus(tmp_path)
    assert [(shard.bucket, shard.name) for shard in corpus.shards] == [("code", "b"), ("default", "c"), ("web", "a")]
    assert all(shard.bin_digest for shard in corpus.shards)


def test_shards_without_a_list_are_read_and_are_unverified(tmp_path: Path) -> None:
    make_shard(tmp_path / "train", "a", [[1, 256]])
    corpus = open_corpus(tmp_path)
    assert corpus.tokenizer is None
    assert corpus.shards[0].bin_digest is None


def test_hidden_names_and_other_files_are_ignored(data: Path) -> None:
    digest = open_corpus(data).digest()
    (data / "train" / "web" / ".writing-9.bin").write_bytes(b"half")
    (data / "train" / "web" / "notes.txt").write_text("hello")
    (data / "train" / "web" / "link.txt").symlink_to("notes.txt")
    assert open_corpus(data).digest() == digest


def test_a_whole_bucket_may_be_a_link(data: Path, tmp_path: Path) -> None:
    (data / "train" / "web").rename(data / "elsewhere")
    digest = open_corpus(data).digest()
    (data / "train" / "web").symlink_to(data / "elsewhere")
    assert [bucket.name for bucket in open_corpus(data).buckets] == ["code", "web"]
    assert open_corpus(data).digest() != digest


def test_the_digest_knows_neither_place_nor_list(data: Path) -> None:
    digest = open_corpus(data).digest()
    moved = data.rename(data.with_name("moved"))
    assert open_corpus(moved).digest() == digest
    (moved / "train" / "web" / "shards.json").unlink()
    assert open_corpus(moved).digest() == digest
    seal_shards(moved / "train" / "web", BYTES)
    assert open_corpus(moved).digest() == digest
    (moved / "train" / "web").rename(moved / "train" / "net")
    assert open_corpus(moved).digest() != digest


def test_a_shard_without_entries_beside_others_is_legal(tmp_path: Path) -> None:
    make_bucket(tmp_path / "train", {"a": [[1, 256]], "b": []})
    assert open_corpus(tmp_path, check="full").buckets[0].entries == 1


def test_opening_a_corpus_loads_no_torch_and_naming_the_package_no_numpy(data: Path) -> None:
    program = (
        "import sys, pathlib, unbroken.data; assert 'numpy' not in sys.modules; "
        "unbroken.data.open_corpus(pathlib.Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(data)], check=True)


# ---- what is refused ----


def test_a_folder_that_is_not_there_is_a_wrong_path(tmp_path: Path) -> None:
    with pytest.raises(PathMissing):
        open_corpus(tmp_path / "none")


def test_a_folder_without_the_split_or_without_shards_has_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="no folder train/"):
        open_corpus(tmp_path)
    (tmp_path / "train" / "web").mkdir(parents=True)
    with pytest.raises(DataMissing, match=r"no \.idx file"):
        open_corpus(tmp_path)


def test_a_bucket_without_any_entry_is_named(data: Path) -> None:
    make_bucket(data / "train" / "void", {"a": [], "b": []})
    assert findings(data) == ("void: 2 shards, no entries",)


def test_loose_shards_and_a_folder_default_cannot_be_distinguished(tmp_path: Path) -> None:
    make_shard(tmp_path / "train", "a", [[1, 256]])
    make_shard(tmp_path / "train" / "default", "a", [[1, 256]])
    (finding,) = findings(tmp_path)
    assert finding.startswith("default/: a bucket of the same name as that of the shards outside any bucket")


@pytest.mark.parametrize("place", ["", "train", "train/web", "train/web/2020"])
def test_an_unfinished_tokenization_is_refused_wherever_its_mark_stands(data: Path, place: str) -> None:
    (data / place / ".tokenize").mkdir()
    with pytest.raises(TokenizationUnfinished) as refused:
        open_corpus(data)
    assert refused.value.path == data / place
    assert refused.value.help()[0].command == "unbroken tokenize --help"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("unbroken tokenize --input_dir 'my text'\n", "unbroken tokenize --input_dir 'my text'"),
        ("rm -rf /", "unbroken tokenize --help"),
        ("unbroken tokenize x\nrm -rf /", "unbroken tokenize --help"),
    ],
)
def test_the_command_that_finishes_it_is_shown_if_it_is_one_of_ours(data: Path, text: str, shown: str) -> None:
    (data / ".tokenize").mkdir()
    (data / ".tokenize" / "command").write_text(text)
    with pytest.raises(TokenizationUnfinished) as refused:
        open_corpus(data)
    assert refused.value.help()[0].command == shown


def test_different_tokenizers_are_named_folder_by_folder(data: Path) -> None:
    make_bucket(data / "train" / "math", {"a": [[1, 299]]}, OTHER)
    with pytest.raises(TokenizersDiffer) as refused:
        open_corpus(data)
    assert [folder for folder, _ in refused.value.found] == ["code", "math", "web"]
    assert refused.value.found[1][1] == f"other, 300 ids, {'c' * 32}"


def test_different_token_sizes_are_named_bucket_by_bucket(tmp_path: Path) -> None:
    make_shard(tmp_path / "train" / "a", "x", [[1, 2]], token_bytes=2)
    make_shard(tmp_path / "train" / "b", "x", [[1, 2]], token_bytes=4)
    with pytest.raises(TokenizersDiffer) as refused:
        open_corpus(tmp_path)
    assert refused.value.found == (("a", "2 bytes a token"), ("b", "4 bytes a token"))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "web/00000-000.bin: it has 9 bytes; its index says 10": lambda web: _cut(web / "00000-000.bin"),
    "web/00000-000.idx: it has 43 bytes; 2 entries take 44": lambda web: _cut(web / "00000-000.idx"),
    "web/00000-000.idx: its .bin is missing": lambda web: (web / "00000-000.bin").unlink(),
    "web/00000-000.bin: its .idx is missing": lambda web: (web / "00000-000.idx").unlink(),
    "web/9: not listed in web/shards.json": lambda web: make_shard(web, "9", [[1, 256]]),
    "web/shards.json: its bytes do not match its own checksum": lambda web: (web / "shards.json").write_bytes(
        (web / "shards.json").read_bytes().replace(b'"entries":2', b'"entries":3')
    ),
    "web/00000-000.idx: it has 1 entries, 2 are listed": lambda web: make_shard(
        web, "00000-000", [[1, 2, 256, 3, 256]]
    ),
}


@pytest.mark.parametrize("finding", DAMAGES)
def test_each_damage_is_named_with_its_file(data: Path, finding: str) -> None:
    DAMAGES[finding](data / "train" / "web")
    assert finding in findings(data)


def test_a_listed_shard_that_is_gone_is_named(data: Path) -> None:
    for suffix in ("bin", "idx"):
        (data / "train" / "web" / "2020" / f"00001-000.{suffix}").unlink()
    assert [finding.split(":")[0] for finding in findings(data)] == ["web/2020/00001-000"]


@pytest.mark.parametrize("inner", [{"a": [[1, 256]]}, {}], ids=["another shard", "no shard"])
def test_two_lists_that_disagree_about_a_shard_are_named(tmp_path: Path, inner: dict[str, list[list[int]]]) -> None:
    make_bucket(tmp_path / "train", {"web/a": [[1, 2, 256]], "code/a": [[3, 256]]})
    make_bucket(tmp_path / "train" / "web", inner)
    assert "web/a" in {finding.split(":")[0] for finding in findings(tmp_path)}


def test_two_lists_that_agree_are_one(tmp_path: Path) -> None:
    make_bucket(tmp_path / "train", {"web/a": [[1, 2, 256]]})
    make_bucket(tmp_path / "train" / "web", {"a": [[1, 2, 256]]})
    assert open_corpus(tmp_path).shards[0].bin_digest


def test_an_index_with_the_same_counts_and_other_offsets_differs_from_its_list(data: Path) -> None:
    make_shard(data / "train" / "web", "00000-000", [[1, 2], [256, 3, 256]])
    (finding,) = findings(data)
    assert finding.startswith("web/00000-000.idx:")


def test_all_problems_of_a_folder_are_named_at_once(data: Path) -> None:
    web = data / "train" / "web"
    _cut(web / "00000-000.bin")
    (web / "2020" / "00001-000.idx").write_bytes(b"GPTX" + b"\x00" * 40)
    make_shard(web, "9", [[1, 256]])
    (data / "train" / "code" / "00000-000.bin").unlink()
    assert len(findings(data)) == 4


def test_a_link_in_the_place_of_a_shards_file_is_refused(data: Path) -> None:
    web = data / "train" / "web"
    (web / "00000-000.bin").rename(data / "stray.bin")
    (web / "00000-000.bin").symlink_to(data / "stray.bin")
    assert "web/00000-000.bin" in {finding.split(":")[0] for finding in findings(data)}


def test_a_link_to_a_folder_below_a_bucket_is_refused_rather_than_skipped(data: Path) -> None:
    (data / "train" / "web" / "round").symlink_to(data / "train")
    assert findings(data) == ("web/round: not a regular file; only the folder of a bucket may be a link",)


def test_a_pipe_under_a_shards_name_does_not_hang_the_reader(data: Path) -> None:
    os.mkfifo(data / "train" / "web" / "pipe.idx")
    assert findings(data) == ("web/pipe.idx: not a regular file; only the folder of a bucket may be a link",)


# ---- what only the full check sees ----


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_in_a_bin_is_seen_by_the_full_check_alone(data: Path) -> None:
    _flip(data / "train" / "web" / "00000-000.bin")
    assert open_corpus(data).shards
    (finding,) = findings(data, "full")
    assert finding.startswith("web/00000-000.bin: its checksum is ")


def test_a_token_beyond_the_vocabulary_is_seen_by_the_full_check(data: Path) -> None:
    make_bucket(data / "train" / "web", {**WEB, "9": [[257, 256]]})
    assert open_corpus(data).shards
    assert findings(data, "full") == ("web/9.bin: it holds token id 257; the vocabulary has 257",)


def test_a_vocabulary_can_be_given_where_no_listing_has_one(tmp_path: Path) -> None:
    make_shard(tmp_path / "train", "a", [[9, 256]])
    assert open_corpus(tmp_path, check="full", vocab_size=257).shards[0].bin_digest is not None
    with pytest.raises(DataDamaged) as refused:
        open_corpus(tmp_path, check="full", vocab_size=256)
    assert refused.value.findings == ("a.bin: it holds token id 256; the vocabulary has 256",)


# ---- sealing ----


def test_a_sealed_folder_is_verified_from_then_on(tmp_path: Path) -> None:
    folder = tmp_path / "train" / "web"
    record = make_shard(folder, "2020/a", [[1, 256]])
    assert seal_shards(folder, BYTES).shards == (record,)
    assert open_corpus(tmp_path, check="full").shards[0].bin_digest == record.bin_digest
    assert open_corpus(tmp_path).tokenizer == BYTES
    _flip(folder / "2020" / "a.bin")
    assert len(findings(tmp_path, "full")) == 1


def test_a_folder_without_a_known_tokenizer_can_be_sealed(tmp_path: Path) -> None:
    make_shard(tmp_path / "train", "a", [[60_000]])
    seal_shards(tmp_path / "train", None)
    corpus = open_corpus(tmp_path)
    assert corpus.tokenizer is None
    assert corpus.shards[0].bin_digest


def test_sealing_refuses_what_is_not_sound_and_writes_nothing(tmp_path: Path) -> None:
    make_shard(tmp_path, "a", [[999]])
    make_shard(tmp_path, "b", [[1]], token_bytes=4)
    make_shard(tmp_path, "c", [[1]])
    _cut(tmp_path / "c.bin")
    (tmp_path / "d.bin").write_bytes(b"")
    with pytest.raises(DataDamaged) as refused:
        seal_shards(tmp_path, BYTES)
    assert refused.value.findings == (
        "a.bin: it holds token id 999; the vocabulary has 257",
        "b.idx: 4 bytes per token do not fit a vocabulary of 257",
        "c.bin: it has 1 bytes; its index says 2",
        "d.bin: its .idx is missing",
    )
    assert not (tmp_path / "shards.json").exists()


def test_sealing_never_replaces_a_list(data: Path) -> None:
    for folder in (data / "train" / "web", data / "train"):
        with pytest.raises(WouldOverwrite):
            seal_shards(folder, BYTES)


def test_sealing_a_folder_without_shards_reports_it(tmp_path: Path) -> None:
    with pytest.raises(DataMissing):
        seal_shards(tmp_path, None)
    with pytest.raises(PathMissing):
        seal_shards(tmp_path / "none", None)


def test_a_path_may_be_text_and_an_unknown_check_is_no_quick_one(data: Path) -> None:
    assert open_corpus(str(data)) == open_corpus(data)
    with pytest.raises(ValueError, match="one of quick, full"):
        open_corpus(data, check="bytes")  # type: ignore[arg-type]


def test_shards_that_stand_without_a_split_are_distinguished_from_no_data(data: Path) -> None:
    with pytest.raises(DataMissing) as refused:
        open_corpus(data / "train")
    assert refused.value.help()[0].command == f"unbroken data inspect {data}"
    (data / "train").rename(data / "made")
    with pytest.raises(DataMissing) as refused:
        open_corpus(data / "made")
    subprocess.run(refused.value.help()[0].command, shell=True, check=True)
    assert open_corpus(data / "made").buckets


def test_a_tokenization_that_has_made_no_split_yet_is_reported_as_unfinished(tmp_path: Path) -> None:
    (tmp_path / ".tokenize").mkdir()
    with pytest.raises(TokenizationUnfinished):
        open_corpus(tmp_path)
