"""ARCHITECTURE.md names files and functions that exist, and every package."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "unbroken"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
FILE = r"(?P<file>[\w/]+\.py)\b"
# A call of a function of ours: `commit()`, `SpotWatch()`, `StopSources.look()`.
CALL = r"(?:\w+\.)*(?P<name>\w+)\(\)"


def path_of(name: str) -> Path:
    return (ROOT if name.startswith("tests/") else SOURCE) / name


def calls() -> Iterator[tuple[str, str]]:
    """Every function that the page names, with the file before it on its line; an empty text if there is none."""
    for line in PAGE.splitlines():
        file = ""
        for found in re.finditer(f"{FILE}|{CALL}", line):
            file = found["file"] or file
            if found["name"]:
                yield file, found["name"]


def test_every_file_that_the_page_names_exists() -> None:
    names = {found["file"] for found in re.finditer(FILE, PAGE)}
    assert len(names) > 100
    assert [name for name in names if not path_of(name).is_file()] == []


def test_every_function_is_defined_in_the_file_before_it_or_somewhere() -> None:
    definition = re.compile(r"^\s*(?:def|class) (\w+)", re.MULTILINE)
    everywhere = {name for place in SOURCE.rglob("*.py") for name in definition.findall(place.read_text())}
    named = set(calls())
    assert len(named) > 100
    for file, name in named:
        assert name in (definition.findall(path_of(file).read_text()) if file else everywhere), file


def test_the_page_has_one_picture_for_each_walk() -> None:
    walks = ["Save", "Resume", "Mirror", "Batch", "Signal", "Error"]
    assert re.findall(r"^## (\w+)$", PAGE, re.MULTILINE) == ["Layers", *walks]
    assert PAGE.count("\n```\n") == 2 * len(walks)


def test_the_table_of_layers_has_every_package_and_no_other() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.split("## Save")[0], re.MULTILINE)
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    modules = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert named == packages | modules
