"""What every command prints, compared with one golden file per command; see ``tests/e2e/golden.py``."""

from pathlib import Path

import pytest

from tests.e2e.golden import FOLDER, golden, names, path_of, prepare

NAMES = tuple(names())
REFRESH = "after a change of wording: python -m tests.e2e.golden --write"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the scenes of each command start from."""
    folder = tmp_path_factory.mktemp("golden") / "template"
    folder.mkdir()
    prepare(folder)
    return folder


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.replace(" ", "-") or "unbroken")
def test_a_command_prints_what_its_golden_file_says(name: str, template: Path, tmp_path: Path) -> None:
    said = golden(name, template, tmp_path / "here")
    assert said.splitlines() == path_of(name).read_text().splitlines(), REFRESH


def test_every_golden_file_belongs_to_a_command() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {path_of(name).name for name in NAMES}
