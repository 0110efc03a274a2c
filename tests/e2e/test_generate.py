"""``generate`` and ``batch-generate`` as processes: what they print, what they write, how they end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import Tool
from tests.unit.gpt.runs import damage, save_averaged, save_run, train_bpe
from unbroken.gpt.checkpoint import find_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.promise("G22")
def test_a_prompt_is_continued_and_printed_as_json(run: Path, unbroken: Tool, forked_unbroken: Tool) -> None:
    words = ("generate", "run", "--prompt", "def ", "--max-new-tokens", "8", "--seed", "3")
    ended = unbroken(*words, "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["schema"] == "unbroken.generate/2" and found["step"] == 2
    (said,) = found["texts"]
    assert (said["prompt"], said["prompt_tokens"]) == ("def ", 4)
    plain = forked_unbroken(*words, "--return-full-text")
    # A terminal gets controls spelled out; --json has them exactly.
    assert plain.stdout.split() == ("def " + said["text"]).split()
    again = forked_unbroken(
        "generate", "--output-dir", "run", *words[2:], "--device", "cpu", "--dtype", "fp32", "--json"
    )
    assert json.loads(again.stdout)["texts"] == [said]
    by_path = forked_unbroken("generate", "--checkpoint", "run/checkpoints/checkpoint-1", *words[2:], "--json")
    assert json.loads(by_path.stdout)["step"] == 1


def test_every_line_of_a_file_is_a_prompt_of_its_own(run: Path, forked_unbroken: Tool, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    ended = forked_unbroken("generate", "run", "--prompts-file", "prompts.txt", "--output", "texts.jsonl", "--greedy")
    assert ended.returncode == 0, ended.stderr
    records = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [record["prompt"] for record in records] == ["one", "two"]
    alone = json.loads(forked_unbroken("generate", "run", "--prompt", "two", "--greedy", "--json").stdout)
    assert alone["texts"] == records[1:]


BAD: dict[str, tuple[list[str], int, str]] = {
    "no model": (["--prompt", "x"], 2, "bad-usage"),
    "two models": (["run", "--output-dir", "other", "--prompt", "x"], 2, "bad-usage"),
    "no prompt": (["run"], 2, "bad-usage"),
    "two prompts": (["run", "--prompt", "x", "--prompts-file", "prompts.txt"], 2, "bad-usage"),
    "empty prompt": (["run", "--prompt", ""], 2, "generation-invalid"),
    "long prompt": (["run", "--prompt", "x" * 60], 2, "sequence-too-long"),
    "too many tokens": (["run", "--prompt", "x", "--max-new-tokens", "60"], 2, "sequence-too-long"),
    "temperature": (["run", "--prompt", "x", "--temperature", "0"], 2, "generation-invalid"),
    "top-p": (["run", "--prompt", "x", "--top-p", "1.5"], 2, "generation-invalid"),
    "not a number": (["run", "--prompt", "x", "--top-k", "many"], 2, "bad-usage"),
    "dtype": (["run", "--prompt", "x", "--dtype", "fp8"], 2, "bad-usage"),
    "device": (["run", "--prompt", "x", "--device", "cuda:97"], 2, "device-missing"),
    "tokenizer": (["run", "--prompt", "x", "--tokenizer", "bpe/tokenizer.json"], 2, "wrong-tokenizer"),
    "no tokenizer": (["run", "--prompt", "x", "--tokenizer", "no/tokenizer.json"], 2, "tokenizer-unknown"),
    "no run": (["nothing", "--prompt", "x"], 2, "path-missing"),
    "no step": (["run@9", "--prompt", "x"], 2, "checkpoint-unknown"),
    "no checkpoints": (["empty", "--prompt", "x"], 5, "no-usable-checkpoint"),
    "no prompts": (["run", "--prompts-file", "nothing.txt"], 2, "path-missing"),
    "no place": (["run", "--prompt", "x", "--output", "no/such/place.jsonl"], 2, "path-missing"),
}


def test_what_cannot_be_generated_is_reported_in_a_few_lines(run: Path, forked_unbroken: Tool, tmp_path: Path) -> None:
    train_bpe(tmp_path / "bpe")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "prompts.txt").write_text("x\n")
    for name, (words, code, kind) in BAD.items():
        ended = forked_unbroken("generate", *words)
        assert ended.returncode == code, f"{name}: {ended.stderr}"
        assert ended.stderr.startswith(f"error[{kind}]: "), f"{name}: {ended.stderr}"
        assert len(ended.stderr.splitlines()) <= 8 and "Traceback" not in ended.stderr


def test_every_prompt_that_is_too_long_is_named_with_its_line(run: Path, forked_unbroken: Tool, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text(f"x\n\n{'y' * 60}\nz\n{'x' * 70}\n")
    ended = forked_unbroken("generate", "run", "--prompts-file", "prompts.txt")
    assert ended.returncode == 2 and ended.stderr.startswith("error[batch-invalid]: "), ended.stderr
    assert [word for word in ended.stderr.split() if word.startswith("prompts.txt:")] == [
        "prompts.txt:3",
        "prompts.txt:5",
    ]
    assert ended.stdout == ""


def test_a_damaged_checkpoint_never_generates_and_an_unnamed_one_falls_back_to_the_older(
    run: Path, forked_unbroken: Tool, tmp_path: Path
) -> None:
    damage(find_model(str(run)).path)
    ended = forked_unbroken("generate", "run@2", "--prompt", "x")
    assert ended.returncode == 3 and ended.stderr.startswith("error[damaged-checkpoint]: "), ended.stderr
    assert ended.stdout == ""
    words = (["generate", "--prompt", "x"], ["export", "--output", "x.pt"], ["batch-generate", "--input", "in.jsonl"])
    write(tmp_path / "in.jsonl", {"prompt": "x"})
    for command, *rest in words:
        ended = forked_unbroken(command, "run", *rest)
        assert ended.returncode == 0, ended.stderr
        first, second = ended.stderr.splitlines()
        assert "final" in first and "checkpoint-1" in second
    results = json.loads(forked_unbroken("generate", "run", "--prompt", "x", "--json").stdout)
    [over] = results.pop("skipped_checkpoints")
    assert over["name"] == "final" and over["reason"]
    older = json.loads(forked_unbroken("generate", "run@1", "--prompt", "x", "--json").stdout)
    assert older == {**results, "skipped_checkpoints": []}


def test_the_average_of_the_weights_answers_where_it_is_requested(forked_unbroken: Tool, tmp_path: Path) -> None:
    average = save_averaged(tmp_path / "run")
    ended = forked_unbroken("generate", "run", "--prompt", "def ", "--ema", "--greedy", "--json")
    assert ended.returncode == 0, ended.stderr
    ended = forked_unbroken("export", "run", "--output", "average.pt", "--ema", "--json")
    assert ended.returncode == 0 and json.loads(ended.stdout)["is_averaged"], ended.stderr
    written = torch.load(tmp_path / "average.pt", weights_only=True)
    assert all(torch.equal(written[name], average[name]) for name in average)
    ended = forked_unbroken("export", "run@1", "--output", "none.pt", "--ema")
    assert ended.returncode == 2 and ended.stderr.startswith("error[no-average]: "), ended.stderr
    assert not (tmp_path / "none.pt").exists()


def test_an_incomplete_newest_checkpoint_is_skipped_with_a_note(run: Path, forked_unbroken: Tool) -> None:
    newest = find_model(str(run)).path
    next((newest / "state").glob("*.distcp")).unlink()
    ended = forked_unbroken("generate", "run", "--prompt", "x", "--greedy")
    assert ended.returncode == 0
    assert ended.stderr.startswith(f"skipped {newest.name}: ")


def write(path: Path, *records: object) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.promise("G22")
def test_a_batch_asks_two_models_and_answers_in_the_order_of_the_prompts(
    run: Path, forked_unbroken: Tool, tmp_path: Path
) -> None:
    save_run(tmp_path / "other", tokenizer=str(train_bpe(tmp_path / "bpe")), steps=1)
    own = {"model": {"output_dir": "other", "dtype": "bf16"}, "generation": {"greedy": True, "max_new_tokens": 3}}
    write(tmp_path / "in.jsonl", {"prompt": "a", "id": "first"}, {"prompt": "def", **own}, {"prompt": "b"})
    words = ("batch-generate", "run", "--input", "in.jsonl", "--max-new-tokens", "5")
    dry = forked_unbroken(*words, "--output", "out.jsonl", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert not (tmp_path / "out.jsonl").exists()
    ended = forked_unbroken(*words, "--output", "out.jsonl")
    assert ended.returncode == 0, ended.stderr
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["prompt"] for record in records] == ["a", "def", "b"]
    assert records[0]["id"] == "first" and records[1]["checkpoint"].startswith("other/")
    printed = forked_unbroken(*words)
    assert [json.loads(line) for line in printed.stdout.splitlines()] == records
    assert json.loads(forked_unbroken(*words, "--json").stdout)["records"] == records


def test_a_bad_record_is_named_with_its_line_and_the_old_output_stays(
    run: Path, forked_unbroken: Tool, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b", "generation": {"gredy": True}}, {"promt": "c"})
    (tmp_path / "out.jsonl").write_text("old\n")
    for flag in ("--dry-run", "--quiet"):
        ended = forked_unbroken("batch-generate", "run", "--input", "in.jsonl", "--output", "out.jsonl", flag)
        assert ended.returncode == 2 and ended.stderr.startswith("error[batch-invalid]")
        for place in ("in.jsonl:2  generation.gredy:", "in.jsonl:3  promt:"):
            assert place in ended.stderr
    assert (tmp_path / "out.jsonl").read_text() == "old\n"
    same = forked_unbroken("batch-generate", "run", "--input", "in.jsonl", "--output", "in.jsonl")
    assert same.returncode == 2 and same.stderr.startswith("error[bad-usage]") and "--output" in same.stderr


def test_a_record_whose_model_has_no_whole_checkpoint_has_the_error_and_the_exit_code(
    run: Path, forked_unbroken: Tool, tmp_path: Path
) -> None:
    save_run(tmp_path / "other", steps=1)
    damage(find_model(str(tmp_path / "other")).path)
    write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b", "model": {"output_dir": "other"}})
    ended = forked_unbroken("batch-generate", "run", "--input", "in.jsonl", "--output", "out.jsonl")
    assert ended.returncode == 5
    good, bad = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert good["error"] is None and good["text"]
    assert bad["text"] is None and bad["error"]["kind"] == "no-usable-checkpoint"


KILLED_AT_THE_SEVENTH = """
import os, signal, sys
from unbroken.cli.main import main
from unbroken.gpt.text import TextModel

continue_text, so_far = TextModel.continue_text, iter(range(6))

def continue_or_die(model, *words):
    if next(so_far, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return continue_text(model, *words)

TextModel.continue_text = continue_or_die
main(sys.argv[1:])
"""


@pytest.mark.promise("G22")
def test_a_batch_that_is_killed_leaves_the_old_output(run: Path, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", *({"prompt": f"prompt {number}"} for number in range(9)))
    (tmp_path / "out.jsonl").write_text("old\n")
    words = ("batch-generate", "run", "--input", "in.jsonl", "--output", "out.jsonl")
    ended = subprocess.run(
        [sys.executable, "-c", KILLED_AT_THE_SEVENTH, *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / "out.jsonl").read_text() == "old\n"
