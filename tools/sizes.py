"""Hold files and functions to the size a reader can take in: 400 lines a file, 60 a function.

    python tools/sizes.py [ROOT]

Prints every one that is longer and exits 1 if there is any.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "tests", "bench", "tools", "examples")
FILE_LINES = 400
FUNCTION_LINES = 60


def findings(root: Path) -> Iterator[str]:
    """One line for each file or function under ``root`` that is too long."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            yield from _in_file(path, path.relative_to(root))


def _in_file(path: Path, shown: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    if lines > FILE_LINES:
        yield f"{shown}: {lines} lines, {FILE_LINES} are allowed"
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{shown}:{node.lineno}: {node.name} has {length} lines, {FUNCTION_LINES} are allowed"


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = list(findings(root))
    print("\n".join(found) if found else "every file and function is short enough")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
