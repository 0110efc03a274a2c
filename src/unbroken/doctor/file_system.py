"""What the file system of a directory can do, tried out in a scratch directory that is removed again.

The trials are the library's own moves (``Files``): what works here works in a save. Nothing outside the scratch
directory is written, renamed or removed, except the scratch directories of earlier calls that were killed.
"""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.disk import NodeKind
from unbroken.doctor.finding import CheckResult, note, problem
from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.quoting import amounts
from unbroken.store.capacity import RESERVE_BYTES, RESERVE_INODES, SIZE_BYTES, write_speed

PREFIX: Final = ".unbroken-doctor-"
_OURS: Final = re.compile(rf"{re.escape(PREFIX)}[0-9a-f]{{16}}")
# A trial takes seconds: whoever made an older scratch directory is gone.
_LEFT_AFTER_NS: Final = 3600 * 10**9
# Some file systems store times in steps of two seconds.
_CLOCK_STEP_S: Final = 2.0
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_NOT_ALLOWED: Final = frozenset({os.strerror(errno.EACCES), os.strerror(errno.EPERM), os.strerror(errno.EROFS)})
_FULL: Final = frozenset({os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)})


@dataclass(frozen=True)
class Surroundings:
    """What a trial takes from outside.

    Attributes:
        clock: seconds since 1970.
        monotonic: seconds that never go back.
        token: 16 hexadecimal digits that no other process uses.
        content: that many bytes that no file system can shrink.
        mounts: the text of ``/proc/self/mountinfo``; empty where there is none.
        speed_bytes: how many bytes are written to measure the speed.
    """

    clock: Callable[[], float]
    monotonic: Callable[[], float]
    token: str
    content: Callable[[int], bytes]
    mounts: str = ""
    speed_bytes: int = SIZE_BYTES


def examine(directory: Path, around: Surroundings, files: Files | None = None) -> Generator[CheckResult, None, None]:
    """Every finding about the file system of a directory, one after the other.

    The scratch directory is removed when the generator ends or is closed.
    """
    files = Files(LOCAL.disk, logs_lacking=False) if files is None else files
    try:
        if not _is_directory(directory, files):
            is_there = files.find(directory) is not None
            text = f"{directory} is not a directory" if is_there else f"{directory} does not exist"
            yield problem("directory", "not-a-directory" if is_there else "path-missing", text, path=str(directory))
            return
        yield CheckResult("directory", str(directory.absolute()), values={"path": str(directory.absolute())})
        yield _mount(directory, around.mounts)
        yield _room(directory, files)
    except StorageFailed as refused:
        yield _refused("directory", refused)
        return
    scratch = directory / f"{PREFIX}{around.token}"
    try:
        # crash here: an empty scratch directory, which a later call removes.
        files.make_directory(scratch)
        yield from _tried(scratch, around, files)
        _remove_left(directory, scratch, files)
    except StorageFailed as refused:
        yield _refused("writing", refused)
    finally:
        with contextlib.suppress(StorageFailed):
            # crash here: a scratch directory with fewer entries, which a later call removes.
            files.remove_tree(scratch)


def _is_directory(directory: Path, files: Files) -> bool:
    found = files.find(directory)
    if found is None or found.kind is not NodeKind.LINK:
        return found is not None and found.kind is NodeKind.DIRECTORY
    try:
        return directory.is_dir()
    except OSError:
        return False


def _refused(subject: str, refused: StorageFailed) -> CheckResult:
    kind = "not-writable" if refused.cause in _NOT_ALLOWED else "no-room" if refused.cause in _FULL else refused.kind
    return problem(subject, kind, f"could not {refused.operation}: {refused.cause}", cause=refused.cause)


# ---- without writing ----


def _mount(directory: Path, mounts: str) -> CheckResult:
    found = mount_of(directory.resolve(), mounts)
    if found is None:
        return CheckResult("file system", "unknown: the system does not say", values={"type": None, "mounted_at": None})
    kind, place = found
    values = {"type": kind, "mounted_at": place}
    text = f"{kind}, mounted at {place}"
    if kind in _IN_MEMORY:
        return note("file system", "in-memory", f"{text}: its files are in memory and are lost at a reboot", **values)
    if kind == "overlay":
        return note("file system", "in-container", f"{text}: its files are lost with the container", **values)
    return CheckResult("file system", text, values=values)


def mount_of(directory: Path, mounts: str) -> tuple[str, str] | None:
    """Type and mount point of the file system of an absolute path, from the text of ``mountinfo``."""
    best: tuple[str, str] | None = None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        words = before.split(" ")
        if len(words) < 5 or not after:
            continue
        place = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[4])
        # Of two mounts at one place, the later one is seen.
        if directory.is_relative_to(place) and (best is None or len(place) >= len(best[1])):
            best = (after.split(" ")[0], place)
    return best


def _room(directory: Path, files: Files) -> CheckResult:
    space = files.space(directory)
    inodes = "" if space.free_inodes is None else f", {amounts.plural(space.free_inodes, 'inode')}"
    text = f"{amounts.size(space.free_bytes)} of {amounts.size(space.total_bytes)}{inodes}"
    values = {
        "free_bytes": space.free_bytes,
        "total_bytes": space.total_bytes,
        "free_inodes": space.free_inodes,
    }
    has_inodes = space.free_inodes is None or space.free_inodes >= RESERVE_INODES
    if space.free_bytes >= RESERVE_BYTES and has_inodes:
        return CheckResult("free space", text, values=values)
    reserve = f"every save leaves {amounts.size(RESERVE_BYTES)} and {RESERVE_INODES} inodes free"
    return problem("free space", "no-room", f"{text}: nothing can be saved ({reserve})", **values)


