"""What a file system can do is found out by doing it, and nothing stays behind."""

import errno
import os
import time
from pathlib import Path

import pytest

from tests.crash.test_file_systems import KINDS as LACKING
from tests.crash.test_file_systems import LINKS, SYMLINKS, SYNC, lacking
from unbroken.disk import Disk, LocalDisk
from unbroken.doctor.file_system import PREFIX, Surroundings, examine, mount_of
from unbroken.doctor.finding import CheckResult, Severity
from unbroken.files import Files
from unbroken.testing import FaultyDisk, MemoryDisk
from unbroken.testing.faults import Plan

TOKEN = "0123456789abcdef"
SUBJECTS = [
    *("directory", "file system", "free space", "rename", "directory fsync", "hard links", "symlinks"),
    *("direct I/O", "clock", "disk speed"),
]
KIND_OF = {LINKS: "no-hard-links", SYMLINKS: "no-symlinks", SYNC: "no-directory-fsync"}


def around(**changes: object) -> Surroundings:
    usual: dict[str, object] = {
        "clock": time.time, "monotonic": time.monotonic, "token": TOKEN, "content": bytes, "speed_bytes": 1 << 16,
    }  # fmt: skip
    return Surroundings(**{**usual, **changes})  # type: ignore[arg-type]


def findings(directory: Path, plan: Plan = lambda _: None, **changes: object) -> dict[str, CheckResult]:
    """What is found, by subject; the directory holds afterwards exactly what it held before."""
    before = sorted(directory.rglob("*")) if os.path.isdir(directory) else []
    found = list(examine(directory, around(**changes), Files(FaultyDisk(LocalDisk(), plan), logs_lacking=False)))
    assert (sorted(directory.rglob("*")) if os.path.isdir(directory) else []) == before
    return {each.subject: each for each in found}


def kinds(found: dict[str, CheckResult], level: Severity) -> set[str | None]:
    return {each.kind for each in found.values() if each.level is level}


