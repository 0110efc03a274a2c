"""The layer rules hold, and each of them turns red when it is broken on purpose."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINTER = Path(sys.executable).parent / "lint-imports"

ORDER = "a package imports only what stands below it here"
TORCH_LINE = "above the torch line nothing imports torch or numpy"
CONFIG = "the config knows errors, files and amounts, and no store and no run"
MESSAGES = "a message is made without files, click or rich"
SPEAKERS = "only the command line speaks click and rich"

# Where something is planted, what, and the rule that must notice.
BREACHES = [
    ("store/__init__.py", "import unbroken.cli", ORDER),
    ("quoting/amounts.py", "from unbroken import errors", ORDER),
    ("errors/tree.py", "def late() -> None:\n    import unbroken.files", ORDER),
    ("records/__init__.py", "import unbroken.config", ORDER),
    ("cli/output.py", "import unbroken.testing", TORCH_LINE),
    ("helpers.py", '"""A module that nobody gave a place."""', ORDER),
    ("store/__init__.py", "import torch", TORCH_LINE),
    ("report/table.py", "def late() -> None:\n    import numpy", TORCH_LINE),
    ("config/__init__.py", "import unbroken.store", CONFIG),
    ("config/fields.py", "from unbroken.disk import LocalDisk", CONFIG),
    ("errors/usage.py", "import click", MESSAGES),
    ("store/__init__.py", "import rich.console", SPEAKERS),
]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the source and its rules."""
    shutil.copytree(ROOT / "src" / "unbroken", tmp_path / "src" / "unbroken")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(house: Path) -> tuple[int, str]:
    """The linter's verdict on a copy, not on the package that is installed."""
    env = {**os.environ, "PYTHONPATH": str(house / "src")}
    command = [str(LINTER), "--no-cache"]
    ended = subprocess.run(command, cwd=house, env=env, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout


def plant(path: Path, text: str) -> None:
    before = path.read_text() if path.exists() else ""
    path.write_text(f"{before}\n{text}\n")


def test_the_house_keeps_its_rules(house: Path) -> None:
    code, said = lint(house)
    assert code == 0, said
    assert all(f"{rule} KEPT" in said for rule in (ORDER, TORCH_LINE, CONFIG, MESSAGES, SPEAKERS))


@pytest.mark.parametrize(("place", "text", "rule"), BREACHES, ids=lambda each: each.splitlines()[-1].strip()[:40])
def test_a_breach_turns_its_rule_red(house: Path, place: str, text: str, rule: str) -> None:
    plant(house / "src" / "unbroken" / place, text)
    code, said = lint(house)
    assert code == 1
    assert f"{rule} BROKEN" in said, said
