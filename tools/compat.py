"""Make the tables of versions from the recorded results of tools/compat.sh.

    python tools/compat.py            write docs/measured/compat.md and the table in README.md
    python tools/compat.py --check    exit 1 if one of them is stale, a test failed, or the package names other versions

The results are in docs/measured/compat/, one file for each torch and Python; notes.md there is taken over as it is.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from unbroken.tested_versions import TESTED_PYTHON, TESTED_TORCH, minor_version  # noqa: E402 - found only now

RESULTS = ROOT / "docs" / "measured" / "compat"
PAGE = ROOT / "docs" / "measured" / "compat.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- versions: made by tools/compat.py -->", "<!-- /versions -->"
# What a column of the README is about, the parts of the results behind it, and the torch that it needs.
COLUMNS = (
    ("`Run`, DDP", ("run", "ranks"), (2, 6)),
    ("FSDP2 on a CPU", ("ranks",), (2, 7)),
    ("`exact`", ("exact",), (2, 6)),
    ("`exact` with FSDP2", ("exact",), (2, 9)),
    ("trainer", ("trainer",), (2, 8)),
)
# A part of which fewer tests passed counts as not tested.
_FEWEST = 20
PARTS = {"run": "store, `Run`", "ranks": "several ranks", "exact": "`exact`", "trainer": "trainer"}


@dataclass(frozen=True)
class Result:
    """What the tests said with one torch and one Python."""

    torch: str
    python: str
    device: str
    tests: tuple[str, ...]
    parts: dict[str, dict[str, Any]]
    failures: tuple[str, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """Older versions first."""
        return tuple(int(each) for each in f"{minor_version(self.torch)}.{minor_version(self.python)}".split("."))


def read_results(folder: Path) -> list[Result]:
    """All recorded results, the oldest torch first."""
    found = []
    for path in folder.glob("*.json"):
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields |= {"tests": tuple(fields["tests"]), "failures": tuple(fields["failures"])}
        found.append(Result(**fields))
    return sorted(found, key=lambda result: result.order)


def cell(result: Result, parts: Sequence[str], needs: tuple[int, int]) -> str:
    """What one column says of one result: yes, no with the reason, or that it was not run."""
    held = [result.parts[part] for part in parts if part in result.parts]
    if result.order[:2] < needs:
        return "no"
    if len(held) < len(parts) or any(part.get("passed", 0) < _FEWEST for part in held):
        return "not tested"
    failed = sum(part.get("failed", 0) for part in held)
    return f"{failed} failed" if failed else "yes"


def readme_table(results: Sequence[Result]) -> str:
    """The table in the README: a row for each torch."""
    lines = [
        "| torch | Python | device | " + " | ".join(name for name, _, _ in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for result in results:
        cells = [cell(result, parts, needs) for _, parts, needs in COLUMNS]
        where = [minor_version(result.torch), minor_version(result.python), result.device]
        lines.append("| " + " | ".join([*where, *cells]) + " |")
    said = "*no*: an error names the torch that is needed; FSDP2 on a CPU fails inside torch 2.6 itself."
    return "\n".join([*lines, "", f"{said} Results: [docs/measured/compat.md](docs/measured/compat.md)."])


def page(results: Sequence[Result], notes: str) -> str:
    """The page of measurements: counts of every part, what failed, what is lacking, and the notes."""
    lines = [
        "# Versions of torch and Python",
        "",
        "Made by `tools/compat.py` from the results in `compat/`, which `tools/compat.sh` records:",
        "",
        "```sh",
        "tools/compat.sh " + " ".join(dict.fromkeys(each.torch.split("+")[0] for each in results)),
        "```",
        "",
        "It runs the quick tests (`--tier quick`) of the directories that depend on torch. *lacking*: what the test",
        "proves is refused by name in that version, or fails inside torch itself.",
        "",
        "| torch | Python | device | part | passed | failed | skipped | lacking |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for part, counts in result.parts.items():
            numbers = [f"{counts.get(each, 0):,}" for each in ("passed", "failed", "skipped", "lacking")]
            lines.append(
                f"| {result.torch} | {result.python} | {result.device} | {PARTS[part]} | " + " | ".join(numbers) + " |"
            )
    lines += ["", "## Which tests", ""]
    for tests in dict.fromkeys(result.tests for result in results):
        versions = ", ".join(f"{each.torch} ({each.python})" for each in results if each.tests == tests)
        lines.append(f"- {versions}: `{' '.join(tests)}`")
    failures = [f"- torch {each.torch}, Python {each.python}: `{test}`" for each in results for test in each.failures]
    lines += ["", "## What failed", "", *(failures or ["Nothing."]), "", notes.strip(), ""]
    return "\n".join(lines)


def with_table(readme: str, table: str) -> str:
    """The README with the table between its marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def complaints(results: Sequence[Result]) -> Iterator[str]:
    """Where the package promises what was not tested, or hides what was."""
    for name, promised, found in (
        ("TESTED_TORCH", TESTED_TORCH, {minor_version(each.torch) for each in results}),
        ("TESTED_PYTHON", TESTED_PYTHON, {minor_version(each.python) for each in results}),
    ):
        for version in sorted(found ^ set(promised)):
            where = "has no recorded result" if version in promised else "was tested and is not named"
            yield f"{name} in src/unbroken/tested_versions.py: {version} {where}"
    for result in results:
        if result.failures:
            yield f"torch {result.torch}, Python {result.python}: {len(result.failures)} tests failed"


def main() -> int:
    results = read_results(RESULTS)
    made = page(results, (RESULTS / "notes.md").read_text(encoding="utf-8"))
    readme = README.read_text(encoding="utf-8")
    if BEGIN not in readme or END not in readme:
        print(f"README.md has no place for the table: {BEGIN} ... {END}")
        return 1
    shown = with_table(readme, readme_table(results))
    found = list(complaints(results))
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(made, encoding="utf-8")
        README.write_text(shown, encoding="utf-8")
    else:
        stale = [path.name for path, text in ((PAGE, made), (README, shown)) if path.read_text("utf-8") != text]
        found += [f"{name} is stale; python tools/compat.py writes it anew" for name in stale]
    print("\n".join(found) if found else f"{len(results)} results, torch {', '.join(TESTED_TORCH)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
