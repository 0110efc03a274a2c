"""``unbroken.checkpoints``: a run's checkpoints from Python, as ``unbroken ls`` shows them; needs no torch."""

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.records.run_references import resolve
from unbroken.store.check import Level, Verdict, verify
from unbroken.store.directory import Store
from unbroken.store.names import MANIFEST, QUARANTINE
from unbroken.store.scan import newest_first, scan, without_manifest


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a run. Fields that an unreadable manifest would give are None.

    Attributes:
        step: optimizer steps completed when it was saved.
        name: its name in the run's store; ``RUN@NAME`` refers to it.
        path: its directory.
        kind: why it was saved, such as ``periodic``, ``shutdown`` or ``final``.
        size_bytes: the bytes of all its parts.
        saved_at: when it was committed, in UTC.
        metrics: what was logged for its step.
        is_usable: whether a resume would take it; names and sizes are checked, bytes are not (``unbroken verify``).
        why_not: why it is not usable; None if it is.
    """

    step: int | None
    name: str
    path: Path
    kind: str | None = None
    size_bytes: int | None = None
    saved_at: datetime.datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_usable: bool = True
    why_not: str | None = None


def checkpoints(run: str | os.PathLike[str]) -> list[Checkpoint]:
    """The checkpoints of a run, newest first; those in quarantine come last.

    Args:
        run: a run directory, or its ``checkpoints`` directory. A run that has saved nothing yet has none.

    Raises:
        PathMissing: there is nothing at the path.
        NotAStore: there is, and it is no run.
        StorageFailed: an I/O error.
    """
    store = resolve(os.fspath(run)).store
    inventory = scan(store)
    verdicts = (verify(store, name, Level.QUICK) for name in newest_first(store, inventory.committed))
    found = [_described(store, verdict) for verdict in verdicts if not verdict.is_removed]
    found += [
        Checkpoint(None, name, store.path(name), is_usable=False, why_not=f"{MANIFEST}: is missing")
        for name in without_manifest(store, inventory)
    ]
    for name in inventory.quarantined:
        verdict = verify(store, f"{QUARANTINE}/{name}", Level.QUICK)
        found.append(_described(store, verdict, why_not=f"in {QUARANTINE}/: it was found damaged"))
    return found


def _described(store: Store, verdict: Verdict, why_not: str | None = None) -> Checkpoint:
    path, manifest = store.path(verdict.name), verdict.manifest
    if not verdict.is_sound:
        why_not = why_not or "; ".join(map(str, verdict.findings))
    if manifest is None:
        return Checkpoint(None, verdict.name, path, is_usable=False, why_not=why_not)
    return Checkpoint(
        manifest.step,
        verdict.name,
        path,
        manifest.kind,
        manifest.size_bytes,
        datetime.datetime.fromtimestamp(manifest.saved_at_ns / 1e9, tz=datetime.UTC),
        dict(manifest.metrics),
        is_usable=why_not is None,
        why_not=why_not,
    )
