"""Compiled code that is unpacked and kept, killed at any operation: the next job compiles, or finds it whole."""

from pathlib import Path

import pytest

from unbroken.disk import Disk
from unbroken.files import Files
from unbroken.gpt.compiled_code import SUFFIX, CompiledCode, make_private
from unbroken.testing import ERRORS, Kill, MemoryDisk, crash_points

LIVE, KEPT = Path("/tmp/live"), Path("/home/.cache/compiled")
OLD = {"ab/kernel.so": b"kernel", "fxgraph/x/entry": b"graph"}
NEW = {"cd/second.so": b"compiled now"}


def code(disk: Disk, live: Path = LIVE) -> CompiledCode:
    return CompiledCode(live, KEPT / f"a{SUFFIX}", Files(disk), is_private=lambda _: True)


def with_old_ones() -> MemoryDisk:
    """Code of an earlier job, on a node that has lost its own; and more files than are kept."""
    disk = MemoryDisk([LIVE, KEPT, Path("/elsewhere")])
    files = Files(disk)
    for name, content in OLD.items():
        files.make_directory((Path("/elsewhere") / name).parent)
        files.write_new(Path("/elsewhere") / name, [content])
    code(disk, Path("/elsewhere")).keep()
    for number in range(9):
        files.write_new(KEPT / f"old-{number}{SUFFIX}", [b"x"])
    disk.sync_all()
    return disk


def unpacks_and_keeps(disk: Disk) -> None:
    files, found = Files(disk), code(disk)
    found.unpack()
    # What is not there is compiled, as torch does.
    for name, content in (OLD | NEW).items():
        if files.find(LIVE / name) is None:
            files.make_directory((LIVE / name).parent)
            files.replace(LIVE / name, content, scratch="kernel.tmp")
    found.keep()


def makes_a_folder(disk: Disk) -> None:
    make_private(Path("/home/.cache/new"), Files(disk))


def unpacked(disk: Disk) -> dict[str, bytes]:
    """What a job on another node finds."""
    files, other = Files(disk), Path("/other")
    files.make_directory(other)
    code(disk, other).unpack()
    names = [name for name in (*OLD, *NEW) if files.find(other / name) is not None]
    return {name: files.read_bytes(other / name, limit_bytes=100) for name in names}


@pytest.mark.promise("X7")
def test_after_every_crash_the_next_job_finds_the_old_code_or_the_new() -> None:
    seen = set()
    for trial in crash_points(with_old_ones, unpacks_and_keeps, (Kill("before"), Kill("during"), *ERRORS)):
        found = unpacked(trial.disk)
        assert found in (OLD, OLD | NEW), str(trial)
        seen.add(found == OLD | NEW)
        # The same again, in peace.
        unpacks_and_keeps(trial.disk)
        assert unpacked(trial.disk) == OLD | NEW
    assert seen == {True, False}
