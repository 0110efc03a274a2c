"""Checkpoints for the tests of the store, made the way a job makes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unbroken.store.commit import Record, begin, commit
from unbroken.store.directory import Store
from unbroken.store.names import PERIODIC, DraftName

PARTS: Mapping[str, bytes] = {"trainer_state.json": b'{"step": 1}', "state/__0_0.distcp": b"weights" * 100}


def save(
    store: Store,
    step: int,
    *,
    job: str = "j0001_a",
    kind: str = PERIODIC,
    at_ns: int | None = None,
    parts: Mapping[str, bytes] = PARTS,
    metrics: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> str:
    """Commit a checkpoint; its instant is its step unless another is told."""
    draft = begin(store, step=step, job=job)
    written = [draft.write_part(name, [data]) for name, data in parts.items()]
    saved_at_ns = step * 1_000 if at_ns is None else at_ns
    record = Record(kind=kind, saved_at_ns=saved_at_ns, metrics=metrics or {}, metadata=metadata or {})
    return commit(draft, plan=list(parts), parts=written, record=record)


def store_with(root: Path, *steps: int) -> Store:
    """A store with a checkpoint for each step."""
    store = Store(root)
    for step in steps:
        save(store, step)
    return store


def nobody(draft: DraftName) -> bool:
    """No job is alive."""
    del draft
    return False


def everybody(draft: DraftName) -> bool:
    """Every job may be alive."""
    del draft
    return True


def tree(root: Path) -> dict[str, bytes | str]:
    """Everything below a directory: the bytes of files, where links point, nothing for directories."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = path.read_bytes() if path.is_file() else ""
    return found
