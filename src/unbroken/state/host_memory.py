"""Host memory for a save beside training, and how an out-of-memory error is distinguished from other failures.

Memory is mapped in huge pages and then registered with CUDA, which makes 16 GB ready in about a second; torch's own
pinned allocator takes seven and holds up the whole process meanwhile. A save that finds no memory is given up and tried
again later; a device that broke, or a mistake of ours, is neither.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import time
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from unbroken.errors import NoMemory, UnbrokenError
from unbroken.torch_private import empty_host_cache

# Torch has no type of its own for this: its allocators, the pinning of memory and the starting of threads say it in
# words. An error of a broken device is none of these.
_SAYINGS: Final = ("can't allocate memory", "not enough memory", "out of memory", "can't start new thread")


_GROUPS: Final = Path("/sys/fs/cgroup")
# The limit, what is used of it, and what is used for cached files.
_VERSION_1: Final = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    frozenset({"total_active_file", "total_inactive_file"}),
)
_VERSION_2: Final = ("memory.max", "memory.current", frozenset({"active_file", "inactive_file"}))


@contextlib.contextmanager
def asking_for_memory(needed_bytes: int | None = None) -> Iterator[None]:
    """Give the want of memory its name; every other error passes as it is.

    Raises:
        NoMemory: there was none.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as refused:
        if isinstance(refused, UnbrokenError) or not is_shortage(refused):
            raise
        said = " ".join(str(refused).split()) or type(refused).__name__
        raise NoMemory(needed_bytes=needed_bytes, cause=said) from refused


def is_shortage(error: BaseException) -> bool:
    """Whether an error means that there was no memory, or no thread."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or any(saying in str(error) for saying in _SAYINGS)


def available_bytes() -> int | None:
    """How much memory this process can still get, by the kernel's estimate and all limits; None if unknown."""
    found = [*_of_machine(), *_of_control_groups(), *_of_limits()]
    return min(found, default=None)


def _of_machine() -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) << 10


def _of_control_groups(membership: Path = Path("/proc/self/cgroup"), root: Path = _GROUPS) -> Iterator[int]:
    """What the groups of this process leave to it.

    The limit may be that of any group above: SLURM limits the job and starts the process in a group of its task.
    """
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            number, _, rest = line.partition(":")
            controllers, _, own = rest.partition(":")
            if number == "0":
                version, tops = _VERSION_2, [root, root / "unified"]
            elif "memory" in controllers.split(","):
                version, tops = _VERSION_1, [root / "memory"]
            else:
                continue
            inside = Path(own.lstrip("/"))
            for top in tops:
                for group in (inside, *inside.parents):
                    yield from _left_in(top / group, *version)


def _left_in(group: Path, limit: str, used: str, cached: Collection[str]) -> Iterator[int]:
    # "max" means no limit; and a container may not see the groups above its own.
    with contextlib.suppress(OSError, ValueError):
        room_bytes = int((group / limit).read_text()) - int((group / used).read_text())
        pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The kernel drops what it has cached of files before it kills anybody.
        yield max(0, room_bytes + sum(int(size) for name, size in pairs if name in cached))


def _of_limits() -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = [int(each) for each in Path("/proc/self/statm").read_text().split()]
        for limit, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
            most_bytes, _ = resource.getrlimit(limit)
            if most_bytes != resource.RLIM_INFINITY:
                yield max(0, most_bytes - used * mmap.PAGESIZE)


class Arena:
    """A stretch of host memory, for a GPU's copies if ``device`` is one; given back by ``close`` or with the object.

    It has no pages until it is written to, or made ready.
    """

    def __init__(self, size_bytes: int, device: torch.device | None) -> None:
        self.device = device
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Not for the workers of a data loader: a fork would copy what is pinned.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):
                memory.madvise(advice)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._unregister: Any = None
        _LIVING.add(self)

    def make_ready(self) -> float:
        """Let the kernel give it all its pages, and pin them for a GPU; returns how many seconds that pinning took.

        Pages are given without the interpreter lock; pinning holds up what other threads send to the GPU.
        """
        # In slices that torch does not share out to other threads: they belong to the training loop.
        for start in range(0, self.size_bytes, _TOUCHED_BYTES):
            self.tensor[start : start + _TOUCHED_BYTES : mmap.PAGESIZE].zero_()
        began = time.monotonic()
        if self.device is not None:
            self._pin(self.device)
        return time.monotonic() - began

    @property
    def size_bytes(self) -> int:
        """How many bytes it has."""
        return self.tensor.numel()

    def _pin(self, device: torch.device) -> None:
        cudart, address = torch.cuda.cudart(), self.tensor.data_ptr()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            if int(cudart.cudaHostRegister(address, self.size_bytes, _PORTABLE)) == 0:
                self._unregister = weakref.finalize(self, cudart.cudaHostUnregister, address)
                self._unregister.atexit = False
            else:
                # A system that cannot register memory: torch has its own way.
                self.tensor = torch.empty(self.size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def close(self) -> None:
        """Give the memory back; nothing may be copied to or from it any more."""
        if self._unregister is not None:
            self._unregister()
        elif self.device is not None:
            self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
            # torch keeps freed pinned memory for itself, and no later tensor of the script is as large as an arena.
            empty_host_cache()

    def _leave_to_parent(self) -> None:
        """In a forked child: never unmap or unregister it."""
        if self._unregister is not None:
            self._unregister.detach()
        self._unregister = self.device = None
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


_LIVING: "weakref.WeakSet[Arena]" = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    # The addresses are free in a child, and may soon hold other memory of it: to unmap them would take that away.
    for arena in list(_LIVING):
        arena._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)

_TOUCHED_BYTES: Final = 64 << 20
# Of ``cudaHostRegister``: for every context of this process, not for one device alone.
_PORTABLE: Final = 1
