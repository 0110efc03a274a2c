"""Copies of the package, and a pytest forked for each: how one test runs others against a package that is broken."""

import compileall
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import unbroken
from tests.patience import PATIENCE_S

REPOSITORY = Path(__file__).parents[2]
# Less than pytest's own limit for the test that waits here, so that the log of a child that hangs is shown.
_LIMIT_S = 1500.0
# A mutation that causes a hang is found by waiting for its end.
HANG_S = 60.0


@dataclass(frozen=True)
class Ended:
    """How a run of tests ended; the exit code is None if it took too long."""

    exit_code: int | None
    log: str


def compiled_copy(into: Path) -> Path:
    """A copy of the package with its bytecode, to take others from.

    The bytecode is checked by the hash of its source at every import, so none is ever used for a text that was changed.
    """
    shutil.copytree(Path(unbroken.__file__).parent, into / "unbroken", ignore=shutil.ignore_patterns("__pycache__"))
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(into / "unbroken", quiet=1, invalidation_mode=mode)
    return into


@contextmanager
def linked_copy(original: Path) -> Iterator[Path]:
    """A copy that shares all files with the original, in a folder that goes away; change it with `replace` alone."""
    # Not below pytest's folder: with its long names a socket's path would not fit.
    with tempfile.TemporaryDirectory(prefix="unbroken-mutated-", ignore_cleanup_errors=True) as folder:
        shutil.copytree(original / "unbroken", Path(folder) / "unbroken", copy_function=os.link)
        yield Path(folder)


def replace(source: Path, file: str, old: str, new: str) -> None:
    """Replace a text that occurs exactly once in a file of a linked copy."""
    path = source / "unbroken" / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file} holds {text.count(old)} times:\n{old}"
    # A new file, because the old one is shared.
    path.unlink()
    path.write_text(text.replace(old, new))


class Server:
    """The process that forks the children; use it as a context manager."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "UNBROKEN_MUTATED": "1"}
        # No thread may be there before a fork, and the ranks of a world share these few cores.
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py"))],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        ready = self._answer()
        assert ready == "ready", ready

    def run(self, source: Path, nodes: Sequence[str], *, patience_s: float = PATIENCE_S) -> Ended:
        """Run tests against the package in a folder; ``patience_s`` is how long they wait for something."""
        log = source / "log"
        request = {"source": str(source), "log": str(log), "temporary": str(source / "t"), "nodes": list(nodes)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**request, "timeout_s": _LIMIT_S, "patience_s": patience_s}) + "\n")
        self._process.stdin.flush()
        return Ended(self._answer(), log.read_text(errors="replace"))

    def _answer(self) -> Any:  # noqa: ANN401 - what JSON holds
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the server of the mutations ended with {self._process.wait()}; its stderr says why"
        return json.loads(line)

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()
