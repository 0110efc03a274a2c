"""Host memory: how much of it there is under every kind of limit, and what a forked child and an exit do to it."""

import mmap
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from unbroken.state.host_memory import Arena, _of_control_groups, _of_limits, available_bytes

GB = 1 << 30


def group(folder: Path, *, limit: str, used: int, active: int = 0, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\nactive_file {active}\ninactive_file {inactive}\n")


def test_the_limit_of_a_group_above_counts(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("0::/job_1/step_0/task_0\n")
    group(tmp_path / "job_1", limit=str(8 * GB), used=5 * GB)
    group(tmp_path / "job_1/step_0", limit="max", used=5 * GB)
    group(tmp_path / "job_1/step_0/task_0", limit="max", used=4 * GB)
    assert list(_of_control_groups(tmp_path / "membership", tmp_path)) == [3 * GB]


def test_cached_files_are_memory_that_is_available(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("0::/\n")
    group(tmp_path, limit=str(8 * GB), used=8 * GB, active=2 * GB, inactive=GB)
    assert list(_of_control_groups(tmp_path / "membership", tmp_path)) == [3 * GB]


def test_control_groups_of_version_1_count(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("5:devices:/x\n4:cpu,memory:/job\n0::/\n")
    own = tmp_path / "memory/job"
    own.mkdir(parents=True)
    (own / "memory.limit_in_bytes").write_text(f"{6 * GB}\n")
    (own / "memory.usage_in_bytes").write_text(f"{5 * GB}\n")
    (own / "memory.stat").write_text(f"inactive_file 3\ntotal_inactive_file {GB}\n")
    assert list(_of_control_groups(tmp_path / "membership", tmp_path)) == [2 * GB]


def test_the_limits_of_the_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    limits = {resource.RLIMIT_AS: used_bytes + GB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], resource.RLIM_INFINITY))
    (left,) = _of_limits()
    assert 0 < left < 2 * GB
    available = available_bytes()
    assert available is not None and available < 2 * GB


def test_a_forked_child_unmaps_nothing_of_its_own() -> None:
    arena: Arena | None = Arena(64 << 20, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a process with threads is forked: the child runs nothing of torch
        child = os.fork()
    if child == 0:
        # Where the arena is in the parent there is nothing in the child, until this.
        taken = [mmap.mmap(-1, 64 << 20) for _ in range(4)]
        arena = None
        for each in taken:
            each[0] = each[-1] = 1
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert arena is not None


def test_a_process_that_exits_while_memory_is_made_ready_keeps_its_exit_code() -> None:
    script = "import sys; from unbroken.state.stage import Buffers; Buffers().prepare(1 << 30, None); sys.exit(7)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (7, "")
