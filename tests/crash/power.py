"""A real file system whose power can be cut: a loop mount, shut down without writing out its log.

Whatever was not synced is lost as it is when the plug is pulled; mounting again replays the journal as a boot does.
"""

import contextlib
import ctypes
import fcntl
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.patience import PATIENCE_S

# EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN are the same number; 2 means: do not even flush the log.
GOING_DOWN = 0x8004587D
WITHOUT_LOG_FLUSH = 2
MAKE = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f")}
SIZE_BYTES = {"ext4": 64 << 20, "xfs": 320 << 20}
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _run(*command: str, check: bool = True) -> int:
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "PATH": PATH})
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return done.returncode


class PoweredDisk:
    """A mounted file system in a file."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.mounted = directory / "mounted"
        self._image = directory / "image"
        self.mounted.mkdir()
        with self._image.open("wb") as image:
            image.truncate(SIZE_BYTES[kind])
        _run(*MAKE[kind], str(self._image))

    def plug_in(self) -> None:
        """Mount; the journal is replayed."""
        _run("mount", "-o", "loop", str(self._image), str(self.mounted))

    def unplug(self) -> None:
        """Unmount, waiting for what still holds the mount."""
        for _ in range(100):
            if _run("umount", str(self.mounted), check=False) == 0:
                break
            time.sleep(0.02)
        else:
            _run("umount", str(self.mounted))
        # A process in a mount namespace of its own, of another test, holds it too: mounted again now, it would still be
        # the file system that was shut down.
        give_up_at = time.monotonic() + PATIENCE_S
        while self._is_attached():
            assert time.monotonic() < give_up_at, f"{self._image} is still mounted somewhere"
            time.sleep(0.02)

    def _is_attached(self) -> bool:
        found = subprocess.run(["losetup", "-j", str(self._image)], check=True, capture_output=True, env={"PATH": PATH})
        return bool(found.stdout.strip())

    def sync(self) -> None:
        """Make everything durable."""
        with self._opened() as handle:
            assert ctypes.CDLL(None, use_errno=True).syncfs(handle) == 0

    def cut_power(self) -> None:
        """Lose what is not synced, and come back."""
        with self._opened() as handle:
            fcntl.ioctl(handle, GOING_DOWN, struct.pack("I", WITHOUT_LOG_FLUSH))
        self.unplug()
        self.plug_in()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        handle = os.open(self.mounted, os.O_RDONLY)
        try:
            yield handle
        finally:
            os.close(handle)


@contextlib.contextmanager
def powered_disk(kind: str, directory: Path) -> Iterator[PoweredDisk]:
    """A file system of a kind, unmounted again whatever happens."""
    disk = PoweredDisk(kind, directory)
    disk.plug_in()
    try:
        yield disk
    finally:
        disk.unplug()
