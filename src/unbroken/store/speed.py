"""How fast a directory takes bytes that must survive a power cut, measured with a scratch file."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from unbroken.disk import NodeKind
from unbroken.files import LOCAL, Files

PREFIX: Final = ".unbroken-disk-speed-"
SIZE_BYTES: Final = 64 << 20
_CHUNK_BYTES: Final = 4 << 20


def write_speed(
    directory: Path,
    *,
    clock: Callable[[], float],
    token: str,
    content: Callable[[int], bytes],
    files: Files = LOCAL,
    size_bytes: int = SIZE_BYTES,
) -> float:
    """Bytes per second, synced, into a directory.

    Args:
        directory: where; it exists.
        clock: seconds that never go back.
        token: a word that no other process uses, for the name of the scratch file.
        content: that many bytes that no file system can shrink: random ones.
        files: how the file is written.
        size_bytes: how many bytes are written.

    Raises:
        StorageFailed: the system refused.
    """
    for node in files.list_directory(directory):
        if node.name.startswith(PREFIX) and node.kind is NodeKind.FILE:
            # crash here: fewer scratch files of killed ones, which no reader looks at.
            files.remove_file(directory / node.name)
    chunk = content(min(_CHUNK_BYTES, size_bytes))
    scratch = directory / f"{PREFIX}{token}"
    started_s = clock()
    # crash here: a scratch file, which the next measurement removes.
    written = files.write_new(scratch, (chunk for _ in range(max(size_bytes // len(chunk), 1))))
    took_s = max(clock() - started_s, 1e-6)
    # crash here: the same.
    files.remove_file(scratch)
    return written / took_s
