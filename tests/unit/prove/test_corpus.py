"""The demo's corpus: the same Python gives the same two buckets, within a bound."""

import ast
import json
from pathlib import Path

import pytest

from unbroken.errors import SourcesMissing
from unbroken.prove.demo_corpus import BUCKETS, CODE, DOCSTRINGS, FILE, definitions, docstrings, write_corpus

MODULE = '''"""The module says at some length what it is about."""

import os

@decorated
def first(a):
    """A docstring that is long enough to be kept as a document.

    With a second paragraph.
    """
    return a  # and a comment

class Second:
    "short"
    def inner(self):
        return 1
'''


def documents(folder: Path, bucket: str) -> list[str]:
    lines = (folder / bucket / FILE).read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_code_is_cut_by_definitions_and_has_no_docstrings() -> None:
    first, second = definitions(MODULE, ast.parse(MODULE))
    assert first == "@decorated\ndef first(a):\n    return a  # and a comment"
    assert second == "class Second:\n    def inner(self):\n        return 1"


def test_docstrings_come_from_top_to_bottom_without_indents_and_without_the_short_ones() -> None:
    module, function = docstrings(ast.parse(MODULE))
    assert module == "The module says at some length what it is about."
    assert function.endswith("a document.\n\nWith a second paragraph.")


def test_the_standard_library_gives_both_buckets_and_the_same_bytes_again(tmp_path: Path) -> None:
    found = write_corpus(tmp_path / "a", most_bytes=200_000)
    assert write_corpus(tmp_path / "b", most_bytes=200_000) == found
    for bucket in BUCKETS:
        texts = documents(tmp_path / "a", bucket)
        assert len(texts) == found.documents[bucket] > 10
        assert sum(len(text.encode()) for text in texts) == found.size_bytes[bucket]
        assert (tmp_path / "a" / bucket / FILE).read_bytes() == (tmp_path / "b" / bucket / FILE).read_bytes()
    assert sum(found.size_bytes.values()) < 200_000


def test_a_module_that_is_none_is_passed_by(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "a.py").write_text("def broken(:\n")
    (library / "b.py").write_bytes(b"\xff\xfe")
    (library / "c.py").write_text(MODULE)
    assert write_corpus(tmp_path / "text", library=library).modules == 1
    assert len(documents(tmp_path / "text", CODE)) == len(documents(tmp_path / "text", DOCSTRINGS)) == 2


def test_a_python_without_sources_is_recognized_by_its_folder(tmp_path: Path) -> None:
    with pytest.raises(SourcesMissing) as caught:
        write_corpus(tmp_path / "text", library=tmp_path)
    assert caught.value.folder == tmp_path
    assert not (tmp_path / "text").exists()
