"""The size checker sees what is too long, and the project is not."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.sizes import FILE_LINES, FUNCTION_LINES, findings, long_files

ROOT = Path(__file__).resolve().parents[2]


def function_of(lines: int) -> str:
    return "def long() -> None:\n" + "    pass\n" * (lines - 1)


def test_every_function_of_the_project_is_short_enough() -> None:
    assert list(findings(ROOT)) == []


@pytest.mark.parametrize("folder", ["src", "tests", "bench", "tools", "examples"])
def test_a_long_file_is_named_and_allowed(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "long.py").write_text("x = 1\n" * (FILE_LINES + 1))
    assert list(long_files(tmp_path)) == [f"{folder}/long.py: 401 lines; is it one idea?"]
    assert list(findings(tmp_path)) == []


def test_a_function_that_is_too_long_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    text = "class A:\n    x = 1\n\n\n" + function_of(FUNCTION_LINES + 1).replace("def", "async def")
    (tmp_path / "src" / "long.py").write_text(text)
    assert list(findings(tmp_path)) == ["src/long.py:5: long has 61 lines, 60 are allowed"]


def test_exactly_the_limit_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    rest = "x = 1\n" * (FILE_LINES - FUNCTION_LINES)
    (tmp_path / "src" / "full.py").write_text(function_of(FUNCTION_LINES) + rest)
    assert [*findings(tmp_path), *long_files(tmp_path)] == []


def test_the_command_exits_by_what_it_finds(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    command = [sys.executable, str(ROOT / "tools" / "sizes.py"), str(tmp_path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    (tmp_path / "src" / "long.py").write_text(function_of(FUNCTION_LINES + 1))
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
