"""Public helpers for users' own tests: a disk that fails on request, and one that forgets what was not synced.

Write the action over ``Files(disk)``, then let it meet every crash and look at every disk that may be left::

    def action(disk: Disk) -> None:
        Files(disk).replace(Path("/run/note"), b"new", scratch=".note")

    for trial in crash_points(prepare, action):              # killed before and during each operation
        for words, found in crash_states(trial.disk):        # and then the power is cut
            assert Files(found).read_bytes(Path("/run/note"), limit_bytes=9) in (b"old", b"new"), (str(trial), words)

``prepare`` returns a ``MemoryDisk`` with all that stands there before. ``faults=ERRORS`` brings EIO, a full disk and
short writes instead; ``FaultyDisk(disk, always("sync_file", Ignore()))`` shows whether a test would miss a sync.
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

__all__ = [
    "ERRORS",
    "KILLS",
    "Change",
    "Fault",
    "FaultyDisk",
    "Ignore",
    "Kill",
    "Killed",
    "MemoryDisk",
    "Operation",
    "Plan",
    "Refuse",
    "Shorten",
    "Tail",
    "Trial",
    "always",
    "at",
    "at_nth",
    "crash_points",
    "crash_states",
    "never",
    "tree",
]
