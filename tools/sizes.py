"""Hold functions to the size a reader can take in: 60 lines. Name files over 400 lines, to be looked at again.

    python tools/sizes.py [ROOT]

Exits 1 if a function is too long. A long file is only named: a file is one idea, whole, and size alone cuts nothing.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "tests", "bench", "tools", "examples")
FILE_LINES = 400
FUNCTION_LINES = 60


def _files(root: Path) -> Iterator[tuple[Path, str]]:
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root), path.read_text(encoding="utf-8")


def long_files(root: Path) -> Iterator[str]:
    """One line for each file under ``root`` that is worth a second look."""
    for shown, text in _files(root):
        if (lines := len(text.splitlines())) > FILE_LINES:
            yield f"{shown}: {lines} lines; is it one idea?"


def findings(root: Path) -> Iterator[str]:
    """One line for each function under ``root`` that is too long."""
    for shown, text in _files(root):
        yield from _in_file(shown, text)


def _in_file(shown: Path, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text, filename=str(shown))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{shown}:{node.lineno}: {node.name} has {length} lines, {FUNCTION_LINES} are allowed"


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = list(findings(root))
    print("\n".join([*long_files(root), *(found or ["every function is short enough"])]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
