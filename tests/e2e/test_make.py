"""The commands of the Makefile, and an installation that never pulls CUDA packages onto a machine without a GPU."""

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make_wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """A wheel with nothing in it but its name and what it needs."""
    info = f"{name}-{version}.dist-info"
    metadata = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        *(f"Requires-Dist: {need}" for need in needs),
    ]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with the installer and constraints, wheels to choose from, and the few commands the installer uses."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    (tmp_path / "wheels").mkdir()
    make_wheel(tmp_path / "wheels", "torch", "2.13.0", "nvidia-cublas")
    make_wheel(tmp_path / "wheels", "nvidia_cublas", "13.0")
    (tmp_path / "bin").mkdir()
    for name in ("bash", "env", "grep", "cat"):
        os.symlink(shutil.which(name) or name, tmp_path / "bin" / name)
    return tmp_path


def install(machine: Path) -> "subprocess.CompletedProcess[str]":
    env = {
        "PATH": str(machine / "bin"),
        "PYTHON": sys.executable,
        "HOME": str(machine),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(machine / "wheels"),
    }
    command = ["bash", "tools/install.sh", "venv"]
    return subprocess.run(command, cwd=machine, env=env, capture_output=True, text=True, check=False)


def installed(machine: Path) -> set[str]:
    [packages] = (machine / "venv" / "lib").glob("python*/site-packages")
    return {path.name.partition("-")[0] for path in packages.glob("*.dist-info")} - {"pip", "setuptools"}


def test_without_a_gpu_cuda_packages_are_refused_before_anything_is_installed(machine: Path) -> None:
    ended = install(machine)
    assert ended.returncode == 1
    assert "no GPU" in ended.stderr
    assert "PIP_FIND_LINKS" in ended.stderr
    assert installed(machine) == set()


def test_without_a_gpu_the_cpu_wheel_is_taken_where_pip_knows_of_one(machine: Path) -> None:
    make_wheel(machine / "wheels", "torch", "2.13.0+cpu")
    install(machine)
    assert installed(machine) == {"torch"}


def test_with_a_gpu_the_cuda_packages_are_wanted(machine: Path) -> None:
    (machine / "bin" / "nvidia-smi").symlink_to("/bin/true")
    install(machine)
    assert installed(machine) == {"torch", "nvidia_cublas"}


def test_make_alone_names_its_commands_and_does_nothing(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    said = subprocess.check_output(["make", "-C", str(tmp_path), "--no-print-directory"], text=True)
    assert [line.split()[1] for line in said.splitlines()] == ["demo", "test", "test-deep"]
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]


def test_ci_runs_both_tiers_and_together_they_are_all_tests() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    calls = (ROOT / ".ci" / "run").read_text().splitlines()[-2:]
    assert [shlex.split(call)[:2] for call in calls] == [["make", "test"], ["make", "test-deep"]]
    command = ["make", "-n", "-C", str(ROOT), "test", "test-deep"]
    said = subprocess.check_output(command, text=True)
    ran = [shlex.split(line) for line in said.splitlines() if "/pytest " in line]
    assert [words[-2:] for words in ran] == [["--tier", "quick"], ["--tier", "deep"]]
    assert ran[0][:-1] == ran[1][:-1]  # and nothing else tells them apart: no path, no expression


def test_no_file_of_the_installation_names_a_package_index() -> None:
    """Which index pip asks is the user's setting; the only addresses are those of the project itself."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    for name in (
        "Makefile", "constraints.txt", "pyproject.toml", "setup.py", "tools/install.sh", "tools/system_packages.sh"
    ):  # fmt: skip
        text = (ROOT / name).read_text()
        assert text.count("://") == (len(urls) if name == "pyproject.toml" else 0), name
