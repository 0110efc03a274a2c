"""Public helpers for users' own tests: exactness in one line, disks that fail on request and forget, real worlds.

A trainer, left alone and killed on the way, must leave the same bits::

    def test_my_trainer_survives_kills(tmp_path):
        assert_exact(train, tmp_path, kills=[7, "manifest"], ranks=[2, 1, 3])

Two runs can be compared by themselves: ``compare_runs(a, b)`` says how many steps agree and names the first that does
not. An action over ``Files(disk)`` meets every crash, and every disk that may be left is looked at::

    def action(disk: Disk) -> None:
        Files(disk).replace(Path("/run/note"), b"new", scratch=".note")

    for trial in crash_points(prepare, action):              # killed before and during each operation
        for words, found in crash_states(trial.disk):        # and then the power is cut
            assert Files(found).read_bytes(Path("/run/note"), limit_bytes=9) in (b"old", b"new"), (str(trial), words)

``prepare`` returns a ``MemoryDisk`` with all that stands there before. ``faults=ERRORS`` brings EIO, a full disk and
short writes instead; ``FaultyDisk(disk, always("sync_file", Ignore()))`` shows whether a test would miss a sync.

``spawn(4, train, "runs/a")`` runs a function on four real ranks over gloo and tells how each ended; ``start`` returns
while they run, to send them signals. ``unbroken.testing.strategies`` has what hypothesis draws from. Everything is
loaded when it is first asked for.
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

_PLACES: Final = {
    "crashes": ("ERRORS", "KILLS", "Trial", "crash_points", "crash_states", "tree"),
    "durability": ("Change", "Tail"),
    "exactness": (
        *("Comparison", "FirstDifference", "MetricsComparison", "compare_checkpoints", "compare_metrics"),
        *("compare_runs", "is_measured"),
    ),
    "faults": (
        *("Fault", "FaultyDisk", "Ignore", "Kill", "Killed", "Operation", "Plan", "Refuse", "Repeat", "Shorten"),
        *("always", "at", "at_nth", "never"),
    ),
    "interrupted": ("Exactness", "Interruption", "assert_exact", "check_exact"),
    "memory_disk": ("MemoryDisk",),
    "states": ("StateComparison",),
    "worlds": ("Ended", "Ranks", "logs", "spawn", "start"),
}
_MODULES: Final = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- whatever the name stands for
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
