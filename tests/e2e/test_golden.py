"""What every command prints, compared with one golden file per command; see ``tests/e2e/golden.py``."""

import subprocess
import sys
from pathlib import Path

from tests.e2e.golden import FOLDER, names, path_of

REPOSITORY = Path(__file__).parents[2]
REFRESH = "after a change of wording: python -m tests.e2e.golden --write"


def test_every_command_prints_what_its_golden_file_says(tmp_path: Path) -> None:
    # In a process of its own: the commands are called as functions, and other tests leave loggers and modules behind.
    command = [sys.executable, "-m", "tests.e2e.golden", "--write", str(tmp_path / "today")]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    today = {path.name: path.read_text().splitlines() for path in (tmp_path / "today").iterdir()}
    golden = {path.name: path.read_text().splitlines() for path in FOLDER.iterdir()}
    assert today == golden, REFRESH


def test_every_golden_file_belongs_to_a_command() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {path_of(name).name for name in names()}
