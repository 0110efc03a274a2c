"""Any number of processes at one tokenization: who takes part, and which unit each of them does.

Every process holds a lease of its own below ``.tokenize/processes`` and renews it. A unit is claimed by a file that
only one process can create, with the name of the process in it; if that process is gone, the claim with the next number
is free. Claims only avoid double work. What counts is the record of a unit, which only one process can create, so that
a process that was taken for dead and wakes up does no damage.
"""

import contextlib
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.data.ingest.work_folder import TokenizePlan, WorkFolder
from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.quoting import amounts
from unbroken.records.lease import DEFAULT_TTL_S, Holder, Lease, ProcessOf, Renewal, Standing, acquire, release
from unbroken.records.process import process_of, this_holder
from unbroken.records.takeover import LeaseWatch

# Where processes on a hundred nodes share one file system, each lists a folder of many thousand names this often.
_LIST_EVERY_S: Final = 10.0
_LOOK_S: Final = 1.0
_LOOK_PER_PROCESS_S: Final = 0.05
_CLAIM: Final = re.compile(r"(finish|[0-9]{6,9})-claim-([0-9]{1,9})")
_RECORD: Final = re.compile(r"([0-9]{6,9})\.json")
_NAME: Final = re.compile(r"[0-9a-z]{1,64}")
_FINISH: Final = -1

Say = Callable[[str], None]


class PlanChanged(Exception):
    """The plan was finished or replaced, mostly by another process: the records have to be read again."""


@dataclass(frozen=True)
class Participant:
    """A process that takes part, as the others see it, and its clocks; ``new_name`` gives a name nobody else has."""

    holder: Holder
    process_of: ProcessOf = process_of
    new_name: Callable[[], str] = lambda: secrets.token_hex(6)
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep
    ttl_s: float = DEFAULT_TTL_S


def this_participant() -> Participant:
    """This process."""
    return Participant(this_holder())


@contextlib.contextmanager
def joined(work: WorkFolder, plan: TokenizePlan, who: Participant, say: Say) -> Iterator["Claims"]:
    """Take part in a plan, until the block ends.

    Raises:
        PlanChanged: the plan is gone.
        StorageFailed: an I/O error.
    """
    name = who.new_name()
    home = work.processes_path / name
    try:
        # crash here: a lease of a process that is gone, which the others see.
        lease = acquire(home, who.holder, token=name, now_s=who.clock(), ttl_s=who.ttl_s, files=work.files)
        work.files.make_directory(work.units_path(plan), durable=True)
        claims = Claims(work, plan, who, name, say)
    except StorageFailed:
        _require_plan(work, plan)
        raise
    # Only a local disk is shared with other processes.
    renewal = Renewal(home, lease, clock=who.clock, files=work.files) if work.files is LOCAL else None
    try:
        yield claims
    finally:
        # A lease that cannot be released is watched by the others until it expires.
        with contextlib.suppress(StorageFailed):
            _leave(home, lease, renewal, who, work.files)


def _require_plan(work: WorkFolder, plan: TokenizePlan) -> None:
    """Raise if the plan is gone; reads it, because a network file system may show old names for a while."""
    try:
        found = work.plan()
    except StorageFailed:
        raise PlanChanged from None
    if found != plan:
        raise PlanChanged


def _leave(home: Path, lease: Lease, renewal: Renewal | None, who: Participant, files: Files) -> None:
    if renewal is not None:
        renewal.end()
    elif files.find(home) is not None:
        # crash here: a lease of a process that is gone.
        release(home, lease, now_s=who.clock(), files=files)


