"""What all tests share: what a test needs from the machine, and the tool as a subprocess."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest

SBIN = "/usr/sbin:/sbin"


def _has_command(name: str) -> Callable[[], bool]:
    return lambda: shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}") is not None


def _may_trace() -> bool:
    # Installed is not enough: a container may forbid one process to trace another.
    return _has_command("strace")() and _succeeds("strace", "-o", os.devnull, "true")


def _has_free_loop_device() -> bool:
    return os.geteuid() == 0 and _has_command("losetup")() and _succeeds("losetup", "--find")


def _has_exfat() -> bool:
    return Path("/dev/fuse").exists() and all(_has_command(name)() for name in ("mkfs.exfat", "mount.exfat-fuse"))


def _has_slurm() -> bool:
    return all(_has_command(name)() for name in ("slurmctld", "slurmd", "sbatch", "munged"))


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False, env=_with_sbin()).returncode == 0


def _with_sbin() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SBIN}"}


# What a test can ask for: how it is found out, and what is said where it is missing.
NEEDS: Mapping[str, tuple[Callable[[], bool], str]] = {
    "strace": (_may_trace, "needs the Debian package strace, and the right to trace a process"),
    "xfsprogs": (_has_command("mkfs.xfs"), "needs the Debian package xfsprogs"),
    "exfat": (_has_exfat, "needs /dev/fuse and the Debian packages exfat-fuse and exfatprogs"),
    "e2fsprogs": (_has_command("mkfs.ext4"), "needs the Debian package e2fsprogs"),
    "root": (lambda: os.geteuid() == 0, "needs to be root"),
    "slurm": (_has_slurm, "needs the Debian packages slurmctld, slurmd, slurm-client and munge"),
    "faketime": (_has_command("faketime"), "needs the Debian package faketime"),
    "loop": (_has_free_loop_device, "needs root, a free loop device and the Debian package mount"),
}


@cache
def lacking(need: str) -> str | None:
    """Why a need is not met here; None if it is.

    Raises:
        KeyError: no such need is known.
    """
    is_met, reason = NEEDS[need]
    return None if is_met() else reason


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose needs are not met; on CI, where all are to be met, fail it."""
    for marker in item.iter_markers("needs"):
        for need in marker.args:
            if need not in NEEDS:
                pytest.fail(f"no such need: {need!r}; known are {', '.join(NEEDS)}", pytrace=False)
            reason = lacking(need)
            if reason and os.environ.get("CI", "").lower() in ("true", "1"):
                pytest.fail(f"{reason}; CI must have it", pytrace=False)
            if reason:
                pytest.skip(reason)


Tool = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def unbroken(tmp_path: Path) -> Tool:
    """The tool as a process of its own, started in ``tmp_path``; give it the arguments, get what it said."""

    def call(*arguments: str | Path, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "UNBROKEN_TRACEBACK")}
        return subprocess.run(
            [sys.executable, "-m", "unbroken", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**clean, **(env or {})},
        )

    return call
