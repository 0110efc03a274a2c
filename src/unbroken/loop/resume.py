"""Finding the checkpoint to go on from, and going on from it, on all ranks alike.

Rank 0 looks and decides; everybody loads and proves. A checkpoint that turns out damaged while it is read is moved
aside and the next older one is tried, so that a bad newest checkpoint never becomes a crash loop.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from unbroken.errors import (
    CheckpointsExist,
    CheckpointUnknown,
    DamagedCheckpoint,
    ManifestDamaged,
    NotExact,
    NoUsableCheckpoint,
    RankFailed,
    UnbrokenError,
)
from unbroken.loop.settings import Settings
from unbroken.state.items import Item
from unbroken.state.restore import Restored, Source, restore
from unbroken.store.check import Level
from unbroken.store.choose import resume_point
from unbroken.store.manifest import Manifest
from unbroken.store.names import MANIFEST, QUARANTINE, step_of
from unbroken.store.place import Store
from unbroken.store.quarantine import quarantine
from unbroken.store.refer import is_bare, named_in, resolve_checkpoint
from unbroken.store.rewind import record_rewind, rewind, set_aside
from unbroken.store.scan import newest_first, read_quietly, scan, without_manifest
from unbroken.world import World

# In a checkpoint's facts: what a step that was given up had moved. Accepting this name resumes from it all the same.
UNFINISHED: Final = "unfinished-step"


@dataclass(frozen=True)
class Target:
    """The checkpoint that rank 0 chose; ``root`` differs from the run's store for a start from another run."""

    store: Store
    name: str
    manifest: Manifest


@dataclass
class Resumed:
    """How a job began: from which checkpoint, if any, and what was passed over on the way."""

    target: Target | None = None
    restored: Restored | None = None
    passed_over: list[tuple[str, str]] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)


def resume(store: Store, items: Sequence[Item], world: World, settings: Settings, *, job: str) -> Resumed:
    """Bring the items to the state to go on from; leaves them alone where the run starts. Collective.

    Raises:
        CheckpointsExist: a start from scratch was asked for, and there are checkpoints.
        NoUsableCheckpoint: a checkpoint was named, or there are some, and none can be used; the objects may have been
            touched.
        StateDiffers: the objects do not fit; nothing was loaded.
        NotExact: something would not be exact, and nobody accepted it.
    """
    found = Resumed()
    named, found.set_aside = world.from_first(lambda: _prepare(store, settings, job))
    while found.restored is None:
        target, passed = world.from_first(lambda: _choose(store, settings, named, job))
        told = {name for name, _ in found.passed_over}
        found.passed_over += [(name, why) for name, why in passed if name.removeprefix(f"{QUARANTINE}/") not in told]
        if target is None:
            if found.passed_over:
                # A start would throw the past away without a word, with objects that were half loaded.
                raise NoUsableCheckpoint(store=store.root, passed_over=tuple(found.passed_over))
            break
        _require_finished(target, settings)
        source = Source(target.store, target.name, target.manifest)
        try:
            found.restored = restore(source, items, world, accept=settings.accept, allow_pickle=settings.allow_pickle)
            found.target = target
        except UnbrokenError as refused:
            if named is not None or target.store.root != store.root:
                raise
            found.passed_over.append(_set_bad_aside(store, target.name, refused, world, job))
    return found


def _require_finished(target: Target, settings: Settings) -> None:
    """Refuse a checkpoint of a step that was given up in the middle, unless a person accepts it."""
    moved = target.manifest.facts.get(UNFINISHED)
    if moved and UNFINISHED not in settings.accept:
        what = f"the loop was left inside step {target.manifest.step + 1:,}, which had already changed: {moved}"
        raise NotExact(differences=((UNFINISHED, what),))


def _set_bad_aside(store: Store, name: str, refused: UnbrokenError, world: World, job: str) -> tuple[str, str]:
    """Quarantine a checkpoint that turned out damaged while it was read; every other refusal is raised again."""
    cause = refused.cause if isinstance(refused, RankFailed) else refused
    if not isinstance(cause, DamagedCheckpoint | ManifestDamaged):
        raise refused
    reasons = tuple(cause.details()) or (cause.headline(),)
    world.from_first(lambda: quarantine(store, name, reasons, job=job, at_ns=time.time_ns()))
    return name, reasons[0]


def _prepare(store: Store, settings: Settings, job: str) -> tuple[str | None, list[str]]:
    """Carry out what was asked about the past; returns the one checkpoint that must be used, if one was named."""
    names = newest_first(store, scan(store).committed)
    if settings.resume == "auto":
        return None, []
    if settings.resume == "scratch":
        if names and not settings.force:
            raise CheckpointsExist(store=store.root, count=len(names), newest=names[0])
        _abandon_all(store, names, job)
        return None, names
    # A bare step or name is this run's own, whatever else is called so where the job was started.
    if is_bare(settings.resume):
        place, name = store, named_in(store, settings.resume)
    else:
        place, name, _ = resolve_checkpoint(settings.resume, store.files)
    # One directory may be named in two ways, by a link or by "..".
    if place.root.resolve() != store.root.resolve():
        if names:
            # Neither may win silently: `load_path` is for starting from another run, and gives way to this one's own.
            raise CheckpointUnknown(reference=settings.resume, store=store.root, known=tuple(names))
        return None, []
    return name, rewind(store, names, target=name, job=job, at_ns=time.time_ns())


def _abandon_all(store: Store, names: list[str], job: str) -> None:
    ids = {name: manifest.id for name in names if (manifest := read_quietly(store, name))}
    if ids:
        record_rewind(store, target="scratch", abandoned=ids, job=job, at_ns=time.time_ns())
        set_aside(store, list(ids))
    for name in names:
        if name not in ids:
            quarantine(store, name, ("set aside unread by a start from scratch",), job=job, at_ns=time.time_ns())


def _bereft(store: Store, *, after_step: int) -> list[tuple[str, str]]:
    """Newer checkpoints that stand there without a manifest: lost, but not without a word."""
    names = without_manifest(store, scan(store))
    return [(name, f"{MANIFEST}: is missing") for name in names if (step_of(name) or 0) > after_step]


def _choose(
    store: Store, settings: Settings, named: str | None, job: str
) -> tuple[Target | None, list[tuple[str, str]]]:
    if named is not None:
        return Target(store, named, store.read_manifest(named)), []
    # Quick only: every byte is proven anyway as it is read.
    choice = resume_point(store, Level.QUICK, job=job, at_ns=time.time_ns())
    passed = [(over.name, over.reason) for over in choice.passed_over]
    chosen = choice.chosen.manifest if choice.chosen is not None else None
    passed += _bereft(store, after_step=chosen.step if chosen else -1)
    if choice.chosen is not None and chosen is not None:
        return Target(store, choice.chosen.name, chosen), passed
    if settings.resume == "auto":
        # An earlier job may have set the last ones aside: the past that is lost is no reason to begin anew unasked.
        passed += [(f"{QUARANTINE}/{name}", "it was set aside as damaged") for name in scan(store).quarantined]
        if passed:
            return None, passed
    elsewhere = settings.load_path if settings.resume in ("auto", "scratch") else settings.resume
    if elsewhere is not None:
        place, name, manifest = resolve_checkpoint(elsewhere, store.files)
        return Target(place, name, manifest), passed
    if settings.resume not in ("auto", "scratch"):
        raise NoUsableCheckpoint(store=store.root, passed_over=tuple(passed))
    return None, passed
