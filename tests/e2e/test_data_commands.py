"""``unbroken data`` and the data half of ``validate`` as a user calls them: text, JSON, exit codes, mistakes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tool
from tests.unit.data.corpora import texts_of, write_corpus
from unbroken.cli.data_show import describe
from unbroken.data.corpus.catalogue import open_corpus
from unbroken.data.stream import Stream

CONFIG = """
model: {vocab_size: 384, n_embd: 64, n_layer: 1, n_head: 2, n_positions: 64}
data: {path: data, tokenizer: bytes, max_length: 64, overlap_size: 8}
optimizer: {warmup_steps: 1}
training: {per_device_batch_size: 2, gradient_accumulation_steps: 2, max_steps: 10, eval_steps: 5}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data directory with two buckets and a val split, one that another tool wrote, and a config."""
    web = [["it rained all day", *texts_of(range(20, 200, 3), 1)], texts_of([300] * 10, 2)]
    write_corpus(tmp_path / "data", {"web": web, "code": [["def f():\n    return 1", *texts_of([90] * 20, 3)]]})
    write_corpus(tmp_path / "data", {"web": [texts_of([50] * 9)]}, split="val")
    write_corpus(tmp_path / "foreign", {"web": [texts_of([50] * 9)]}, is_listed=False)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def document(unbroken: Tool, *arguments: str, code: int = 0) -> dict[str, Any]:
    """The one JSON document that a command prints."""
    ended = unbroken(*arguments, "--json")
    assert (ended.returncode, ended.stderr) == (code, ""), ended
    said: dict[str, Any] = json.loads(ended.stdout)
    return said


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def test_show_refuses_a_sample_whose_bytes_changed_since_training_checked_them(unbroken: Tool, folder: Path) -> None:
    words = ("data", "show", "0", "data", "--max-length", "64", "--overlap-size", "8")
    shown = document(unbroken, *words)
    assert not (folder / "data" / ".unbroken" / "reads").exists(), "showing one sample reads no other"
    corpus = open_corpus(folder / "data")
    # What a training leaves.
    Stream(corpus, max_length=64, overlap_size=8, seed=42)
    assert document(unbroken, *words) == shown
    for path in (folder / "data" / "train").glob("*/*.bin"):
        data = bytearray(path.read_bytes())
        path.write_bytes(bytes(byte ^ 1 for byte in data))
    assert document(unbroken, *words, code=4)["kind"] == "sequence-damaged"


def test_inspect_lists_every_bucket_of_every_split(unbroken: Tool, folder: Path) -> None:
    ended = unbroken("data", "inspect", "data")
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = [line.split()[:4] for line in ended.stdout.splitlines() if line.startswith(("train", "val"))]
    assert rows == [["train", "code", "1", "21"], ["train", "web", "2", "71"], ["val", "web", "1", "9"]]
    found = document(unbroken, "data", "inspect", "data")
    assert [split["split"] for split in found["splits"]] == ["train", "val"]
    assert found["splits"][0]["buckets"][1]["tokens"] == found["splits"][0]["buckets"][1]["size_bytes"] // 2


def test_a_flipped_byte_is_seen_by_verify_and_inspect_full_and_not_by_a_quick_look(
    unbroken: Tool, folder: Path
) -> None:
    assert unbroken("data", "verify", "data").returncode == 0
    flip(folder / "data/train/web/00001-000.bin")
    flip(folder / "data/val/web/00000-000.bin")
    assert unbroken("data", "inspect", "data").returncode == 0
    for command in (["verify", "data"], ["inspect", "data", "--full"]):
        ended = unbroken("data", *command)
        assert ended.returncode == 4
        assert ended.stderr.startswith("error[data-damaged]: ")
        assert "train/web/00001-000.bin" in ended.stderr and "val/web/00000-000.bin" in ended.stderr


def test_verify_names_the_shards_that_have_no_digest_and_seal_gives_them_one(unbroken: Tool, folder: Path) -> None:
    assert document(unbroken, "data", "verify", "foreign")["unproven"] == ["train/web/00000-000"]
    before = (folder / "foreign/train/web/00000-000.bin").read_bytes()
    sealed = document(unbroken, "data", "seal", "foreign", "--tokenizer", "bytes")
    assert sealed["sealed"][0]["documents"] == 9
    assert (folder / "foreign/train/web/00000-000.bin").read_bytes() == before
    assert document(unbroken, "data", "verify", "foreign")["unproven"] == []
    assert document(unbroken, "data", "seal", "foreign", code=2)["kind"] == "would-overwrite"


def test_stats_tell_how_documents_pack_and_how_long_they_are(unbroken: Tool, folder: Path) -> None:
    found = document(unbroken, "data", "stats", "data", "--max-length", "64", "--overlap-size", "8")
    by_name = {bucket["name"]: bucket for bucket in found["buckets"]}
    for bucket in by_name.values():
        assert bucket["fresh_tokens"] == bucket["tokens"]
        assert 0.5 < bucket["fill"] <= 1
    assert sum(row["documents"] for row in found["document_lengths"]) == 21 + 71
    assert {"from": 16, "to": 31, "documents": 6} in found["document_lengths"]
    unpacked = document(unbroken, "data", "stats", "data", "--max-length", "64", "--overlap-size", "8", "--no-packing")
    assert unpacked["buckets"][0]["sequences"] == unpacked["buckets"][0]["windows"]
    assert document(unbroken, "data", "stats", "--config", "run.yaml") == found


def test_show_decodes_a_sample_and_names_each_document(unbroken: Tool, folder: Path) -> None:
    stream = Stream(open_corpus(folder / "data"), max_length=64, overlap_size=8, seed=42)
    holders = [
        k for k in range(len(stream)) if b"it rained all day" in bytes(t % 256 for t in describe(stream, k).tokens)
    ]
    found = document(unbroken, "data", "show", str(holders[0]), "--config", "run.yaml")
    rained = next(window for window in found["windows"] if window["text"] == "it rained all day")
    assert (found["bucket"], rained["shard"], rained["document"], rained["masked"]) == ("web", "00000-000", 0, 0)
    assert (rained["first"], rained["last"], rained["document_tokens"]) == (0, 18, 18)


def test_show_prints_the_same_sample_for_a_config_and_a_folder(unbroken: Tool, folder: Path) -> None:
    by_config = document(unbroken, "data", "show", "3", "--config", "run.yaml")
    by_folder = document(unbroken, "data", "show", "3", "data", "--max-length", "64", "--overlap-size", "8")
    assert by_config == by_folder
    assert document(unbroken, "data", "show", "3", "data", "--seed", "7", "--max-length", "64")["sample"] == 3


def test_without_a_tokenizer_the_ids_are_shown(unbroken: Tool, folder: Path) -> None:
    found = document(unbroken, "data", "show", "0", "foreign", "--max-length", "64")
    assert found["windows"][0]["text"] is None
    assert found["windows"][0]["tokens"][-1] == 256
    assert " 256" in unbroken("data", "show", "0", "foreign", "--max-length", "64", "--whole").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["inspect", "nowhere"], 2, "path-missing"),
        (["inspect", "."], 4, "data-missing"),
        (["verify", "run.yaml"], 2, "path-missing"),
        (["stats"], 2, "bad-usage"),
        (["stats", "data", "--config", "run.yaml"], 2, "bad-usage"),
        (["stats", "data", "--max-length", "8", "--overlap-size", "5"], 2, "bad-usage"),
        (["stats", "data", "--split", "test"], 4, "data-missing"),
        (["show", "99999", "data"], 2, "bad-usage"),
        (["show", "-1", "data"], 2, "bad-usage"),
        (["show", "0", "foreign", "--tokenizer", "nowhere.json"], 2, "tokenizer-unknown"),
        (["seal", "nowhere"], 2, "path-missing"),
        (["inspct", "data"], 2, "unknown-command"),
    ],
)
def test_a_mistake_is_reported_in_a_few_lines(
    unbroken: Tool, folder: Path, arguments: list[str], code: int, kind: str
) -> None:
    ended = unbroken("data", *arguments)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.startswith(f"error[{kind}]: ")
    assert len(ended.stderr.splitlines()) <= 8


def test_the_group_alone_shows_its_help_and_says_by_its_code_that_nothing_was_done(unbroken: Tool) -> None:
    ended = unbroken("data")
    assert ended.returncode == 2
    assert all(name in ended.stdout for name in ("inspect", "stats", "show", "verify", "seal"))


def test_json_may_stand_before_the_name_of_the_inner_command(unbroken: Tool, folder: Path) -> None:
    for arguments in (["--json", "data", "verify", "data"], ["data", "--json", "verify", "data"]):
        assert json.loads(unbroken(*arguments).stdout)["is_sound"]


@pytest.mark.parametrize("command", ["data inspect data", "data show 0 --config run.yaml", "validate run.yaml"])
def test_looking_at_data_never_loads_torch(folder: Path, command: str) -> None:
    program = "import sys; from unbroken.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    said = subprocess.check_output([sys.executable, "-c", program, *command.split()], cwd=folder, text=True)
    assert said.splitlines()[-1] == "False"


@pytest.mark.promise("G18")
def test_validate_says_how_far_the_data_reaches(unbroken: Tool, folder: Path) -> None:
    ended = unbroken("validate", "run.yaml")
    assert (ended.returncode, ended.stderr) == (0, "")
    data = document(unbroken, "validate", "run.yaml", "--world-size", "2")["data"]
    assert data["sequences_per_step"] == 8
    assert data["steps_available"] == sum(bucket["sequences"] for bucket in data["buckets"]) // 8
    available = document(unbroken, "validate", "run.yaml")["data"]["steps_available"]
    assert unbroken("validate", "run.yaml", f"training.max_steps={available}").returncode == 0
    too_far = document(unbroken, "validate", "run.yaml", f"training.max_steps={available + 1}", code=4)
    assert too_far["kind"] == "data-unfit" and len(too_far["details"]) == 1


@pytest.mark.promise("G18")
def test_each_flag_turns_its_problem_into_a_warning(unbroken: Tool, folder: Path) -> None:
    # 10 steps of 4 sequences of 64 tokens; code has fewer than 40.
    short = "data.curriculum=[{duration_tokens: 2560, mix: {code: 1}}]"
    strict = document(unbroken, "validate", "run.yaml", short, "training.max_steps=12", "--strict", code=4)
    one = document(unbroken, "validate", "run.yaml", short, "training.max_steps=12", "--allow-budget-mismatch", code=4)
    assert strict["kind"] == one["kind"] == "data-unfit"
    assert len(one["details"]) == 1 < len(strict["details"])
    assert "data.curriculum" in strict["details"][0] and "data.curriculum" not in one["details"][0]
    both = document(
        *(unbroken, "validate", "run.yaml", short, "training.max_steps=12"),
        *("--allow-budget-mismatch", "--allow-bucket-exhaustion"),
    )
    assert len(both["data"]["warnings"]) == 4


def test_a_cache_that_cannot_be_written_can_be_kept_elsewhere(unbroken: Tool, folder: Path) -> None:
    (folder / "data" / ".unbroken").write_text("in the way")
    ended = unbroken("data", "stats", "data", "--max-length", "64")
    assert ended.returncode == 74
    assert "data.cache_dir" in ended.stderr
    assert unbroken("explain", "data.cache_dir").returncode == 0
    assert unbroken("data", "stats", "data", "--max-length", "64", "--cache-dir", "plans").returncode == 0
    assert (folder / "plans" / "plans").is_dir()


def test_inspect_names_what_to_seal_where_some_of_it_is_sealed(unbroken: Tool, folder: Path) -> None:
    (folder / "data" / "train" / "web" / "shards.json").unlink()
    assert unbroken("data", "inspect", "data").stdout.split()[-1] == "data/train/web"
    assert unbroken("data", "seal", "data/train/web").returncode == 0