@pytest.mark.promise("U16")
def test_on_a_usual_file_system_all_is_well(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    found = findings(tmp_path)
    assert list(found) == SUBJECTS
    assert {each.level for each in found.values()} == {Severity.OK}
    assert found["disk speed"].values["write_bytes_per_s"] > 0
    assert found["free space"].values["free_bytes"] == pytest.approx(os.statvfs(tmp_path).f_bavail * 4096, rel=0.5)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


@pytest.mark.promise("U16")
@pytest.mark.parametrize(("plan", "lacks"), LACKING.values(), ids=LACKING.keys())
def test_what_it_lacks_is_a_note_each_and_everything_else_is_tried(
    tmp_path: Path, plan: Plan, lacks: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = findings(tmp_path, plan)
    assert list(found) == SUBJECTS
    assert kinds(found, Severity.NOTE) == {KIND_OF[lack] for lack in lacks}
    assert not kinds(found, Severity.PROBLEM)
    # The finding says it; the log does not say it again.
    assert not caplog.messages


def test_missing_direct_io_is_reported(tmp_path: Path) -> None:
    assert findings(tmp_path)["direct I/O"].values["has"] is True
    assert findings(tmp_path, lacking(errno.EINVAL, "open_direct"))["direct I/O"].values["has"] is False


REFUSALS = {
    "read-only": (lacking(errno.EROFS, "make_directory"), "writing", "not-writable"),
    "not permitted": (lacking(errno.EACCES, "make_directory"), "writing", "not-writable"),
    "full": (lacking(errno.ENOSPC, "write"), "rename", "no-room"),
    "over quota": (lacking(errno.EDQUOT, "write"), "disk speed", "no-room"),
    "a failing disk": (lacking(errno.EIO, "sync_file"), "rename", "storage-failed"),
    "no rename": (lacking(errno.EXDEV, "rename"), "rename", "storage-failed"),
}


@pytest.mark.promise("U16")
@pytest.mark.parametrize(("plan", "subject", "kind"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_refusal_is_a_problem_with_the_systems_words(tmp_path: Path, plan: Plan, subject: str, kind: str) -> None:
    found = findings(tmp_path, plan)
    assert (found[subject].level, found[subject].kind) == (Severity.PROBLEM, kind)
    assert found[subject].values["cause"] in found[subject].text


def test_a_rename_that_copies_is_a_problem(tmp_path: Path) -> None:
    class Copying(LocalDisk):
        def rename(self, source: Path, target: Path) -> None:
            if source.is_dir():
                target.mkdir()
            else:
                super().rename(source, target)

    found = {each.subject: each for each in examine(tmp_path, around(), Files(Copying()))}
    assert found["rename"].kind == "rename-broken"
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_no_directory_is_one_problem_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "link").symlink_to(tmp_path)
    assert kinds(findings(tmp_path / "absent"), Severity.PROBLEM) == {"path-missing"}
    assert kinds(findings(tmp_path / "file"), Severity.PROBLEM) == {"not-a-directory"}
    assert kinds(findings(tmp_path / "dangling"), Severity.PROBLEM) == {"not-a-directory"}
    assert kinds(findings(tmp_path / "circle"), Severity.PROBLEM) == {"not-a-directory"}
    assert kinds(findings(tmp_path / "file" / "below"), Severity.PROBLEM) == {"path-missing"}
    assert kinds(findings(tmp_path / ("n" * 300)), Severity.PROBLEM) == {"path-missing"}
    assert list(findings(tmp_path / "link")) == SUBJECTS
    assert {path.name for path in tmp_path.iterdir()} == {"file", "dangling", "circle", "link"}


def test_a_full_disk_is_a_problem_before_anything_is_written() -> None:
    disk = MemoryDisk([Path("/runs")], capacity_bytes=1 << 20)
    found = {each.subject: each for each in examine(Path("/runs"), around(speed_bytes=1 << 18), Files(disk))}
    assert found["free space"].kind == "no-room"
    assert found["disk speed"].kind == "not-measured"
    disk = MemoryDisk([Path("/runs")], capacity_inodes=12)
    found = {each.subject: each for each in examine(Path("/runs"), around(), Files(disk))}
    assert found["free space"].kind == "no-room"


@pytest.mark.parametrize(("shift_s", "kind"), [(-3600.0, "clock-differs"), (0.0, None), (90.0, "clock-differs")])
def test_the_clocks_are_compared(tmp_path: Path, shift_s: float, kind: str | None) -> None:
    found = findings(tmp_path, clock=lambda: time.time() + shift_s)["clock"]
    assert found.kind == kind
    assert found.values["ahead_s"] == pytest.approx(-shift_s, abs=2.0)


def test_a_generator_that_is_closed_midway_removes_its_directory(tmp_path: Path) -> None:
    trials = examine(tmp_path, around())
    while next(trials).subject != "hard links":
        pass
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}{TOKEN}"]
    trials.close()
    assert not list(tmp_path.iterdir())


def test_the_leftovers_of_killed_calls_are_removed_an_hour_later_and_nothing_else(tmp_path: Path) -> None:
    old, young, foreign = (tmp_path / f"{PREFIX}{end}" for end in ("0" * 16, "1" * 16, "notes"))
    for path in (old, young, foreign):
        path.mkdir()
        (path / "file").write_text("half")
    (tmp_path / f"{PREFIX}{'2' * 16}").write_text("a file of somebody")
    for path in (old, foreign, tmp_path / f"{PREFIX}{'2' * 16}"):
        os.utime(path, (0, 0))
    assert list(examine(tmp_path, around()))
    assert {path.name for path in tmp_path.iterdir()} == {young.name, foreign.name, f"{PREFIX}{'2' * 16}"}


MOUNTS = r"""
24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
25 24 0:22 / /dev/shm rw - tmpfs tmpfs rw
26 24 0:30 / /scratch\040space rw,relatime - nfs4 server:/x rw
27 24 0:31 / /home rw - ext4 /dev/b rw
28 27 0:32 / /home rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/var/x", ("ext4", "/")),
        ("/dev/shm/a/b", ("tmpfs", "/dev/shm")),
        ("/dev/shmall", ("ext4", "/")),
        ("/scratch space/runs", ("nfs4", "/scratch space")),
        ("/home", ("overlay", "/home")),
    ],
)
def test_the_mount_of_a_path_is_the_last_and_longest(path: str, found: tuple[str, str]) -> None:
    assert mount_of(Path(path), MOUNTS) == found


def test_files_in_memory_or_in_a_container_are_noted_and_unknown_mounts_are_no_error() -> None:
    def kind(mounts: str) -> str | None:
        disk: Disk = MemoryDisk([Path("/runs")])
        found = {each.subject: each for each in examine(Path("/runs"), around(mounts=mounts), Files(disk))}
        return found["file system"].kind

    line = "24 1 254:0 / / rw - {} x rw\n"
    assert [kind(line.format(name)) for name in ("ext4", "tmpfs", "overlay")] == [None, "in-memory", "in-container"]
    assert kind("") is None and kind("nonsense\n24 1 - \n") is None
