"""Real processes under strace: every call that changes a file system, and the process struck just before one of them.

strace counts a call per thread and per name from the start of the process, the interpreter's own start included, so a
point is known by its name and number. Each strike is traced, too: it must have met the very path it was meant for.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import unbroken

REPOSITORY = Path(__file__).parents[2]
CALLS = (
    "openat,write,pwrite64,writev,fsync,fdatasync,rename,renameat,renameat2,link,linkat,symlink,symlinkat,"
    "unlink,unlinkat,mkdir,mkdirat,rmdir,ftruncate,fallocate,copy_file_range,sendfile"
)
_LINE = re.compile(r"(?P<thread>\d+)\s+(?P<call>\w+)\((?P<arguments>.*)")


@dataclass(frozen=True)
class Point:
    """One call: the ``number``-th of its name, and what it was asked to do, without the store's own path."""

    call: str
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.call} #{self.number} {self.what}"


def driver(title: str, root: Path) -> list[str]:
    """The command that acts a scene on a store."""
    return [sys.executable, "-m", "tests.crash.driver", title, str(root)]


def _strace(trace: Path, *options: str, command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["strace", "-f", "-y", "-qq", "-s", "0", "-o", str(trace), *options, *command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def _calls(trace: Path, root: Path) -> Iterator[Point]:
    seen: Counter[tuple[str, str]] = Counter()
    threads = set()
    for line in trace.read_text(errors="replace").splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        call, arguments = found["call"], found["arguments"]
        seen[found["thread"], call] += 1
        if str(root) in arguments and (call != "openat" or "O_CREAT" in arguments):
            threads.add(found["thread"])
            what = re.sub(r"\b\d+<", "<", arguments.partition(" = ")[0]).replace(str(root), "")
            yield Point(call, seen[found["thread"], call], re.sub(r"\.\.\.|\(deleted\)", "", what)[:100])
    # Two threads with the same number of the same call could not be told apart.
    assert len(threads) <= 1, threads


@cache
def _compile_once() -> None:
    """Compile all that a scene may import: files that only a first run opens shift the numbers of all later calls."""
    sources = [str(Path(unbroken.__file__).parent), str(REPOSITORY / "tests")]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *sources], check=True)


def points(title: str, root: Path, trace: Path) -> list[Point]:
    """Every changing call of an undisturbed run."""
    _compile_once()
    run = _strace(trace, "-e", f"trace={CALLS}", command=driver(title, root))
    assert run.returncode == 0, run.stderr
    return list(_calls(trace, root))


def strike(title: str, root: Path, trace: Path, point: Point, effect: str) -> "subprocess.CompletedProcess[str]":
    """Run a scene with ``effect`` (``signal=SIGKILL``, ``error=EIO``) at one call."""
    inject = f"inject={point.call}:{effect}:when={point.number}"
    run = _strace(trace, "-e", f"trace={point.call}", "-e", inject, command=driver(title, root))
    struck = [found for found in _calls(trace, root) if found.number == point.number]
    assert [found.what for found in struck] == [point.what], f"meant {point}, met {struck}: {run.stderr}"
    return run