# ---- trials ----


def _tried(scratch: Path, around: Surroundings, files: Files) -> Iterator[CheckResult]:
    trials: tuple[tuple[str, Callable[[], CheckResult]], ...] = (
        ("rename", lambda: _rename(scratch, files)),
        ("directory fsync", lambda: _directory_fsync(scratch, files)),
        ("hard links", lambda: _hard_links(scratch, files)),
        ("symlinks", lambda: _symlinks(scratch, files)),
        ("direct I/O", lambda: _direct_io(scratch, files)),
        ("clock", lambda: _clock(scratch, around, files)),
        ("disk speed", lambda: _speed(scratch, around, files)),
    )
    for subject, trial in trials:
        try:
            yield trial()
        except StorageFailed as refused:
            yield _refused(subject, refused)


def _rename(scratch: Path, files: Files) -> CheckResult:
    path, draft = scratch / "file", scratch / "draft"
    files.write_new(path, [b"old"])
    # crash here: the old content or the new one, in a scratch directory.
    files.replace(path, b"new", scratch="file-beside")
    # crash here: the directory under one of its two names, in a scratch directory.
    files.make_directory(draft)
    files.publish(draft, scratch / "published")
    is_whole = files.read_bytes(path, limit_bytes=16) == b"new" and files.find(scratch / "published") is not None
    if not is_whole or files.find(draft) is not None:
        return problem("rename", "rename-broken", "a renamed file or directory is not where it was moved to")
    return CheckResult("rename", "replaces a file in one step")


def _directory_fsync(scratch: Path, files: Files) -> CheckResult:
    files.sync_directory(scratch)
    if "directory fsync" in files.lacking:
        text = "not supported: a power cut may take back a committed checkpoint"
        return note("directory fsync", "no-directory-fsync", text)
    return CheckResult("directory fsync", "works")


def _hard_links(scratch: Path, files: Files) -> CheckResult:
    # crash here: a file, whole, in a scratch directory.
    files.create_once(scratch / "claimed", b"one", scratch="claim")
    if "hard links" in files.lacking:
        return note("hard links", "no-hard-links", "not supported: the lease of a run is taken in another way")
    return CheckResult("hard links", "work")


def _symlinks(scratch: Path, files: Files) -> CheckResult:
    # crash here: a link in a scratch directory.
    files.swap_link(scratch / "latest", "file", scratch="link")
    if "symlinks" in files.lacking:
        return note("symlinks", "no-symlinks", "not supported: there is no link `latest` to the newest checkpoint")
    return CheckResult("symlinks", "work")


def _direct_io(scratch: Path, files: Files) -> CheckResult:
    has_it = files.has_direct_io(scratch / "file")
    return CheckResult(
        "direct I/O", "works" if has_it else "not supported (unbroken does not need it)", values={"has": has_it}
    )


def _clock(scratch: Path, around: Surroundings, files: Files) -> CheckResult:
    path, before_s = scratch / "clock", around.clock()
    # crash here: an empty file in a scratch directory.
    files.write_new(path, [])
    found, after_s = files.find(path), around.clock()
    stamped_s = before_s if found is None else found.modified_ns / 1e9
    # How far it lies outside the time in which it was written.
    off_s = min(0.0, stamped_s - before_s) + max(0.0, stamped_s - after_s)
    values = {"ahead_s": round(off_s, 3)}
    if abs(off_s) <= _CLOCK_STEP_S:
        return CheckResult("clock", "the file system's agrees with this machine's", values=values)
    way = "ahead of" if off_s > 0 else "behind"
    text = f"the file system's is {amounts.duration(abs(off_s))} {way} this machine's"
    return note("clock", "clock-differs", text, **values)


def _speed(scratch: Path, around: Surroundings, files: Files) -> CheckResult:
    needed_bytes = 8 * around.speed_bytes
    if files.space(scratch).free_bytes < needed_bytes:
        text = f"not measured: less than {amounts.size(needed_bytes)} free"
        return note("disk speed", "not-measured", text, write_bytes_per_s=None)
    found = write_speed(
        scratch,
        clock=around.monotonic,
        token=around.token,
        content=around.content,
        files=files,
        size_bytes=around.speed_bytes,
    )
    text = f"writes {amounts.size(int(found))}/s, synced"
    return CheckResult("disk speed", text, values={"write_bytes_per_s": round(found)})


def _remove_left(directory: Path, scratch: Path, files: Files) -> None:
    """Remove what calls left that were killed; by the file system's own clock, since other machines write here too."""
    now = files.find(scratch)
    for node in files.list_directory(directory):
        path = directory / node.name
        if node.kind is not NodeKind.DIRECTORY or not _OURS.fullmatch(node.name) or path == scratch or now is None:
            continue
        found = files.find(path)
        if found is not None and found.modified_ns < now.modified_ns - _LEFT_AFTER_NS:
            # crash here: fewer scratch directories of killed calls.
            files.remove_tree(path)
