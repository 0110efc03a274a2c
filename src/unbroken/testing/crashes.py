"""Every way an action can be cut short, and every disk a reader may find after it.

``crash_points`` runs an action once to count its operations, then once per operation and fault. ``crash_states`` takes
the disk that was left and enumerates what a power cut may make of it. Together they turn "survives any crash" into a
loop over all crashes.
"""

import contextlib
import errno
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from unbroken.disk import Disk, NodeKind
from unbroken.errors import UnbrokenError
from unbroken.testing.durability import Tail
from unbroken.testing.faults import Fault, FaultyDisk, Kill, Killed, Operation, Refuse, Shorten, at_nth
from unbroken.testing.memory_disk import MemoryDisk

KILLS: Final[tuple[Fault, ...]] = (Kill("before"), Kill("during"))
"""Killed before each operation and in the middle of each write; after one is before the next."""

ERRORS: Final[tuple[Fault, ...]] = (
    Refuse(errno.EIO),
    Refuse(errno.ENOSPC),
    Refuse(errno.EDQUOT),
    Shorten(1),
    Shorten(1, then=errno.ENOSPC),
)
"""EIO, a full disk, an exceeded quota, and writes of one byte."""

_Disk = TypeVar("_Disk", bound=Disk)


@dataclass(frozen=True)
class Trial(Generic[_Disk]):
    """One run of an action: the fault it met and where, how it ended, and the disk it left.

    Attributes:
        disk: the disk, as the action left it.
        operations: all calls of the disk, in order.
        fault: the fault that was injected; None in the run without one.
        operation: the call that the fault met.
        returned: the result of the action.
        raised: the exception that ended the action.
    """

    disk: _Disk
    operations: tuple[Operation, ...]
    fault: Fault | None = None
    operation: Operation | None = None
    returned: object = None
    raised: BaseException | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the action returned, so that what it promises must hold."""
        return self.raised is None

    def __str__(self) -> str:
        return "no fault" if self.operation is None else f"{self.fault} at {self.operation}"


def crash_points(
    fresh: Callable[[], _Disk],
    action: Callable[[Disk], object],
    faults: Sequence[Fault] = KILLS,
    *,
    with_reads: bool = False,
) -> Iterator[Trial[_Disk]]:
    """Run an action undisturbed, then once for each operation that changes something and each fault that fits it.

    Args:
        fresh: makes the disk as it is before the action, new for each run.
        action: the action; it may raise I/O errors and errors of this library, anything else is a bug.
        faults: the faults to try.
        with_reads: also inject faults into operations that only read.

    Raises:
        RuntimeError: the action did other operations the second time, so that a fault did not occur.
    """
    undisturbed = _try(fresh(), action)
    yield undisturbed
    for operation in undisturbed.operations:
        for fault in faults:
            if (operation.is_mutating or with_reads) and fault.fits(operation):
                trial = _try(fresh(), action, operation, fault)
                if trial.operation is None:
                    raise RuntimeError(f"the action is not repeatable: {fault} never occurred at {operation}")
                yield trial


def _try(
    disk: _Disk, action: Callable[[Disk], object], operation: Operation | None = None, fault: Fault | None = None
) -> Trial[_Disk]:
    faulty = FaultyDisk(disk)
    if operation is not None and fault is not None:
        faulty = FaultyDisk(disk, at_nth(operation.name, operation.nth, fault))
    returned: object = None
    raised: BaseException | None = None
    try:
        returned = action(faulty)
    except (Killed, OSError, UnbrokenError) as end:
        raised = end
    faulty.release()
    return Trial(disk, tuple(faulty.operations), fault, faulty.struck, returned, raised)


def crash_states(
    disk: MemoryDisk, rng: random.Random | None = None, *, subsets: int = 16
) -> Iterator[tuple[str, MemoryDisk]]:
    """The distinct disks a reader may find after a power cut now, each with words that say which.

    Every prefix of the pending changes of names, as a file system with a journal leaves them, with all unsynced
    bytes lost and with all kept; all names with half of the unsynced bytes, and with zeros in their place. With
    ``rng`` also ``subsets`` random choices of changes, the weakest reading of POSIX, in which each file draws for
    itself what becomes of its bytes.
    """
    seen = set[tuple[tuple[str, str | bytes | None], ...]]()

    def unseen(found: MemoryDisk) -> bool:
        state = tuple(sorted(tree(found).items()))
        if state in seen:
            return False
        seen.add(state)
        return True

    for words, found in _outcomes(disk, rng, subsets):
        if unseen(found):
            yield words, found


def _outcomes(disk: MemoryDisk, rng: random.Random | None, subsets: int) -> Iterator[tuple[str, MemoryDisk]]:
    total = len(disk.pending)
    for count in range(total + 1):
        for tail in (Tail.LOST, Tail.KEPT):
            words = f"{count} of {total} unsynced changes of names survive, unsynced bytes {tail.value}"
            yield words, disk.after_crash(names=range(count), tail=tail)
    for tail in (Tail.HALF, Tail.ZEROED):
        yield f"all names survive, unsynced bytes {tail.value}", disk.after_crash(names="all", tail=tail)
    if rng is None:
        return
    for _ in range(subsets):
        chosen = rng.sample(range(total), rng.randint(0, total))
        words = f"of {total} unsynced changes of names {sorted(chosen)} survive, unsynced bytes at random"
        yield words, disk.after_crash(names=chosen, tail=rng)


def tree(disk: Disk, root: Path = Path("/")) -> dict[str, str | bytes | None]:
    """All below a directory by relative path: a file's bytes, a link's target, None for a directory."""
    found: dict[str, str | bytes | None] = {}
    waiting = [root]
    while waiting:
        directory = waiting.pop()
        for node in disk.list_directory(directory):
            path = directory / node.name
            name = str(path.relative_to(root))
            if node.kind is NodeKind.DIRECTORY:
                found[name] = None
                waiting.append(path)
            elif node.kind is NodeKind.LINK:
                found[name] = disk.read_link(path)
            else:
                found[name] = _bytes_of(disk, path)
    return found


def _bytes_of(disk: Disk, path: Path) -> bytes:
    handle = disk.open(path)
    with contextlib.ExitStack() as stack:
        stack.callback(disk.close, handle)
        buffer = memoryview(bytearray(disk.status(path).size_bytes))
        taken = disk.read_at(handle, 0, buffer)
        return bytes(buffer[:taken])
