"""The corpus of the demo: the source code of Python's standard library, as two buckets of documents.

``code`` holds the classes and functions of its modules, one a document and without their docstrings; ``docstrings``
holds one docstring a document. Modules are taken in the order of their names up to a bound, so that the same Python
gives the same bytes.
"""

import ast
import inspect
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors import SourcesMissing
from unbroken.files import LOCAL

CODE: Final = "code"
DOCSTRINGS: Final = "docstrings"
BUCKETS: Final = (CODE, DOCSTRINGS)
FILE: Final = "library.jsonl"
# Enough for a run of a minute, and read, learned from and tokenized in a few seconds.
MOST_BYTES: Final = 1_000_000
# Shorter ones say little: "See above."
_LEAST_DOCSTRING: Final = 40

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class DemoCorpus:
    """The written corpus: number of modules, and documents and bytes of each bucket."""

    modules: int
    documents: dict[str, int]
    size_bytes: dict[str, int]


def write_corpus(folder: Path, *, library: Path | None = None, most_bytes: int = MOST_BYTES) -> DemoCorpus:
    """Write a bucket of code and one of docstrings below a folder, from as many modules as the bound allows.

    Raises:
        SourcesMissing: this Python has no sources of its library.
        StorageFailed: an I/O error.
    """
    source = Path(sysconfig.get_path("stdlib")) if library is None else library
    texts: dict[str, list[str]] = {bucket: [] for bucket in BUCKETS}
    modules = taken_bytes = 0
    for path in sorted(source.glob("*.py"), key=lambda each: each.name):
        found = _parsed(path)
        if found is None:
            continue
        taken_bytes += path.stat().st_size
        if taken_bytes > most_bytes:
            break
        text, tree = found
        modules += 1
        texts[CODE] += definitions(text, tree)
        texts[DOCSTRINGS] += docstrings(tree)
    # A mixture needs both buckets.
    if not all(texts.values()):
        raise SourcesMissing(folder=source)
    for bucket, documents in texts.items():
        LOCAL.make_directory(folder / bucket)
        lines = "".join(json.dumps({"text": each}) + "\n" for each in documents)
        LOCAL.replace(folder / bucket / FILE, lines.encode(), scratch=f".{FILE}", durable=False)
    size_bytes = {bucket: sum(len(each.encode()) for each in documents) for bucket, documents in texts.items()}
    return DemoCorpus(modules, {bucket: len(documents) for bucket, documents in texts.items()}, size_bytes)


def _parsed(path: Path) -> tuple[str, ast.Module] | None:
    """A module's text and tree; None if it does not parse, as some of Python's own tests."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError):
        return None


def docstrings(tree: ast.Module) -> list[str]:
    """The docstrings of a module, its classes and functions, from top to bottom; without the shortest."""
    found = [inspect.cleandoc(str(each.value)) for each in _docstring_nodes(tree)]
    return [each for each in found if len(each) >= _LEAST_DOCSTRING]


def definitions(text: str, tree: ast.Module) -> list[str]:
    """The classes and functions of a module's top level, as they are written but for the lines of their docstrings."""
    gone = {
        line for each in _docstring_nodes(tree) for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)
    }
    # By the line ends that Python counts: a form feed inside a module is none.
    lines = dict(enumerate(text.split("\n"), start=1))
    return [
        "\n".join(lines[at] for at in _lines_of(each, _first_line(each)) if at not in gone)
        for each in tree.body
        if isinstance(each, _Definition)
    ]


def _lines_of(node: ast.stmt | ast.expr, first: int) -> range:
    return range(first, (node.end_lineno or node.lineno) + 1)


def _first_line(definition: _Definition) -> int:
    return min([definition.lineno, *(each.lineno for each in definition.decorator_list)])


def _docstring_nodes(tree: ast.Module) -> Iterator[ast.Constant]:
    documented = [each for each in ast.walk(tree) if isinstance(each, ast.Module | _Definition)]
    for each in sorted(documented, key=lambda node: getattr(node, "lineno", 0)):
        match each.body[:1]:
            case [ast.Expr(value=ast.Constant(value=str()) as constant)]:
                yield constant
