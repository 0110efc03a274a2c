"""A small file system of its own, which can really be full. Needs root, and a system that lets root mount.

If there can be none, the reason is reported: a proof must name the faults it left out.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_BALLAST: Final = ".ballast"
_PIECE_BYTES: Final = 1 << 20


def why_not(folder: Path) -> str | None:
    """Why there can be no small file system here; None if there can be one."""
    if os.geteuid() != 0:
        return "mounting a small file system needs root"
    place = folder / "mount-tried"
    place.mkdir()
    try:
        with mounted(place, _PIECE_BYTES):
            return None
    except OSError as refusal:
        return f"mount failed: {refusal}"
    finally:
        place.rmdir()


@contextlib.contextmanager
def mounted(place: Path, size_bytes: int) -> Iterator[None]:
    """A file system of this size at an empty directory while the block runs; what is on it is lost then.

    Raises:
        OSError: an I/O error.
    """
    _ask("mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0755", "tmpfs", str(place))
    try:
        yield
    finally:
        _ask("umount", "-l", str(place))


def _ask(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise OSError(" ".join((ended.stderr or ended.stdout).split()) or f"{command[0]} ended with {ended.returncode}")


def fill(place: Path) -> int:
    """Take every byte that is free; returns how many."""
    taken = 0
    with (place / _BALLAST).open("wb", buffering=0) as ballast:
        piece = bytes(_PIECE_BYTES)
        while piece:
            try:
                taken += ballast.write(piece)
            except OSError:
                # The last page too: smaller and smaller pieces, until not even one byte fits.
                piece = piece[: len(piece) // 2]
    return taken


def empty(place: Path) -> None:
    """Give the bytes back."""
    (place / _BALLAST).unlink(missing_ok=True)


def keep(place: Path, beside: Path) -> None:
    """Copy what is on a small file system to a place that stays."""
    shutil.copytree(place, beside, symlinks=True)
