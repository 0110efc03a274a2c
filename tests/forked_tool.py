"""The tool in a process forked from one that has torch: a test of a command's answers needs no 3 s of imports.

The process is a real one, with its own arguments, folder, environment, output files and exit code. Tests of how the
tool starts, of what it loads and of signals to it start an interpreter instead.
"""

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from unbroken.testing.worlds import preload, warm_context

preload(
    "unbroken.cli.main", "unbroken.gpt.train", "unbroken.gpt.generation", "unbroken.gpt.export", "tests.forked_tool"
)


def run_tool(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Run ``unbroken`` with these arguments in a folder, and wait for its end."""
    with tempfile.TemporaryDirectory(prefix="unbroken-tool-") as said:
        out, err = f"{said}/out", f"{said}/err"
        child = warm_context().Process(target=_become_tool, args=(arguments, str(folder), dict(environment), out, err))
        child.start()
        child.join()
        assert child.exitcode is not None
        texts = [Path(path).read_text(encoding="utf-8") for path in (out, err)]
    return subprocess.CompletedProcess(["unbroken", *arguments], child.exitcode, *texts)


def _become_tool(arguments: Sequence[str], folder: str, environment: Mapping[str, str], out: str, err: str) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = ["unbroken", *arguments]
    runpy.run_module("unbroken", run_name="__main__", alter_sys=True)
