"""The pages are true: their commands run, their links lead somewhere, the example does what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.records.journal import DURABLE, KINDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in ("build", "dist") for part in path.relative_to(ROOT).parts)
)
BLOCK = re.compile(r"^```sh run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"^```python run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
PAGES_WITH_COMMANDS = [path for path in PAGES if BLOCK.search(path.read_text())]

PAGES_WITH_PROGRAMS = [path for path in PAGES if PROGRAM.search(path.read_text())]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=shown)
def test_every_command_of_a_page_runs_in_a_fresh_folder(page: Path, tmp_path: Path) -> None:
    script = "set -euxo pipefail\n" + "\n".join(BLOCK.findall(page.read_text()))
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("page", PAGES_WITH_PROGRAMS, ids=shown)
def test_every_program_of_a_page_runs_in_a_fresh_folder_and_runs_again(page: Path, tmp_path: Path) -> None:
    program = tmp_path / "page.py"
    program.write_text("\n".join(PROGRAM.findall(page.read_text())))
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, program.name], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_readme_has_commands_that_run() -> None:
    assert ROOT / "README.md" in PAGES_WITH_COMMANDS


def test_every_link_of_a_page_leads_to_a_file() -> None:
    dead = [
        (shown(page), link)
        for page in PAGES
        for link in LINK.findall(page.read_text())
        if "://" not in link and not (page.parent / link.removeprefix("/")).exists()
    ]
    assert not dead


def test_the_page_of_the_records_lists_every_kind_of_event_and_which_are_synced() -> None:
    table = (ROOT / "docs" / "run-records.md").read_text().split("## The journal")[1].split("## ")[0]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
    is_synced = {kind: row[-1].startswith("yes") for row in rows for kind in re.findall(r"`([\w-]+)`", row[0])}
    assert set(KINDS) <= set(is_synced)
    assert {kind for kind, yes in is_synced.items() if yes} == DURABLE


def test_make_demo_runs_the_demo() -> None:
    planned = subprocess.check_output(["make", "-C", str(ROOT), "--no-print-directory", "-n", "demo"], text=True)
    assert planned.splitlines()[-1].endswith("bin/unbroken demo")
