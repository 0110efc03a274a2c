"""A disk that counts operations and injects faults: I/O errors, short writes, ignored syncs, kills.

``FaultyDisk`` wraps any other ``Disk``. A plan maps each operation to a fault, or to none. After a ``Kill`` nothing
more reaches the wrapped disk: a dead process does no cleanup.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn, TypeVar

from unbroken.disk import Disk, Node, Space, Status

MUTATING: Final = frozenset(
    {
        "make_directory",
        "create",
        "open_append",
        "write",
        "sync_file",
        "sync_directory",
        "rename",
        "link",
        "make_symlink",
        "unlink",
        "remove_directory",
    }
)
_SYNCS: Final = frozenset({"sync_file", "sync_directory"})
_NAME_CHANGES: Final = frozenset({"make_directory", "rename", "link", "make_symlink", "unlink", "remove_directory"})
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Operation:
    """One call of a disk: the ``index``-th of all, the ``nth`` of its name, both from 0.

    A call on a handle reports the path the handle was opened with; a rename or link reports its target.

    Attributes:
        index: its number among all calls, from 0.
        name: the name of the method.
        nth: its number among the calls of this method, from 0.
        path: the file or directory; of a rename or link the target.
        source: of a rename or link, where it was.
        is_mutating: whether it changes the disk.
    """

    index: int
    name: str
    nth: int
    path: Path
    source: Path | None = None
    is_mutating: bool = False

    def __str__(self) -> str:
        where = self.path if self.source is None else f"{self.source} -> {self.path}"
        return f"operation {self.index}, {self.name} {where}"


@dataclass(frozen=True)
class Refuse:
    """The operation fails with an errno and does nothing; a failed ``close`` still frees the handle, as on Linux."""

    code: int

    def fits(self, operation: Operation) -> bool:
        """Every operation can fail."""
        return True


@dataclass(frozen=True)
class Shorten:
    """A write takes at most ``taken_bytes``; with ``then``, the next write to that file fails with this code."""

    taken_bytes: int
    then: int | None = None

    def fits(self, operation: Operation) -> bool:
        """Only writes can be short."""
        return operation.name == "write"


@dataclass(frozen=True)
class Kill:
    """The process ends before the operation, after it, or during it: a write of which half arrives.

    By default the end is ``Killed``, raised here and by every later operation; with ``really`` it is SIGKILL to this
    process, for tests that run one of their own.
    """

    moment: Literal["before", "during", "after"] = "before"
    really: bool = False

    def fits(self, operation: Operation) -> bool:
        """Only writes have a middle; everything else is atomic."""
        return self.moment != "during" or operation.name == "write"


@dataclass(frozen=True)
class Ignore:
    """A sync that succeeds and does nothing: a lying disk, or a forgotten sync."""

    def fits(self, operation: Operation) -> bool:
        """Only syncs can be ignored without an immediate effect."""
        return operation.name in _SYNCS


@dataclass(frozen=True)
class Repeat:
    """A network file system executes the request, loses the reply and retries: the second reply is returned."""

    def fits(self, operation: Operation) -> bool:
        """Only changes of names have another result the second time."""
        return operation.name in _NAME_CHANGES


Fault = Refuse | Shorten | Kill | Ignore | Repeat
"""What can go wrong in one operation."""
Plan = Callable[[Operation], Fault | None]
"""Decides for each operation which fault it meets, or None."""


class Killed(BaseException):
    """The process is dead. Not an ``Exception`` or ``OSError``, so that nothing handles it as an I/O error."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(f"killed at {operation}")
        self.operation = operation


def never(operation: Operation) -> Fault | None:
    """The plan in which nothing goes wrong."""
    del operation
    return None


def at(index: int, fault: Fault) -> Plan:
    """The plan that strikes the operation with this index."""
    return lambda operation: fault if operation.index == index else None


def at_nth(name: str, nth: int, fault: Fault) -> Plan:
    """The plan that strikes the nth operation of one name; steadier than an index where threads run side by side."""
    return lambda operation: fault if (operation.name, operation.nth) == (name, nth) else None


def always(name: str, fault: Fault) -> Plan:
    """The plan that strikes every operation of one name."""
    return lambda operation: fault if operation.name == name else None


