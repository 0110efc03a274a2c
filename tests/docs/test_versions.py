"""The versions that the pages and the modules name as tested are those that the tests run with."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "unbroken" / "frameworks"
INSTALLED = dict(
    line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
)
# The module that names the tested versions, and the package they are of.
MODULES = {
    "accelerate_job": "accelerate",
    "deepspeed": "deepspeed",
    "lightning_job": "lightning",
    "torchtitan": "torchtitan",
    "trainer_job": "transformers",
}
NAMED = re.compile(
    r"\b(accelerate|dask|datasets|deepspeed|grain|lightning|torch|torchdata|torchtitan|transformers|trl) (\d[\d.]*\d)"
)
SENTENCE = re.compile(r"\bTested with ((?:[^.\n]|[.](?=\d)|\n(?!\n))*)")


def is_installed(package: str, version: str) -> bool:
    return f"{INSTALLED[package]}.".startswith(f"{version}.")


def versions_in(module: Path) -> tuple[str, ...] | None:
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TESTED" and node.value is not None:
            found: tuple[str, ...] = ast.literal_eval(node.value)
            return found
    return None


def test_each_framework_was_tested_with_the_version_that_its_module_names() -> None:
    found = {path.stem: tested for path in sorted(SOURCE.glob("*.py")) if (tested := versions_in(path)) is not None}
    assert found.keys() == MODULES.keys()
    stale = {name: tested for name, tested in found.items() if not is_installed(MODULES[name], tested[-1])}
    assert not stale, {name: INSTALLED[MODULES[name]] for name in stale}


PAGES = ["accelerate", "dcp", "lightning", "loaders", "tokenize", "transformers"]


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_says_it_was_tested_with_is_installed(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text()
    named = [pair for sentence in SENTENCE.findall(text) for pair in NAMED.findall(sentence.lower())]
    assert named, f"{name}.md does not say what it was tested with"
    assert not [pair for pair in named if not is_installed(*pair)]


def test_no_other_page_says_what_it_was_tested_with() -> None:
    pages = [path.stem for path in sorted((ROOT / "docs").glob("*.md")) if "\nTested with " in path.read_text()]
    assert set(pages) <= set(PAGES)
