"""Fault injection inside a drilled job, through the ``Disk`` that all of the package writes through.

Imported by name, and only if a drill has faults. A phase of a save is recognised by its first operation and the file
name, so that the saving code knows nothing of drills. A kill is SIGKILL to this process.
"""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from unbroken.disk import Disk, LocalDisk
from unbroken.files import LOCAL, Files
from unbroken.records.drill import Drill, Fault, mark_of
from unbroken.store.names import DRAFT_PREFIX, LATEST, MANIFEST, TRASH_PREFIX, scratch
from unbroken.testing.faults import Fault as Strike
from unbroken.testing.faults import FaultyDisk, Kill, Operation, Refuse

_CODES: Final = {"enospc": errno.ENOSPC, "eio": errno.EIO}
# When a kill happens relative to the first operation of a phase; by default before it.
_MOMENTS: Final[dict[str, Kill]] = {
    "parts": Kill("during", really=True),
    "manifest": Kill("during", really=True),
    "journal": Kill("during", really=True),
    "metrics": Kill("during", really=True),
    "begin": Kill("after", really=True),
    "committed": Kill("after", really=True),
    "sweep": Kill("after", really=True),
}


Tell = Callable[[Fault], None]


def install(drill: Drill, rank: int) -> Callable[[], None]:
    """Install the faults of this rank; returns the function that the loop calls at every step's edge."""
    mine = [fault for fault in drill.faults if fault.rank in (None, rank)]
    tell = _marking(drill)
    plan = Striking([fault for fault in mine if fault.at != "edge"], tell)
    # `Files` is frozen against accidental changes of its disk; here the change is intended.
    object.__setattr__(LOCAL, "disk", ForgetfulDisk(LocalDisk(), plan))
    return _at_edges([fault for fault in mine if fault.at == "edge"], tell)


def _marking(drill: Drill) -> Tell:
    """A function that writes a fault's mark once, before the fault, through a disk without faults."""
    files, marked = Files(LocalDisk()), set[Fault]()

    def tell(fault: Fault) -> None:
        if drill.marks is not None and fault not in marked:
            marked.add(fault)
            mark = drill.marks / mark_of(drill.faults.index(fault))
            files.replace(mark, b"", scratch=scratch(f"drill_{os.getpid()}", "mark"))

    return tell


def _at_edges(faults: Sequence[Fault], tell: Tell) -> Callable[[], None]:
    edges = 0

    def strike() -> None:
        nonlocal edges
        edges += 1
        for fault in faults:
            if fault.do == "kill" and fault.when == edges:
                _die_of(fault, tell)
            elif fault.do == "delay" and fault.when <= edges:
                tell(fault)
                time.sleep(fault.seconds)

    return strike


def _die_of(fault: Fault, tell: Tell) -> None:
    """SIGKILL some time after the edge: in the middle of a step, or of a save in the background."""

    def die() -> None:
        time.sleep(fault.seconds)
        tell(fault)
        os.kill(os.getpid(), signal.SIGKILL)

    if fault.seconds <= 0:
        die()
    threading.Thread(target=die, name="unbroken-drill", daemon=True).start()


class ForgetfulDisk(FaultyDisk):
    """A faulty disk for a job that may run for days: it keeps no list of operations."""

    def _enter(
        self, name: str, path: Path, source: Path | None, *, is_mutating: bool
    ) -> tuple[Operation, Strike | None]:
        found = super()._enter(name, path, source, is_mutating=is_mutating)
        self.operations.clear()
        return found

    def __reduce__(self) -> tuple[Callable[[], Disk], tuple[()]]:
        # Ranks send each other stores, which contain their disk: the receiver uses its own.
        return _own_disk, ()


def _own_disk() -> Disk:
    return LOCAL.disk


class Striking:
    """The plan of a drill: from an operation to its phase, the count of that phase, and the fault, if any.

    It is called for one operation at a time; a delay holds up all others, as a slow disk does.
    """

    def __init__(self, faults: Sequence[Fault], tell: Tell) -> None:
        self._faults, self._tell = faults, tell
        self._reached: dict[str, int] = {}
        self._last: dict[str, object] = {}

    def __call__(self, operation: Operation) -> Strike | None:
        """The fault of this operation, if any."""
        phases = _phases(operation)
        if not phases:
            return None
        begun = {phase for phase, key in phases.items() if self._is_begun(phase, key)}
        met = [fault for fault in self._faults if fault.at in phases]
        for fault in met:
            if self._is_struck(fault, is_begun=fault.at in begun):
                self._tell(fault)
                if fault.do != "delay":
                    return _strike(fault)
                time.sleep(fault.seconds)
        return None

    def _is_struck(self, fault: Fault, *, is_begun: bool) -> bool:
        reached = self._reached[fault.at]
        # A slow disk stays slow; everything else comes once.
        return reached >= fault.when if fault.do == "delay" else reached == fault.when and is_begun

    def _is_begun(self, phase: str, key: object) -> bool:
        """Whether a phase starts now: a second part of the same save does not start it again."""
        if key is not None and self._last.get(phase) == key:
            return False
        self._last[phase] = key
        self._reached[phase] = self._reached.get(phase, 0) + 1
        return True


def _strike(fault: Fault) -> Strike:
    return Refuse(_CODES[fault.do]) if fault.do in _CODES else _MOMENTS.get(fault.at, Kill(really=True))


def _phases(operation: Operation) -> dict[str, object]:
    """The phases of an operation, each with a key that is constant during one occurrence; None: always new."""
    path, name = operation.path, operation.name
    if name == "write":
        return _writing(path)
    if name == "make_directory" and path.name.startswith(DRAFT_PREFIX):
        return {"begin": path.name}
    if name == "rename":
        source = operation.source
        if source is not None and source.name.startswith(DRAFT_PREFIX):
            return {"rename": None, "committed": None}
        if path.name.startswith(TRASH_PREFIX):
            return {"sweep": None}
        if path.name == LATEST:
            return {"latest": None}
    return {}


def _writing(path: Path) -> dict[str, object]:
    draft = next((piece for piece in reversed(path.parts) if piece.startswith(DRAFT_PREFIX)), None)
    if draft is not None:
        return {"manifest" if path.name == MANIFEST else "parts": draft}
    if path.suffix == ".jsonl" and path.parent.name in ("journal", "metrics"):
        return {path.parent.name: None}
    return {}
