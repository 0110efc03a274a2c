"""Only ``files.py``, over ``disk.py``, changes storage: nothing else above the torch line calls what could."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "unbroken"
ALLOWED = {"files.py", "disk.py"}
# `testing` plants faults in storage; the rest lies below the torch line or speaks to object stores.
EXEMPT = {"testing", "world.py", "state", "loop", "exact", "frameworks", "gpt", "prove"}

OS_CALLS = {
    *("chmod", "chown", "fsync", "ftruncate", "link", "makedirs", "mkdir", "mkfifo", "open", "pwrite", "remove"),
    *("removedirs", "rename", "renames", "replace", "rmdir", "symlink", "truncate", "unlink", "utime", "write"),
}
PATH_METHODS = {
    *("chmod", "hardlink_to", "mkdir", "rename", "rmdir", "symlink_to", "touch", "unlink", "write_bytes", "write_text"),
}
DISK_METHODS = {
    *("create", "link", "make_directory", "make_symlink", "open_append", "remove_directory", "rename"),
    *("sync_directory", "sync_file", "unlink", "write"),
}
MODULES = {"shutil", "tempfile", "fileinput", "sqlite3", "dbm", "shelve", "mmap"}
# What anybody may know of a disk: how it answers, not how it is asked.
DISK_WORDS = {"Node", "NodeKind", "Space", "Status"}


def findings(text: str) -> Iterator[str]:
    """Every call or import in a module that could change storage."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            yield from _in_call(node)
        elif isinstance(node, ast.Import):
            yield from (f"import {each.name}" for each in node.names if each.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            yield from _in_import(node)


def _in_import(node: ast.ImportFrom) -> Iterator[str]:
    module = node.module or ""
    if module.split(".")[0] in MODULES:
        yield f"from {module} import"
    names = {each.name for each in node.names}
    if module == "os" and names & OS_CALLS:
        yield f"from os import {', '.join(sorted(names & OS_CALLS))}"
    if module == "unbroken.disk" and names - DISK_WORDS:
        yield f"from unbroken.disk import {', '.join(sorted(names - DISK_WORDS))}"
    if module == "unbroken" and "disk" in names:
        yield "from unbroken import disk"


def _in_call(node: ast.Call) -> Iterator[str]:
    called = node.func
    if isinstance(called, ast.Name) and called.id == "open" and _writes(node, position=1):
        yield ast.unparse(node)
    if not isinstance(called, ast.Attribute):
        return
    of_os = isinstance(called.value, ast.Name) and called.value.id == "os"
    of_disk = isinstance(called.value, ast.Attribute) and called.value.attr == "disk"
    # A text's `replace` takes two arguments, a path's takes one.
    moves = called.attr == "replace" and len(node.args) == 1 and not node.keywords
    opens = called.attr == "open" and not of_os and _writes(node, position=0)
    if (
        (of_os and called.attr in OS_CALLS)
        or (of_disk and called.attr in DISK_METHODS)
        or called.attr in PATH_METHODS
        or moves
        or opens
    ):
        yield ast.unparse(node)


def _writes(node: ast.Call, *, position: int) -> bool:
    modes = [*node.args[position : position + 1], *(each.value for each in node.keywords if each.arg == "mode")]
    return any(not isinstance(mode, ast.Constant) or set(str(mode.value)) & set("wax+") for mode in modes)


def modules() -> list[Path]:
    found = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    return sorted(path for path in found if path.parts[0] not in EXEMPT and str(path) not in ALLOWED)


def test_every_module_leaves_storage_to_files() -> None:
    found = {str(module): list(findings((SOURCE / module).read_text())) for module in modules()}
    assert len(found) > 200
    assert {module: breaches for module, breaches in found.items() if breaches} == {}


@pytest.mark.parametrize("module", sorted(ALLOWED))
def test_the_rule_sees_what_the_two_allowed_modules_do(module: str) -> None:
    assert list(findings((SOURCE / module).read_text()))


BREACHES = [
    "os.rename(a, b)",
    "os.open(path, flags)",
    "from os import replace",
    "import shutil",
    "from tempfile import mkdtemp",
    "open(path, 'w')",
    "open(path, mode='ab')",
    "open(path, mode)",
    "path.open('w')",
    "path.write_text(text)",
    "path.unlink()",
    "path.replace(target)",
    "path.mkdir(parents=True)",
    "files.disk.unlink(path)",
    "from unbroken.disk import LocalDisk",
    "from unbroken import disk",
]


@pytest.mark.parametrize("line", BREACHES)
def test_a_breach_is_seen(line: str) -> None:
    assert list(findings(line))


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "open(path, 'rb')",
        "path.open('rb')",
        "text.replace('a', 'b')",
        "time.replace(tzinfo=utc)",
        "files.replace(path, data, scratch=name)",
        "files.make_directory(path)",
        "from unbroken.disk import NodeKind",
        "os.environ.get('HOME')",
    ],
)
def test_reading_is_free(line: str) -> None:
    assert not list(findings(line))
