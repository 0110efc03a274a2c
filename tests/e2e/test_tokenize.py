"""``unbroken tokenize`` and ``unbroken tokenizer train`` as people call them."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.texts import DOCUMENTS, lines, shards, texts_of, tree
from unbroken.data.corpus.catalogue import open_corpus


def unbroken(folder: Path, *arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "unbroken", *arguments],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def document(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert done.returncode == 0, done.stderr + done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text" / "web").mkdir(parents=True)
    (tmp_path / "text" / "web" / "a.jsonl").write_bytes(lines(DOCUMENTS))
    (tmp_path / "text" / "web" / "b.jsonl.gz").write_bytes(gzip.compress(lines(DOCUMENTS[:5])))
    (tmp_path / "text" / "notes.md").write_text("x")
    return tmp_path


BYTES = ("tokenize", "--input_dir", "text", "--output_dir", "data/train", "--tokenizer_path", "bytes")


@pytest.mark.promise("G12")
def test_the_report_names_the_output_and_a_second_call_finds_nothing_to_do(folder: Path) -> None:
    first = document(unbroken(folder, *BYTES, "--num_workers", "2", "--json"))
    assert (first["documents"], first["shards"], first["is_new"]) == (45, 1, True)
    assert first["unknown_files"] == ["notes.md"]
    assert texts_of(folder / "data/train/web") == [*DOCUMENTS, *DOCUMENTS[:5]]
    again = unbroken(folder, *BYTES)
    assert again.returncode == 0 and again.stdout.startswith("up to date")
    facts = document(unbroken(folder, *BYTES, "--json"))
    assert facts["schema"] == "unbroken.tokenize/1" and facts["documents"] == 45 and not facts["is_new"]


def test_a_tokenizer_of_ones_own_is_trained_and_used_with_and_without_the_engine(folder: Path) -> None:
    made = document(unbroken(folder, "tokenizer", "train", "text", "-o", "own.json", "--vocab-size", "300", "--json"))
    assert made["vocab_size"] == 300
    for output, engine in (("fast", "auto"), ("slow", "off")):
        options = ("--output-dir", output, "--tokenizer-path", "own.json", "--accelerator", engine)
        found = document(unbroken(folder, "tokenize", "--input-dir", "text", *options, "--json"))
        assert ("gigatoken" in found["engine"]) == (engine == "auto")
    assert tree(folder / "fast") == tree(folder / "slow")


def test_the_report_says_how_many_documents_were_empty(folder: Path) -> None:
    (folder / "text" / "web" / "c.jsonl").write_bytes(lines(["", "x", ""]))
    found = document(unbroken(folder, *BYTES, "--json"))
    assert (found["documents"], found["skipped"]) == (46, {"empty": 2})


def test_a_split_is_made_of_documents_and_both_sides_open(folder: Path) -> None:
    options = ("--output-dir", "data", "--tokenizer-path", "bytes", "--val-fraction", "0.2")
    facts = document(unbroken(folder, "tokenize", "--input-dir", "text", *options, "--json"))
    counts = [open_corpus(folder / "data", split).buckets[0].entries for split in ("train", "val")]
    assert sum(counts) == facts["documents"] == 45 and min(counts) > 0


def test_windows_are_baked_only_when_that_is_requested(folder: Path) -> None:
    refused = unbroken(folder, *BYTES, "--max_length", "16")
    assert refused.returncode == 2 and "--bake-windows" in refused.stderr
    assert unbroken(folder, *BYTES, "--bake-windows").returncode == 2
    assert unbroken(folder, *BYTES, "--bake-windows", "--max-length", "16", "--overlap-size", "9").returncode == 2
    refused = unbroken(folder, *BYTES, "--bake-windows", "--max-length", "16", "--overlap-probability", "0.5")
    assert refused.returncode == 2 and "--probabilistic-overlap" in refused.stderr
    assert not (folder / "data").exists()
    baked = unbroken(folder, *BYTES, "--bake_windows", "--max_length", "16", "--overlap_size", "4")
    assert baked.returncode == 0, baked.stderr
    assert shards(folder / "data")


@pytest.mark.parametrize("value", ["0", "1", "-0.5", "x", "1/0"])
def test_a_share_that_is_none_is_refused(value: str, folder: Path) -> None:
    done = unbroken(folder, *BYTES, f"--val-fraction={value}")
    assert done.returncode == 2 and "--val-fraction" in done.stderr


def test_bad_input_is_reported_with_what_helps_and_never_with_a_traceback(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "text" / "web" / "c.jsonl").write_bytes(b'{"txt": "x"}\n')
    (folder / "blank").mkdir()
    (folder / "blank" / "a.jsonl").write_bytes(lines(["", ""]))
    (folder / "cut").mkdir()
    (folder / "cut" / "a.jsonl.gz").write_bytes(gzip.compress(lines(DOCUMENTS))[:-9])
    into = ("--output_dir", "out", "--tokenizer_path")
    cases = {
        ("--input_dir", "absent", *into, "bytes"): (2, "path-missing"),
        ("--input_dir", "empty", *into, "bytes"): (4, "no-text-found"),
        ("--input_dir", "blank", *into, "bytes"): (4, "no-tokens"),
        ("--input_dir", "cut", *into, "bytes"): (4, "source-broken"),
        ("--input_dir", "text", *into, "absent/tokenizer.json"): (2, "tokenizer-unknown"),
        ("--input_dir", "text", *into, "notes.md"): (2, "tokenizer-unknown"),
        ("--input_dir", "text", "--output_dir", "out2", "--tokenizer_path", "bytes"): (4, "bad-documents"),
    }
    for arguments, (code, kind) in cases.items():
        done = unbroken(folder, "tokenize", *arguments, HF_HUB_OFFLINE="1")
        assert (done.returncode, f"error[{kind}]" in done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr and "  help " in done.stderr
    assert "web/c.jsonl:1:" in done.stderr and "'text'" in done.stderr
    assert "--skip-bad" in done.stderr


def test_a_name_that_the_hub_does_not_give_names_the_ways_out(folder: Path) -> None:
    done = unbroken(folder, "tokenize", "--input_dir", "text", "--output_dir", "out", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert done.stderr.startswith("error[tokenizer-unknown]") and "'bytes'" in done.stderr
    assert not (folder / "out").exists()


def test_tokenizing_never_loads_torch(folder: Path) -> None:
    script = (
        "import sys; from unbroken.cli.main import main\n"
        f"code = main({list(BYTES)!r})\n"
        "import unbroken.data.ingest.worker_process\n"
        "assert code == 0 and 'torch' not in sys.modules, sorted(m for m in sys.modules if 'torch' in m)[:5]"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
