"""Nothing prints, quotes or writes YAML around ``quoting``: the source is walked for every way to do so."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise("U17")

SOURCE = Path(__file__).resolve().parents[3] / "src" / "unbroken"
# What each file may do, and why.
ALLOWED = {
    ("quoting/shell.py", "import shlex"),
    ("quoting/log.py", "logging.getLogger"),
    ("quoting/yaml.py", "yaml.dump"),
    ("quoting/terminal.py", "escape sequence"),
    # The streams themselves: made safe, handed to Output, and the version, which is a constant.
    ("cli/main.py", "sys.stdout.write"),
    ("cli/main.py", "sys.stderr.write"),
    # Called by hand to make a page of the docs out of constants.
    ("config/guide.py", "sys.stdout.write"),
    # Each goes through for_terminal or printable in the same statement.
    ("gpt/__main__.py", "sys.stderr.write"),
    ("launch/agent.py", "sys.stderr.write"),
    ("launch/uncaught.py", "sys.stderr.write"),
    ("loop/console.py", "sys.stderr.write"),
    # Handlers are hung on the package's logger, and torch's own is silenced.
    ("gpt/__main__.py", "logging.getLogger"),
    ("gpt/run_files.py", "logging.getLogger"),
    ("cli/output.py", "logging.getLogger"),
    ("loop/console.py", "logging.getLogger"),
    ("launch/agent.py", "logging.getLogger"),
    # A process of a user's own test, which shows that test's own failure.
    ("testing/worlds.py", "traceback.print_exc"),
    # Help texts of ours, by click.
    ("cli/group.py", "click.echo"),
}
_CALLS = {
    *("print", "logging.getLogger", "getLogger", "click.echo", "click.secho", "click.style", "traceback.print_exc"),
    *(
        "sys.stdout.write",
        "sys.stderr.write",
        "sys.__stdout__.write",
        "sys.__stderr__.write",
        "sys.stdout.buffer.write",
    ),
    *("traceback.print_exception", "yaml.dump", "yaml.safe_dump", "yaml.dump_all", "subprocess.list2cmdline"),
}


def findings(text: str) -> Iterator[str]:
    """Every way in a module to reach a screen, a script or a YAML document directly."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in _CALLS:
            yield called
        elif isinstance(node, ast.Import):
            yield from (f"import {each.name}" for each in node.names if each.name in ("shlex", "pipes"))
        elif isinstance(node, ast.ImportFrom) and node.module in ("shlex", "pipes", "logging", "yaml"):
            yield f"from {node.module} import"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\x1b" in node.value:
            yield "escape sequence"


def test_nothing_reaches_a_screen_a_script_or_a_document_around_quoting() -> None:
    found = {
        (str(path.relative_to(SOURCE)), finding)
        for path in SOURCE.rglob("*.py")
        for finding in findings(path.read_text())
    }
    assert found - ALLOWED == set()
    assert ALLOWED - found == set(), "these exceptions are no longer needed"


def test_a_write_to_a_stream_outside_output_is_made_fit_in_the_same_statement() -> None:
    for name in ("gpt/__main__.py", "launch/agent.py", "launch/uncaught.py", "loop/console.py", "cli/main.py"):
        for node in ast.walk(ast.parse((SOURCE / name).read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.stderr.write", "sys.stdout.write"):
                said = ast.unparse(node)
                assert "for_terminal(" in said or "printable(" in said or "VERSION" in said, (name, said)


@pytest.mark.parametrize(
    "text",
    [
        *("print('x')", "import sys\nsys.stderr.write('x')", "import shlex", "from shlex import quote"),
        *("import yaml\nyaml.safe_dump({})", "import logging\nlogging.getLogger('x')", "x = '\\x1b[1m'"),
    ],
)
def test_every_way_around_is_found(text: str) -> None:
    assert list(findings(text))
