"""Helpers for your own tests: check that a trainer is exact, crash code at every file operation, start real ranks.

A trainer that is killed and resumed must end with the same bits as one that is not::

    def test_my_trainer_survives_kills(tmp_path):
        assert_exact(train, tmp_path, kills=[7, "manifest"], ranks=[2, 1, 3])

``compare_runs(a, b)`` compares two runs step by step and names the first difference.

Code that writes files through ``Files(disk)`` can be crashed at every operation, and every disk that a power cut may
leave can be checked::

    def action(disk: Disk) -> None:
        Files(disk).replace(Path("/run/note"), b"new", scratch=".note")

    for trial in crash_points(prepare, action):              # killed before and during each operation
        for words, found in crash_states(trial.disk):        # and then the power is cut
            assert Files(found).read_bytes(Path("/run/note"), limit_bytes=9) in (b"old", b"new"), (str(trial), words)

``prepare`` returns a ``MemoryDisk`` in its initial state. ``faults=ERRORS`` injects EIO, a full disk and short writes
instead of kills. ``FaultyDisk(disk, always("sync_file", Ignore()))`` shows whether a test notices a missing sync.

``spawn(4, train, "runs/a")`` runs a function on four ranks over gloo and returns how each ended; ``start`` returns
while they run, so that a test can send them signals. ``unbroken.testing.strategies`` has hypothesis strategies.
Each name is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from unbroken.testing.crashes import ERRORS, KILLS, Trial, crash_points, crash_states, tree
    from unbroken.testing.durability import Change, Tail
    from unbroken.testing.exactness import (
        Comparison,
        FirstDifference,
        MetricsComparison,
        compare_checkpoints,
        compare_metrics,
        compare_runs,
        is_measured,
    )
    from unbroken.testing.faults import (
        Fault,
        FaultyDisk,
        Ignore,
        Kill,
        Killed,
        Operation,
        Plan,
        Refuse,
        Repeat,
        Shorten,
        always,
        at,
        at_nth,
        never,
    )
    from unbroken.testing.interrupted import Exactness, Interruption, assert_exact, check_exact
    from unbroken.testing.memory_disk import MemoryDisk
    from unbroken.testing.states import StateComparison
    from unbroken.testing.worlds import Ended, Ranks, logs, spawn, start

__all__ = [
    "ERRORS",
    "KILLS",
    "Change",
    "Comparison",
    "Ended",
    "Exactness",
    "Fault",
    "FaultyDisk",
    "FirstDifference",
    "Ignore",
    "Interruption",
    "Kill",
    "Killed",
    "MemoryDisk",
    "MetricsComparison",
    "Operation",
    "Plan",
    "Ranks",
    "Refuse",
    "Repeat",
    "Shorten",
    "StateComparison",
    "Tail",
    "Trial",
    "always",
    "assert_exact",
    "at",
    "at_nth",
    "check_exact",
    "compare_checkpoints",
    "compare_metrics",
    "compare_runs",
    "crash_points",
    "crash_states",
    "is_measured",
    "logs",
    "never",
    "spawn",
    "start",
    "tree",
]

_NAMES: Final = {
    "unbroken.testing.crashes": ("ERRORS", "KILLS", "Trial", "crash_points", "crash_states", "tree"),
    "unbroken.testing.durability": ("Change", "Tail"),
    "unbroken.testing.exactness": (
        *("Comparison", "FirstDifference", "MetricsComparison", "compare_checkpoints", "compare_metrics"),
        *("compare_runs", "is_measured"),
    ),
    "unbroken.testing.faults": (
        *("Fault", "FaultyDisk", "Ignore", "Kill", "Killed", "Operation", "Plan", "Refuse", "Repeat", "Shorten"),
        *("always", "at", "at_nth", "never"),
    ),
    "unbroken.testing.interrupted": ("Exactness", "Interruption", "assert_exact", "check_exact"),
    "unbroken.testing.memory_disk": ("MemoryDisk",),
    "unbroken.testing.states": ("StateComparison",),
    "unbroken.testing.worlds": ("Ended", "Ranks", "logs", "spawn", "start"),
}
_HOMES: Final = {name: module for module, names in _NAMES.items() for name in names}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- any public name
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
