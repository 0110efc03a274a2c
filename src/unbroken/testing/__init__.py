"""Public helpers for users' own tests: a disk that fails on request, and one that forgets what was not synced.

Write the action over ``Files(disk)``, then let it meet every crash and look at every disk that may be left::

    def action(disk: Disk) -> None:
        Files(disk).replace(Path("/run/note"), b"new", scratch=".note")

    for trial in crash_points(prepare, action):              # killed before and during each operation
        for words, found in crash_states(trial.disk):        # and then the power is cut
            assert Files(found).read_bytes(Path("/run/note"), limit_bytes=9) in (b"old", b"new"), (str(trial), words)

``prepare`` returns a ``MemoryDisk`` with all that stands there before. ``faults=ERRORS`` brings EIO, a full disk and
short writes instead; ``FaultyDisk(disk, always("sync_file", Ignore()))`` shows whether a test would miss a sync.

``spawn(4, train, "runs/a")`` runs a function on four real ranks over gloo and tells how each ended; ``start`` returns
while they run, to send them signals. See ``unbroken.testing.worlds``.
"""

from unbroken.testing.crashes import ERRORS, KILLS, Trial, crash_points, crash_states, tree
from unbroken.testing.durability import Change, Tail
from unbroken.testing.faults import (
    Fault,
    FaultyDisk,
    Ignore,
    Kill,
    Killed,
    Operation,
    Plan,
    Refuse,
    Shorten,
    always,
    at,
    at_nth,
    never,
)
from unbroken.testing.memory import MemoryDisk
from unbroken.testing.worlds import Ended, Ranks, logs, spawn, start

__all__ = [
    "ERRORS",
    "KILLS",
    "Change",
    "Ended",
    "Fault",
    "FaultyDisk",
    "Ignore",
    "Kill",
    "Killed",
    "MemoryDisk",
    "Operation",
    "Plan",
    "Ranks",
    "Refuse",
    "Shorten",
    "Tail",
    "Trial",
    "always",
    "at",
    "at_nth",
    "crash_points",
    "crash_states",
    "logs",
    "never",
    "spawn",
    "start",
    "tree",
]