class FaultyDisk:
    """A ``Disk`` over another one that records every operation and injects the faults of a plan.

    Attributes:
        operations: all operations in order, until the kill.
        struck: the first operation with a fault.
    """

    def __init__(self, inner: Disk, plan: Plan = never) -> None:
        self.inner = inner
        self.operations: list[Operation] = []
        self.struck: Operation | None = None
        self._plan = plan
        self._lock = threading.Lock()
        self._killed: Killed | None = None
        self._counts: dict[str, int] = {}
        self._paths: dict[int, Path] = {}
        self._writing: set[int] = set()
        self._refused_next: dict[int, int] = {}

    @property
    def names(self) -> list[str]:
        """The names of the operations so far that change something."""
        return [operation.name for operation in self.operations if operation.is_mutating]

    def release(self) -> None:
        """Close the open handles, as the kernel does after a kill; call it when all threads have ended."""
        for handle in list(self._paths):
            with contextlib.suppress(OSError):
                self.inner.close(handle)
        self._paths.clear()

    # ---- injecting ----

    def _enter(
        self, name: str, path: Path, source: Path | None, *, is_mutating: bool
    ) -> tuple[Operation, Fault | None]:
        with self._lock:
            if self._killed is not None:
                raise self._killed
            nth = self._counts.get(name, 0)
            self._counts[name] = nth + 1
            operation = Operation(len(self.operations), name, nth, path, source, is_mutating)
            self.operations.append(operation)
            fault = self._plan(operation)
            if fault is None or not fault.fits(operation):
                return operation, None
            self.struck = self.struck or operation
            if isinstance(fault, Kill) and fault.moment == "before":
                self._die(operation, fault)
            return operation, fault

    def _die(self, operation: Operation, fault: Kill) -> NoReturn:
        if fault.really:
            os.kill(os.getpid(), signal.SIGKILL)
        self._killed = self._killed or Killed(operation)
        raise self._killed

    def _finish(self, operation: Operation, fault: Fault | None, act: Callable[[], _Result]) -> _Result:
        if isinstance(fault, Refuse):
            raise OSError(fault.code, os.strerror(fault.code), str(operation.path))
        result = act()
        if isinstance(fault, Repeat):
            result = act()
        if isinstance(fault, Kill):
            self._die(operation, fault)
        return result

    def _run(self, name: str, path: Path, act: Callable[[], _Result], source: Path | None = None) -> _Result:
        operation, fault = self._enter(name, path, source, is_mutating=name in MUTATING)
        return self._finish(operation, fault, act)

    def _sync(self, name: str, path: Path, act: Callable[[], None]) -> None:
        operation, fault = self._enter(name, path, None, is_mutating=True)
        if not isinstance(fault, Ignore):
            self._finish(operation, fault, act)

    def _opened(self, path: Path, handle: int, *, is_writing: bool) -> int:
        with self._lock:
            self._paths[handle] = path
            if is_writing:
                self._writing.add(handle)
        return handle

    def _path(self, handle: int) -> Path:
        return self._paths.get(handle, Path(f"handle-{handle}"))

    # ---- bytes ----

    def create(self, path: Path) -> int:
        """Count, strike or pass on."""
        return self._run("create", path, lambda: self._opened(path, self.inner.create(path), is_writing=True))

    def open_append(self, path: Path) -> int:
        """Count, strike or pass on."""
        return self._run("open_append", path, lambda: self._opened(path, self.inner.open_append(path), is_writing=True))

    def open(self, path: Path) -> int:
        """Count, strike or pass on."""
        return self._run("open", path, lambda: self._opened(path, self.inner.open(path), is_writing=False))

    def open_direct(self, path: Path) -> int:
        """Count, strike or pass on."""
        return self._run(
            "open_direct", path, lambda: self._opened(path, self.inner.open_direct(path), is_writing=False)
        )

    def write(self, handle: int, data: memoryview) -> int:
        """Count, strike, shorten or pass on."""
        operation, fault = self._enter("write", self._path(handle), None, is_mutating=True)
        code = self._refused_next.pop(handle, None)
        if code is not None:
            fault = Refuse(code)
        elif isinstance(fault, Shorten):
            data = data[: fault.taken_bytes]
            if fault.then is not None:
                self._refused_next[handle] = fault.then
        elif isinstance(fault, Kill) and fault.moment == "during":
            data = data[: len(data) // 2]
        return self._finish(operation, fault, lambda: self.inner.write(handle, data))

    def read_at(self, handle: int, offset: int, into: memoryview) -> int:
        """Count, strike or pass on."""
        return self._run("read_at", self._path(handle), lambda: self.inner.read_at(handle, offset, into))

    def use_direct_io(self, handle: int, is_on: bool) -> None:
        """Count, strike or pass on."""
        self._run("use_direct_io", self._path(handle), lambda: self.inner.use_direct_io(handle, is_on))

    def sync_file(self, handle: int) -> None:
        """Count, strike, ignore or pass on."""
        self._sync("sync_file", self._path(handle), lambda: self.inner.sync_file(handle))

    def close(self, handle: int) -> None:
        """Count, strike or pass on; the close of a file that was written counts as a change, for it can fail."""
        is_mutating = handle in self._writing
        operation, fault = self._enter("close", self._path(handle), None, is_mutating=is_mutating)
        with self._lock:
            self._paths.pop(handle, None)
            self._writing.discard(handle)
            self._refused_next.pop(handle, None)
        if isinstance(fault, Refuse):
            self.inner.close(handle)
        self._finish(operation, fault, lambda: self.inner.close(handle))

    # ---- names ----

    def make_directory(self, path: Path) -> None:
        """Count, strike or pass on."""
        self._run("make_directory", path, lambda: self.inner.make_directory(path))

    def sync_directory(self, path: Path) -> None:
        """Count, strike, ignore or pass on."""
        self._sync("sync_directory", path, lambda: self.inner.sync_directory(path))

    def rename(self, source: Path, target: Path) -> None:
        """Count, strike or pass on."""
        self._run("rename", target, lambda: self.inner.rename(source, target), source)

    def link(self, source: Path, target: Path) -> None:
        """Count, strike or pass on."""
        self._run("link", target, lambda: self.inner.link(source, target), source)

    def make_symlink(self, target: str, path: Path) -> None:
        """Count, strike or pass on."""
        self._run("make_symlink", path, lambda: self.inner.make_symlink(target, path))

    def unlink(self, path: Path) -> None:
        """Count, strike or pass on."""
        self._run("unlink", path, lambda: self.inner.unlink(path))

    def remove_directory(self, path: Path) -> None:
        """Count, strike or pass on."""
        self._run("remove_directory", path, lambda: self.inner.remove_directory(path))

    def list_directory(self, path: Path) -> list[Node]:
        """Count, strike or pass on."""
        return self._run("list_directory", path, lambda: self.inner.list_directory(path))

    def status(self, path: Path) -> Status:
        """Count, strike or pass on."""
        return self._run("status", path, lambda: self.inner.status(path))

    def read_link(self, path: Path) -> str:
        """Count, strike or pass on."""
        return self._run("read_link", path, lambda: self.inner.read_link(path))

    def space(self, path: Path) -> Space:
        """Count, strike or pass on."""
        return self._run("space", path, lambda: self.inner.space(path))
