"""``export`` as a process, and its files as other programs read them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import Tool
from tests.unit.gpt.runs import damage, save_run, train_bpe
from unbroken.config import ModelConfig
from unbroken.gpt.checkpoint import find_model
from unbroken.gpt.text import TextFinder

READ_PT = """
import json, sys, torch
state = torch.load(sys.argv[1], weights_only=True)
assert not any(name.startswith("unbroken") for name in sys.modules)
print(json.dumps({name: [str(t.dtype), float(t.double().sum())] for name, t in state.items()}))
"""


@pytest.mark.promise("G22", "G5", "M7")
def test_a_pt_file_loads_in_a_process_that_knows_nothing_of_us(unbroken: Tool, tmp_path: Path) -> None:
    model = save_run(tmp_path / "run")
    ended = unbroken("export", "run", "--output", "weights.pt")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("exported  weights.pt  torch, ")
    said = subprocess.check_output([sys.executable, "-I", "-c", READ_PT, "weights.pt"], cwd=tmp_path, text=True)
    expected = {name: [str(t.dtype), float(t.double().sum())] for name, t in model.state_dict().items()}
    assert json.loads(said) == expected


@pytest.mark.promise("G22")
def test_safetensors_hold_the_step_that_was_named_in_the_type_that_was_requested(
    forked_unbroken: Tool, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    model = save_run(tmp_path / "run")
    found = json.loads(
        forked_unbroken("export", "run@1", "--output", "w.safetensors", "--dtype", "bf16", "--json").stdout
    )
    assert (found["schema"], found["step"], found["format"]) == ("unbroken.export/2", 1, "safetensors")
    state = load_file(tmp_path / "w.safetensors")
    assert set(state) == set(model.state_dict())
    assert torch.equal(state["norm.weight"], (model.norm.weight - 0.25).bfloat16())


@pytest.mark.promise("G22")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_transformers_loads_the_folder_with_its_tokenizer_and_gives_equal_logits(
    forked_unbroken: Tool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = save_run(tmp_path / "run", tokenizer=str(train_bpe(tmp_path / "bpe")))
    ended = forked_unbroken("export", "run", "--output", "llama", "--format", "huggingface")
    assert ended.returncode == 0, ended.stderr
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "llama")
    vocabulary = TextFinder.find(str(tmp_path / "run")).vocabulary
    text = "def first(numbers):\n    return  ünïcode"
    assert tokenizer(text)["input_ids"] == vocabulary.encode(text)
    assert tokenizer.decode(vocabulary.encode(text)) == text
    assert tokenizer.eos_token_id == vocabulary.identity.eod_id
    ids = torch.tensor([vocabulary.encode(text)[:40]])
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, model(ids))


def test_an_export_of_byte_ids_says_that_no_tokenizer_is_written(forked_unbroken: Tool, tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    ended = forked_unbroken("export", "run", "--output", "llama")
    assert ended.returncode == 0
    assert not (tmp_path / "llama" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["eos_token_id"] == 256


def test_what_stands_there_is_replaced_only_by_force_and_only_if_an_export_wrote_it(
    forked_unbroken: Tool, tmp_path: Path
) -> None:
    save_run(tmp_path / "run")
    for target in ("w.pt", "llama"):
        assert forked_unbroken("export", "run@1", "--output", target).returncode == 0
        refused = forked_unbroken("export", "run", "--output", target)
        assert refused.returncode == 2 and refused.stderr.startswith("error[would-overwrite]: "), refused.stderr
        assert f"--output {target} --force" in refused.stderr
        assert forked_unbroken("export", "run", "--output", target, "--force").returncode == 0
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    assert torch.equal(
        state["norm.weight"], find_model(str(tmp_path / "run")).load(torch.device("cpu")).model.norm.weight
    )
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    for words in (("--output", "thesis"), ("-o", "thesis", "--force")):
        refused = forked_unbroken("export", "run", *words, "--json")
        complaint = json.loads(refused.stdout)
        assert (refused.returncode, complaint["kind"], complaint["at"]) == (2, "would-overwrite", "thesis")
        assert [each["command"] for each in complaint["help"]] == ["unbroken export run --output thesis/export"]
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"
    # A folder and a file do not take each other's place, and what would be refused is refused before a model is read.
    (tmp_path / "empty.pt").mkdir()
    (tmp_path / "export-empty.pt").touch()
    refused = forked_unbroken("export", "nothing", "--output", "empty.pt", "--force")
    assert "error[would-overwrite]" in refused.stderr and "export-empty-2.pt" in refused.stderr
    (tmp_path / "notes").write_text("mine")
    refused = forked_unbroken("export", "run", "--output", "notes", "--force")
    assert refused.stderr.startswith("error[would-overwrite]")
    assert (tmp_path / "notes").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert forked_unbroken("export", "run", "-o", "empty").stderr.startswith("error[would-overwrite]")
    assert forked_unbroken("export", "run", "-o", "empty", "--force").returncode == 0
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_cannot_be_exported_is_reported_in_a_few_lines(forked_unbroken: Tool, tmp_path: Path) -> None:
    save_run(tmp_path / "run", steps=1)
    save_run(
        tmp_path / "other",
        steps=1,
        config=ModelConfig(n_embd=32, n_layer=1, n_head=2, n_positions=48, norm="layernorm"),
    )
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    cases = [
        (["run"], 2, "bad-usage"),
        (["run", "--output", "w.pt", "--format", "safetensors"], 2, "bad-usage"),
        (["nothing", "--output", "w.pt"], 2, "path-missing"),
        (["empty", "--output", "w.pt"], 5, "no-usable-checkpoint"),
        (["run@5", "--output", "w.pt"], 2, "checkpoint-unknown"),
        (["other", "--output", "llama"], 2, "not-expressible"),
        (["run", "--output", "llama", "--tokenizer", "no/tokenizer.json"], 2, "tokenizer-unknown"),
    ]
    for words, code, kind in cases:
        ended = forked_unbroken("export", *words)
        assert ended.returncode == code, f"{words}: {ended.stderr}"
        assert ended.stderr.startswith(f"error[{kind}]: "), f"{words}: {ended.stderr}"
    damage(find_model(str(tmp_path / "run")).path)
    ended = forked_unbroken("export", "run", "--output", "w.pt")
    assert ended.returncode == 5 and ended.stderr.startswith("error[no-usable-checkpoint]: ")
    assert not [path.name for path in tmp_path.iterdir() if path.name in ("w.pt", "llama")]
