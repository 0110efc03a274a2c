"""One picture of a run, from which text, JSON and page are all made, so that they cannot disagree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unbroken.disk import NodeKind
from unbroken.errors import CheckpointError, StorageFailed
from unbroken.run.layout import run_of
from unbroken.run.lease import Lease, read_current
from unbroken.run.state import RunState, read_run_state
from unbroken.store.check import Level, verify
from unbroken.store.choose import choose
from unbroken.store.keep import Policy, decide
from unbroken.store.manifest import Manifest
from unbroken.store.place import Store
from unbroken.store.scan import Inventory, newest_first, scan
from unbroken.store.sweep import candidates


@dataclass(frozen=True)
class Line:
    """One thing in a store, as ``ls`` shows it; what is not known of it is None."""

    name: str
    state: str
    step: int | None = None
    kind: str | None = None
    saved_at_ns: int | None = None
    size_bytes: int | None = None
    parts: int | None = None
    kept_because: tuple[str, ...] = ()
    note: str | None = None


@dataclass(frozen=True)
class RunSummary:
    """A run at one moment: who holds it, how far it is, what it could resume from."""

    run: str
    status: str
    lease: Lease | None
    state: RunState | None
    inventory: Inventory
    newest_usable: Manifest | None
    newest_usable_name: str | None
    passed_over: tuple[tuple[str, str], ...]


def summarize(store: Store, *, now_s: float, process_of: Callable[[str, int], str | None] | None = None) -> RunSummary:
    """Look at a run: quick checks only, so that it answers in milliseconds on a login node.

    Raises:
        StorageFailed: the system refused.
    """
    layout = run_of(store)
    inventory = scan(store)
    found = choose(newest_first(store, inventory.committed), lambda name: verify(store, name, Level.QUICK))
    lease = read_current(layout.run, store.files)
    state = read_run_state(layout, store.files)
    is_live = lease is not None and lease.is_live(now_s=now_s, process_of=process_of)
    return RunSummary(
        run=str(layout.run),
        status=status_of(state, lease, is_live=is_live, has_checkpoint=found.chosen is not None),
        lease=lease,
        state=state,
        inventory=inventory,
        newest_usable=found.chosen.manifest if found.chosen else None,
        newest_usable_name=found.chosen.name if found.chosen else None,
        passed_over=tuple((over.name, over.reason) for over in found.passed_over),
    )


def status_of(state: RunState | None, lease: Lease | None, *, is_live: bool, has_checkpoint: bool) -> str:
    """The run's status in one word; a job that did not end its run in words and has lost its lease has crashed."""
    if is_live:
        return "running"
    said = state.status if state else None
    if said == "running" or (said is None and lease is not None and not lease.is_released):
        return "crashed"
    return said or ("idle" if has_checkpoint else "empty")


def checkpoint_lines(store: Store, policies: Sequence[Policy] = ()) -> list[Line]:
    """Everything in a store, checkpoints first and newest first.

    Raises:
        StorageFailed: the system refused.
    """
    inventory = scan(store)
    decision = decide(candidates(store, inventory.committed), policies)
    lines = [
        _committed_line(store, name, decision.kept.get(name, ()), is_latest=name == inventory.latest)
        for name in newest_first(store, inventory.committed)
    ]
    for torn in inventory.torn:
        files, size_bytes = torn.weigh(store)
        note = f"written by {torn.name.job}, never committed"
        lines.append(Line(str(torn.name), "torn", torn.name.step, size_bytes=size_bytes, parts=files, note=note))
    lines += [_moved_line(store, f"quarantine/{name}", "quarantined") for name in inventory.quarantined]
    lines += [_moved_line(store, name, "abandoned") for name in inventory.abandoned]
    lines += [Line(leftover.name, "leftover", note="the next sweep removes it") for leftover in inventory.leftover]
    lines += [Line(name, "foreign", note=_foreign_note(store, name)) for name in inventory.foreign]
    return lines


def _committed_line(store: Store, name: str, kept: tuple[str, ...], *, is_latest: bool) -> Line:
    verdict = verify(store, name, Level.QUICK)
    manifest = verdict.manifest
    note = str(verdict.findings[0]) if verdict.findings else ("latest" if is_latest else None)
    if manifest is None:
        return Line(name, "damaged", note=note)
    return Line(
        name,
        "committed" if verdict.is_sound else "damaged",
        manifest.step,
        manifest.kind,
        manifest.saved_at_ns,
        manifest.size_bytes,
        len(manifest.parts),
        kept,
        note,
    )


def _moved_line(store: Store, name: str, state: str) -> Line:
    try:
        manifest = store.read_manifest(name)
    except (CheckpointError, StorageFailed):
        return Line(name, state, note="its manifest is not proven")
    return Line(
        name, state, manifest.step, manifest.kind, manifest.saved_at_ns, manifest.size_bytes, len(manifest.parts)
    )


def _foreign_note(store: Store, name: str) -> str:
    found = store.files.find(store.path(name))
    is_folder = found is not None and found.kind is NodeKind.DIRECTORY
    return "not ours, never touched" + ("; `unbroken seal` makes it a checkpoint" if is_folder else "")
