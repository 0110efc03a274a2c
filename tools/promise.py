"""List every promise with the tests that prove it.

    python tools/promise.py            write docs/promise/README.md
    python tools/promise.py --check    exit 1 if that page is stale, a row claims what no test shows, or no quick test
                                       proves a row that is done

The rows are in docs/promise/rows.toml. A test proves a row by carrying its id: ``@pytest.mark.promise("C2")``.
Which tests are quick is said by tests/tiers.toml.
"""

import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.tiers import Tiers, matches, read_tiers  # noqa: E402 - a script finds it only now

STATES = ("done", "begun", "open")
INTRODUCTION = """# The promises

Made by `tools/promise.py` from `rows.toml` and the tests; `make test` checks that it is current.
*done*: the tests named here prove the row. *begun*: they prove a part of it. *open*: not built yet.
"""


@dataclass(frozen=True)
class Row:
    """One promise and how far it is kept."""

    promise: str
    state: str


def read_rows(path: Path) -> dict[str, Row]:
    """The rows in the order of the file."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: Row(row["promise"], row["state"]) for name, row in found.items()}


def collect(tests: Path) -> dict[str, list[str]]:
    """For each id that a test carries, the tests that carry it."""
    tests_of: dict[str, list[str]] = defaultdict(list)
    for path in sorted(tests.rglob("test_*.py")):
        shown = path.relative_to(tests.parent).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for name, owner in _carried(tree, ""):
            entry = f"{shown}::{owner}" if owner else shown
            if entry not in tests_of[name]:
                tests_of[name].append(entry)
    return dict(tests_of)


def _carried(node: ast.AST, owner: str) -> Iterator[tuple[str, str]]:
    """Every id below a node with the test or class it stands at; at the top of a file it stands for the file."""
    for child in ast.iter_child_nodes(node):
        inside = owner
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{owner}::{child.name}" if owner else child.name
        if isinstance(child, ast.Call) and ast.unparse(child.func).endswith("mark.promise"):
            for argument in child.args:
                if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                    raise SystemExit(f"line {child.lineno}: a promise is named by a plain string")
                yield argument.value, inside
        yield from _carried(child, inside)


def complaints(rows: dict[str, Row], tests_of: dict[str, list[str]]) -> Iterator[str]:
    """What the rows claim and the tests do not bear out, and the other way round."""
    for name in tests_of.keys() - rows.keys():
        yield f"{tests_of[name][0]} names the promise {name}, which rows.toml does not have"
    for name, row in rows.items():
        if row.state not in STATES:
            yield f"{name} is '{row.state}'; a row is one of {', '.join(STATES)}"
        if row.state == "open" and name in tests_of:
            yield f"{name} is called open, and {tests_of[name][0]} carries it"
        if row.state in ("done", "begun") and name not in tests_of:
            yield f"{name} is called {row.state}, and no test carries it"


def defined_in(tests: Path) -> dict[str, list[str]]:
    """For each test file, by its path below tests/, the tests it defines, with their classes."""
    found: dict[str, list[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        found[path.relative_to(tests).as_posix()] = list(_defined(tree, ""))
    return found


def _defined(node: ast.AST, owner: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _defined(child, f"{child.name}::")
        elif isinstance(child, ast.FunctionDef) and child.name.startswith("test_"):
            yield f"{owner}{child.name}"


def tier_complaints(
    rows: dict[str, Row], tests_of: dict[str, list[str]], tiers: Tiers, tests: dict[str, list[str]]
) -> Iterator[str]:
    """Rows that are done and that no quick test proves, and patterns of the table that are about no test."""
    for pattern in tiers.deep:
        if not any(matches(pattern, file, test) for file, names in tests.items() for test in names or [""]):
            yield f"tests/tiers.toml: no test matches '{pattern}'; was it renamed?"
    for name, row in rows.items():
        carried = tests_of.get(name, [])
        if row.state == "done" and carried and not any(_is_quick(entry, tiers, tests) for entry in carried):
            yield f"{name} is done, and all its tests are deep; tests/tiers.toml must leave one in the quick tier"


def _is_quick(entry: str, tiers: Tiers, tests: dict[str, list[str]]) -> bool:
    """Whether at least one test of an entry, which may be a whole file or class, is in the quick tier."""
    path, _, owner = entry.partition("::")
    file = path.removeprefix("tests/")
    named = [test for test in tests[file] if not owner or test == owner or test.startswith(f"{owner}::")]
    return any(tiers.kept(file, test) != 0 for test in named or [owner])


def page(rows: dict[str, Row], tests_of: dict[str, list[str]]) -> str:
    """The page: counts, then one table row per promise."""
    counts = ", ".join(f"{sum(row.state == state for row in rows.values())} {state}" for state in STATES)
    lines = [
        INTRODUCTION,
        f"{len(rows)} promises: {counts}.",
        "",
        "| id | promise | state | tests |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        tests = "<br>".join(f"`{test}`" for test in tests_of.get(name, []))
        lines.append(f"| {name} | {row.promise} | {row.state} | {tests} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    rows = read_rows(ROOT / "docs" / "promise" / "rows.toml")
    tests_of = collect(ROOT / "tests")
    target = ROOT / "docs" / "promise" / "README.md"
    found = [*complaints(rows, tests_of), *tier_complaints(rows, tests_of, read_tiers(), defined_in(ROOT / "tests"))]
    made = page(rows, tests_of)
    if "--check" not in sys.argv[1:]:
        target.write_text(made, encoding="utf-8")
    elif not target.exists() or target.read_text(encoding="utf-8") != made:
        found.append("docs/promise/README.md is stale; python tools/promise.py writes it anew")
    print("\n".join(found) if found else f"{len(rows)} promises, {len(tests_of)} carried by tests")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
