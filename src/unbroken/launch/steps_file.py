"""The steps a job has completed, told to its launcher one by one, so that a step that kills it can be named.

Metrics are read from the device now and then and the live snapshot is written once a second: after a kill neither says
which step was being computed. A line of some bytes in the launcher's own temporary directory does, for microseconds.
"""

import contextlib
from pathlib import Path
from typing import Final

from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Files

_TAIL_BYTES: Final = 256


def path_of(outcome: Path) -> Path:
    """Where the steps stand: beside the outcome of the same job."""
    return outcome.with_name(f"{outcome.name}.steps")


class StepsWriter:
    """Tells each completed step; what storage refuses is not told."""

    def __init__(self, path: Path, files: Files = LOCAL) -> None:
        self._appender = files.appending(path)
        self._is_refused = False
        # Another job of the same launcher may have been killed inside its last line.
        self._before = "\n"

    def write(self, step: int) -> None:
        """Tell one step."""
        if self._is_refused:
            return
        try:
            # crash here: the last line may be cut, and a reader passes it by.
            self._appender.append(f"{self._before}{step}\n".encode())
            self._before = ""
        except StorageFailed:
            # A full temporary directory costs the name of a step, never the training, and is not asked again.
            self._is_refused = True

    def close(self) -> None:
        """Give the file back."""
        self._is_refused = True
        with contextlib.suppress(StorageFailed):
            self._appender.close()


def last_step(path: Path, *, files: Files = LOCAL) -> int | None:
    """The last step that was told whole; None where none was, or nothing can be read."""
    try:
        found = files.find(path)
        if found is None:
            return None
        buffer = bytearray(min(found.size_bytes, _TAIL_BYTES))
        with files.reading(path) as source:
            taken = source.fill(max(0, found.size_bytes - len(buffer)), memoryview(buffer)) if buffer else 0
    except StorageFailed:
        return None
    whole = bytes(buffer[:taken]).split(b"\n")[:-1]
    return next((int(line) for line in reversed(whole) if line.isdigit()), None)