class Claims:
    """The units of a plan as this process sees them; ``take`` may be called from any thread.

    Attributes:
        name: the name of this process, as others find it in its claims.
    """

    def __init__(self, work: WorkFolder, plan: TokenizePlan, who: Participant, name: str, say: Say) -> None:
        self.name = name
        self._work = work
        self._plan = plan
        self._who = who
        self._say = say
        self._guard = threading.Lock()
        # Looked at before it is read: a plan that is replaced in between is noticed.
        self._mark = self._look_at_plan()
        self.require_plan()
        self._watches: dict[str, LeaseWatch] = {}
        self._mine: set[int] = set()
        self._others_done: set[int] = set()
        self._free: deque[tuple[int, int]] = deque()
        self._held: dict[int, str] = {}
        self._finish_claim = 0
        self._listed_at_s = 0.0
        self._has_said = False
        self._is_shared = len(work.files.list_directory(work.processes_path)) > 1
        self._done: set[int] = set()
        self._last: dict[int, int] = {}
        self._list()
        # What was done before is nobody's progress.
        self._others_done = set(self._done)

    # ---- the plan ----

    @property
    def is_current(self) -> bool:
        """Whether the plan is still the one of the work folder."""
        return self._mark is not None and self._look_at_plan() == self._mark

    def _look_at_plan(self) -> tuple[object, int, int] | None:
        found = self._work.files.find(self._work.plan_path)
        return None if found is None else (found.identity, found.modified_ns, found.size_bytes)

    def require_plan(self) -> None:
        """Raise if the plan is gone or another one; reads it.

        Raises:
            PlanChanged: it is.
        """
        _require_plan(self._work, self._plan)

    def require_current(self) -> None:
        """Raise if another process has finished, removed or replaced the plan, or has taken the end over from this one.

        Raises:
            PlanChanged: it has.
            StorageFailed: an I/O error.
        """
        later = self._claim_path(_FINISH, self._finish_claim + 1)
        if not self.is_current or (self._finish_claim and self._work.files.find(later) is not None):
            raise PlanChanged

    # ---- units ----

    @property
    def pending(self) -> frozenset[int]:
        """The units without a record when the records were last listed."""
        return frozenset(range(len(self._plan.units))) - self._done

    def take(self) -> int | None:
        """Claim a unit; None if every unit is done or claimed by a process that is not known to be gone.

        Raises:
            StorageFailed: an I/O error.
        """
        with self._guard:
            if not self.is_current:
                return None
            if self._who.monotonic() - self._listed_at_s >= _LIST_EVERY_S:
                self._list()
            while self._free:
                number, generation = self._free.popleft()
                if self._claim(number, generation) and not self._work.has_record(self._plan, number):
                    self._mine.add(number)
                    return number
            return None

    def news(self) -> list[int]:
        """The units that other processes have finished since this was last asked.

        Raises:
            PlanChanged: the plan is gone.
            StorageFailed: an I/O error.
        """
        with self._guard:
            self._list()
            found = sorted(self._done - self._others_done - self._mine)
            self._others_done.update(found)
            return found

    def wait(self) -> None:
        """Wait a moment for other processes."""
        if not self._has_said and (holders := set(self._held.values())):
            self._has_said = True
            processes = "1 other process" if len(holders) == 1 else f"{amounts.count(len(holders))} other processes"
            self._say(f"waiting for {amounts.plural(len(self._held), 'unit')} in progress in {processes}")
        self._who.wait(max(_LOOK_S, _LOOK_PER_PROCESS_S * len(self._watches)))

    def take_finish(self) -> None:
        """Claim the end of the work, as soon as no other process has it.

        Raises:
            PlanChanged: another process has finished it.
            StorageFailed: an I/O error.
        """
        while True:
            with self._guard:
                self._list()
            generation = self._last.get(_FINISH, 0)
            if (not generation or self._is_gone(_FINISH, generation)) and self._claim(_FINISH, generation + 1):
                self._finish_claim = generation + 1
                return
            self._who.wait(_LOOK_S)

    def _list(self) -> None:
        """List records and claims, and find the units that nobody works at."""
        if not self.is_current:
            raise PlanChanged
        try:
            names = [node.name for node in self._work.files.list_directory(self._work.units_path(self._plan))]
        except StorageFailed:
            self.require_plan()
            raise
        self._listed_at_s = self._who.monotonic()
        self._done = {int(found[1]) for name in names if (found := _RECORD.fullmatch(name))}
        self._last = _last_claims(names)
        open_units = [number for number in range(len(self._plan.units)) if number not in self._done]
        self._held = {}
        self._free = deque()
        for number in self._in_order(open_units):
            generation = self._last.get(number, 0)
            if number in self._mine and generation:
                continue
            if not generation or self._is_gone(number, generation):
                self._free.append((number, generation + 1))

    def _in_order(self, numbers: list[int]) -> list[int]:
        # Processes that start together would all try the same unit first.
        start = int(self.name, 36) % max(1, len(numbers)) if self._is_shared else 0
        return numbers[start:] + numbers[:start]

    # ---- claims ----

    def _claim_path(self, number: int, generation: int) -> Path:
        word = "finish" if number == _FINISH else f"{number:06d}"
        return self._work.units_path(self._plan) / f"{word}-claim-{generation}"

    def _claim(self, number: int, generation: int) -> bool:
        path = self._claim_path(number, generation)
        # crash here: a claim of a process that is gone, which the others see.
        return self._work.files.create_once(path, self.name.encode(), scratch=f".claim-{self.name}-{number}")

    def _is_gone(self, number: int, generation: int) -> bool:
        """Whether the process with this claim is known to be gone; one that is not is noted as holding the unit."""
        try:
            content = self._work.files.read_bytes(self._claim_path(number, generation), limit_bytes=1 << 10)
        except StorageFailed:
            self.require_plan()
            raise
        name = content.decode(errors="replace")
        if not _NAME.fullmatch(name):
            # Empty, from a kill on a file system without hard links: at worst a unit is done twice.
            return True
        is_gone = name != self.name and self._watch(name).look() is Standing.GONE
        if not is_gone and number != _FINISH:
            self._held[number] = name
        return is_gone

    def _watch(self, name: str) -> LeaseWatch:
        if name not in self._watches:
            home, who = self._work.processes_path / name, self._who
            self._watches[name] = LeaseWatch(
                home, monotonic=who.monotonic, process_of=who.process_of, files=self._work.files
            )
        return self._watches[name]

    def others_alive(self, patience_s: float) -> bool:
        """Whether another process takes part that does not end within some time.

        Raises:
            StorageFailed: an I/O error.
        """
        give_up_at_s = self._who.monotonic() + patience_s
        names = [node.name for node in self._work.files.list_directory(self._work.processes_path)]
        watches = [self._watch(name) for name in names if name != self.name]
        while True:
            found = {watch.look() for watch in watches} - {Standing.GONE}
            if not found:
                return False
            # One that cannot be seen from here is watched until it is known.
            if found == {Standing.ALIVE} and self._who.monotonic() >= give_up_at_s:
                return True
            self._who.wait(_LOOK_S)


def _last_claims(names: Iterable[str]) -> dict[int, int]:
    last: dict[int, int] = {}
    for name in names:
        if found := _CLAIM.fullmatch(name):
            number = _FINISH if found[1] == "finish" else int(found[1])
            last[number] = max(last.get(number, 0), int(found[2]))
    return last
