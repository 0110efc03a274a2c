"""The package as it is published: wheel and sdist are built, and installed where nothing of this repository is."""

import email
import email.message
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages")
BUILD = "import sys, setuptools.build_meta as made; print(getattr(made, sys.argv[1])(sys.argv[2]))"

TRAINING = """
import importlib.metadata, torch, unbroken

model = torch.nn.Linear(1, 1)
with unbroken.Run("run", model=model, optimizer=torch.optim.SGD(model.parameters())) as run:
    for step in run.steps(2):
        pass
print(unbroken.__file__, importlib.metadata.version("torch"))
"""


def said_by(command: Sequence[str | Path], folder: Path, *, expected: int = 0) -> str:
    """What a command printed, or its error where it is to fail; it must end with this code."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ended = subprocess.run(list(map(str, command)), cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == expected, f"{command}: exit {ended.returncode}\n{ended.stdout}{ended.stderr}"
    return ended.stderr if expected else ended.stdout


def build(what: str, source: Path, out: Path) -> Path:
    """Build a wheel or an sdist from a folder of sources, with the setuptools of this environment."""
    out.mkdir(exist_ok=True)
    return out / said_by([sys.executable, "-c", BUILD, f"build_{what}", out], source).splitlines()[-1]


@dataclass(frozen=True)
class Dist:
    """What was built from the repository, and a wheel that was built from the sdist alone."""

    wheel: Path
    sdist: Path
    again: Path

    @property
    def metadata(self) -> email.message.Message:
        """The metadata of the wheel."""
        files = contents(self.wheel)
        return email.message_from_bytes(next(data for name, data in files.items() if name.endswith("/METADATA")))


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Dist:
    """Wheel and sdist, built from a copy: building leaves its scraps beside the sources."""
    folder = tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__", "golden")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    wheel = build("wheel", folder / "source", folder / "built")
    sdist = build("sdist", folder / "source", folder / "built")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    return Dist(wheel, sdist, build("wheel", unpacked, folder / "again"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_every_module_and_page_and_nothing_else(dist: Dist) -> None:
    names = {name for name in contents(dist.wheel) if ".dist-info/" not in name}
    suffixes = (".py", ".md", ".typed")
    ours = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*") if path.suffix in suffixes}
    assert names == {*ours, "unbroken/py.typed"}
    assert "unbroken/pages/errors/peer-lost.md" in names


def test_the_sdist_builds_the_same_wheel(dist: Dist) -> None:
    assert dist.again.name == dist.wheel.name
    assert contents(dist.again) == contents(dist.wheel)


def test_the_metadata_says_where_the_project_is_and_what_it_runs_on(dist: Dist) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    urls = dict(line.split(", ") for line in dist.metadata.get_all("Project-URL", []))
    assert urls == project["urls"] and {"Repository", "Documentation", "Changelog", "Issues"} <= urls.keys()
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)}
    assert versions <= set(dist.metadata.get_all("Classifier", []))
    assert dist.metadata["Requires-Python"] == ">=3.11"
    assert dist.metadata["License-Expression"] == "MIT"


def test_every_link_of_the_description_is_absolute_and_leads_to_a_file_of_the_repository(dist: Dist) -> None:
    assert dist.metadata["Description-Content-Type"] == "text/markdown"
    text = str(dist.metadata.get_payload())
    links = re.findall(r"\]\(([^)]+)\)", text)
    base = f"{tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['urls']['Repository']}/blob/"
    base += f"v{dist.metadata['Version']}/"
    relative = re.findall(r"\]\((?!#)([^)]+)\)", (ROOT / "README.md").read_text())
    assert [link for link in links if not link.startswith("#")] == [base + link for link in relative]
    assert all((ROOT / link.partition("#")[0]).exists() for link in relative)


# ---- installed ----


def environment(folder: Path) -> Path:
    """A virtual environment with nothing in it, not even pip."""
    said_by([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    return folder


def pip(venv: Path, *words: str | Path) -> str:
    """Run this environment's pip for another one."""
    command: list[str | Path] = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "--quiet"]
    return said_by([*command, "-c", ROOT / "constraints.txt", *words], venv)


@pytest.fixture(scope="module")
def base(dist: Dist, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it needs."""
    venv = environment(tmp_path_factory.mktemp("base") / "venv")
    try:
        pip(venv, dist.wheel)
    except AssertionError as refused:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"needs a package index: {str(refused).strip().splitlines()[-1]}")
    return venv


def test_a_base_install_works_without_torch_and_numpy(base: Path, tmp_path: Path) -> None:
    missing = "import importlib.util as u; print([m for m in ('torch', 'numpy', 'tokenizers') if u.find_spec(m)])"
    assert said_by([base / "bin" / "python", "-c", missing], tmp_path).strip() == "[]"
    (tmp_path / "step_7").mkdir()
    (tmp_path / "step_7" / "model.pt").write_bytes(b"weights")
    for command in (
        "--version", "--help", "seal step_7", "verify . --full", "ls .", "explain no-room",
        "init --preset tiny -o a.yaml",
    ):  # fmt: skip
        said_by([base / "bin" / "unbroken", *command.split()], tmp_path)


def test_a_command_that_trains_names_the_extra(base: Path, tmp_path: Path) -> None:
    said = said_by([base / "bin" / "unbroken", "generate", "run", "--prompt", "a"], tmp_path, expected=2)
    # The first of the packages that it needs.
    assert "-missing]" in said and "pip install 'unbroken[train]'" in said


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the packages of this one, torch among them, and without unbroken.

    They stand beside it, where pip sees them and removes nothing.
    """
    venv = environment(tmp_path_factory.mktemp("extra") / "venv")
    packages = venv.parent / "packages"
    packages.mkdir()
    for path in (Path(sys.prefix) / SITE).iterdir():
        if "unbroken" not in path.name:
            (packages / path.name).symlink_to(path)
    (venv / SITE / "packages.pth").write_text(f"{packages}\n")
    return venv


@pytest.mark.parametrize("words", [(), ("--upgrade",)], ids=["install", "upgrade"])
def test_the_extra_never_replaces_a_torch_that_is_there(dist: Dist, with_torch: Path, words: tuple[str, ...]) -> None:
    report = with_torch / "report.json"
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        with_torch / "bin" / "python",
        "install",
        "--quiet",
    ]
    # Without constraints, as a user does it: a newer torch may be on the index.
    said_by([*command, "--dry-run", "--report", report, *words, f"{dist.wheel}[train]"], with_torch)
    plan = json.loads(report.read_text())["install"]
    assert [each["metadata"]["name"] for each in plan] == ["unbroken"]


def test_with_the_extra_what_is_installed_trains(dist: Dist, with_torch: Path, tmp_path: Path) -> None:
    pip(with_torch, f"{dist.wheel}[train]")
    (tmp_path / "train.py").write_text(TRAINING)
    ours, torch = said_by([with_torch / "bin" / "python", "train.py"], tmp_path).split()[-2:]
    assert Path(ours).is_relative_to(with_torch)
    assert torch == version("torch")
    assert json.loads(said_by([with_torch / "bin" / "unbroken", "outcome", "run", "--json"], tmp_path))["step"] == 2
