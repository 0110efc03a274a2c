"""Host memory for a save beside training, and how an out-of-memory error is told from other failures.

A save that finds no memory is given up and tried again later; a device that broke, or a mistake of ours, is neither.
"""

import contextlib
from collections.abc import Iterator
from typing import Final

from unbroken.errors import NoMemory, UnbrokenError

# Torch has no type of its own for this: its allocators, the pinning of memory and the starting of threads say it in
# words. An error of a broken device is none of these.
_SAYINGS: Final = ("can't allocate memory", "not enough memory", "out of memory", "can't start new thread")


@contextlib.contextmanager
def asking_for_memory(needed_bytes: int | None = None) -> Iterator[None]:
    """Give the want of memory its name; every other error passes as it is.

    Raises:
        NoMemory: there was none.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as refused:
        if isinstance(refused, UnbrokenError) or not is_shortage(refused):
            raise
        said = " ".join(str(refused).split()) or type(refused).__name__
        raise NoMemory(needed_bytes=needed_bytes, cause=said) from refused


def is_shortage(error: BaseException) -> bool:
    """Whether an error means that there was no memory, or no thread."""
    return isinstance(error, MemoryError) or any(saying in str(error) for saying in _SAYINGS)
