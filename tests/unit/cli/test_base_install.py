"""A base install has neither torch nor numpy: each command works, or names the extra that it needs."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from unbroken.cli import data, model_options, slurm, tokenizer
from unbroken.cli.commands import COMMANDS
from unbroken.cli.main import TRAIN_PACKAGES
from unbroken.gpt.device import DTYPES

ROOT = Path(__file__).resolve().parents[3]
EXTRA = "pip install 'unbroken[train]'"
TABLES = {"data": data.TABLE, "slurm": slurm.TABLE, "tokenizer": tokenizer.TABLE}
NEED_THE_EXTRA = {
    "tokenize", "tokenizer train", "data inspect", "data stats", "data show", "data verify", "data seal", "train",
    "import", "evaluate", "generate", "batch-generate", "export", "demo", "doctor",
}  # fmt: skip
# Words after which a command has all it needs but packages.
WORDS = {
    "tokenize": ["--input-dir", "text", "--output-dir", "data"],
    "tokenizer train": ["text", "-o", "t.json"],
    "data show": ["0", "text"],
    "train": ["run.yaml"],
    "validate": ["run.yaml"],
    "import": ["theirs.pt", "run"],
    "evaluate": ["run"],
    "generate": ["run", "--prompt", "a"],
    "batch-generate": ["--input", "prompts.jsonl", "--output-dir", "run"],
    "export": ["run", "-o", "out"],
    "prove": ["--", "python", "train.py"],
    "replay": ["run", "1"],
    "demo": [],
    "plan": ["run.yaml"],
}
SCRIPT = """
import contextlib, io, json, sys
from unbroken.cli.main import main

found = {}
for name, words in json.loads(sys.stdin.read()).items():
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([*name.split(), *words])
    found[name] = [code, said.getvalue()]
print(json.dumps(found))
"""
# What `pip install unbroken` brings, with what those packages need themselves.
INSTALLED = ("click", "rich", "yaml", "xxhash", "markdown_it", "mdurl", "pygments", "unbroken")


def _names() -> list[str]:
    plain = [name for name in COMMANDS if name not in TABLES]
    return plain + [f"{group} {name}" for group, table in TABLES.items() for name in table]


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Every command, and its help, in one process that finds only a base install: exit code and output."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "text" / "train").mkdir(parents=True)
    (folder / "text" / "train" / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "train.py").write_text("")
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run.yaml").write_text("model: {vocab_size: 384}\ndata: {path: text, format: jsonl, tokenizer: bytes}\n")
    site = tmp_path_factory.mktemp("site")
    for package in INSTALLED:
        (site / package).symlink_to(Path(find_spec(package).origin).parent)  # type: ignore[union-attr, arg-type]
    words = {name: WORDS.get(name, ["text"]) for name in _names()}
    words |= {f"{name} --help": [] for name in _names()}
    ended = subprocess.run(
        [sys.executable, "-S", "-c", SCRIPT], env={"PYTHONPATH": str(site), "PATH": os.environ["PATH"]},
        input=json.dumps(words), cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return {name: (code, said) for name, (code, said) in json.loads(ended.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("name", _names())
def test_a_command_works_or_names_the_extra(name: str, called: dict[str, tuple[int, str]]) -> None:
    code, said = called[name]
    assert "error[internal-error]" not in said and "Traceback" not in said, said
    assert (EXTRA in said) == (name in NEED_THE_EXTRA), said
    # `doctor` checks what it can without it, and says that it is missing among its findings.
    assert code == (3 if name == "doctor" else 2) or name not in NEED_THE_EXTRA


@pytest.mark.parametrize("name", [name for name in _names() if not name.startswith("data ")])
def test_the_help_of_a_command_loads_neither_torch_nor_numpy(name: str, called: dict[str, tuple[int, str]]) -> None:
    code, said = called[f"{name} --help"]
    assert code == 0 and said.startswith(f"Usage: unbroken {name}"), said


def test_the_types_of_weights_in_the_help_are_those_that_can_be_loaded() -> None:
    assert set(model_options.DTYPES) == set(DTYPES)


def test_the_extra_is_what_the_package_declares() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    assert {each.partition(">")[0] for each in declared} == TRAIN_PACKAGES
