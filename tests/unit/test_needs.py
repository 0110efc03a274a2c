"""A test whose needs are not met skips with the package's name, and fails on CI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
SETTINGS = "[pytest]\nmarkers =\n    needs(*packages): what it cannot run without\n"


def outcome(tmp_path: Path, need: str, *, ci: str, path: str) -> tuple[int, str]:
    """Run one test that asks for ``need`` where only ``path`` is searched for commands."""
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text().replace("/usr/sbin:/sbin", path))
    test = f"import pytest\n\n@pytest.mark.needs({need!r})\ndef test_it() -> None: ...\n"
    (tmp_path / "test_needy.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "test_needy.py"]
    env = {**os.environ, "CI": ci, "PATH": path, "PYTHONPATH": str(CONFTEST.parents[1])}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout


@pytest.mark.parametrize(("need", "package"), [("strace", "strace"), ("xfsprogs", "xfsprogs"), ("loop", "mount")])
def test_an_unmet_need_is_a_skip_that_names_the_package(tmp_path: Path, need: str, package: str) -> None:
    code, said = outcome(tmp_path, need, ci="", path=str(tmp_path))
    assert code == 0
    assert "1 skipped" in said
    assert f"Debian package {package}" in said


def test_an_unmet_need_is_a_failure_on_ci(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, "xfsprogs", ci="true", path=str(tmp_path))
    assert code == 1
    assert "CI must have it" in said


def test_a_need_that_is_met_runs_the_test(tmp_path: Path) -> None:
    command = tmp_path / "mkfs.xfs"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    code, said = outcome(tmp_path, "xfsprogs", ci="true", path=str(tmp_path))
    assert code == 0
    assert "1 passed" in said


def test_an_unknown_need_is_a_failure(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, "magic", ci="", path=str(tmp_path))
    assert code == 1
    assert "no such need: 'magic'" in said


@pytest.mark.parametrize(
    "test",
    [
        "pytest.importorskip('no_such_package')\ndef test_it() -> None: ...\n",
        "def test_it() -> None:\n    pytest.importorskip('no_such_package')\n",
    ],
    ids=["a file", "a test"],
)
def test_a_package_that_is_not_installed_is_a_skip_and_a_failure_on_ci(tmp_path: Path, test: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "test_it.py").write_text(f"import pytest\n\n{test}")
    for ci, code in (("", 0), ("true", 1)):
        command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "test_it.py"]
        env = {**os.environ, "CI": ci, "PYTHONPATH": str(CONFTEST.parents[1])}
        ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        # A file without tests is 5 where it is skipped.
        assert (ended.returncode in (0, 5)) is (code == 0), ended.stdout
        assert ("CI must have it" in ended.stdout) is bool(ci), ended.stdout
