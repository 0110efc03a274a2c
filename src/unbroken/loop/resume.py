"""Finding the checkpoint to resume from, and resuming from it, on all ranks alike.

Rank 0 decides; all ranks load and verify. A checkpoint that turns out damaged while it is read is quarantined and the
next older one is tried, so that a damaged newest checkpoint never becomes a crash loop.

A request to start somewhere else (an older step, from scratch, another run's checkpoint) is carried out once: it is
recorded in the store, and the same request in a later job continues the branch that it began.
"""

import time
from collections.abc import Mapping, Sequence
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
from unbroken.loop.mirrors import RunMirrors
from unbroken.loop.settings import Settings
from unbroken.mirror.address import is_url
from unbroken.mirror.remote import resolve_remote
from unbroken.state.hyperparameters import Script, ValueChange, digest_of_settings
from unbroken.state.items import Item
from unbroken.state.restore import CheckpointSource, Restored, restore
from unbroken.store.check import Level
from unbroken.store.choose import quarantine, resume_point
from unbroken.store.directory import Store
from unbroken.store.manifest import Manifest
from unbroken.store.names import MANIFEST, QUARANTINE, step_of
from unbroken.store.references import checkpoint_of, is_bare, named_in, resolve_checkpoint
from unbroken.store.rewind import (
    SCRATCH,
    RewindRequest,
    last_request,
    move_abandoned,
    record_rewind,
    rewind,
    without_tag,
)
from unbroken.store.scan import newest_first, read_quietly, scan, without_manifest
from unbroken.world import World

# In a checkpoint's metadata: what an abandoned step had changed. Accepting this name resumes from it all the same.
UNFINISHED: Final = "unfinished-step"
# By optimizer, which parameters had gradients that the checkpoint does not contain; see ``standing_gradients``.
UNSAVED_GRADIENTS: Final = "unsaved-gradients"


@dataclass(frozen=True)
class ResumeTarget:
    """The checkpoint that rank 0 chose; ``root`` differs from the run's store for a start from another run."""

    store: Store
    name: str
    manifest: Manifest


@dataclass
class Resumed:
    """How a job started: from which checkpoint, if any, and what was skipped.

    Attributes:
        followed: the request of the settings, if an earlier job has carried it out already.
        hyperparameters: the values that the run's checkpoints keep as those it was constructed with.
        changes: where the script constructs other values than the checkpoint's run started with.
        computes_under: a digest of the config and hyperparameters from here on, by which steps can be compared.
    """

    target: ResumeTarget | None = None
    restored: Restored | None = None
    skipped: list[tuple[str, str]] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)
    followed: RewindRequest | None = None
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    changes: list[ValueChange] = field(default_factory=list)
    computes_under: str | None = None


@dataclass(frozen=True)
class _Start:
    """Where to look: at one checkpoint of this run (``named``), else the newest, else one of another run, else step 0.

    ``is_required``: there must be a checkpoint. ``is_unasked``: a start at step 0 was not requested, so that
    quarantined checkpoints are a reason to raise.
    """

    named: str | None = None
    elsewhere: str | None = None
    is_required: bool = False
    is_unasked: bool = False
    set_aside: tuple[str, ...] = ()
    followed: RewindRequest | None = None


def resume(
    store: Store,
    items: Sequence[Item],
    world: World,
    settings: Settings,
    *,
    job: str,
    mirrors: RunMirrors | None = None,
) -> Resumed:
    """Restore the items from the checkpoint to resume from; leaves them alone where the run starts. Collective.

    ``mirrors`` are those of rank 0.

    Raises:
        CheckpointsExist: a start from scratch was requested, and there are checkpoints.
        NoUsableCheckpoint: a checkpoint was named, or there are some, and none can be used; the objects may have been
            touched.
        StateDiffers: the objects do not fit; nothing was loaded.
        NotExact: the resume would not be exact, and the difference was not accepted.
    """
    # Before anything is restored: afterwards the values that the script constructed are gone.
    script = world.all_or_none(lambda: Script(items))
    start = world.from_first(lambda: _prepare(store, settings, job, mirrors))
    found = Resumed(set_aside=list(start.set_aside), followed=start.followed)
    if start.named is None:
        world.from_first(lambda: mirrors.bring_back() if mirrors is not None else None)
    repaired, lost = set[str](), set[str]()
    while found.restored is None:
        target, passed = world.from_first(lambda: _choose(store, start, job))
        reported = {name for name, _ in found.skipped}
        found.skipped += [(name, why) for name, why in passed if name.removeprefix(f"{QUARANTINE}/") not in reported]
        if target is None:
            if found.skipped:
                # A start would silently throw the past away, with objects that were half loaded.
                raise NoUsableCheckpoint(store=store.root, skipped=tuple(found.skipped))
            break
        _require_finished(target, settings)
        source = CheckpointSource(target.store, target.name, target.manifest)
        try:
            found.restored = restore(source, items, world, accept=settings.accept, allow_pickle=settings.allow_pickle)
            found.target = target
        except UnbrokenError as refused:
            if target.store.root == store.root and target.name not in repaired and _is_damage(refused):
                name = target.name
                repaired.add(name)
                if world.from_first(lambda: mirrors is not None and mirrors.repair(name)):  # noqa: B023 -- called now
                    continue
            if start.named is not None or target.store.root != store.root:
                raise
            found.skipped.append(_quarantine_damaged(store, target.name, refused, world, job))
            # What a mirror has may be newer than what is left here.
            lost.add(target.manifest.id)
            world.from_first(lambda: mirrors.bring_back(without=lost) if mirrors is not None else None)
    world.all_or_none(lambda: _settle_hyperparameters(script, found, settings))
    found.computes_under = digest_of_settings(found.hyperparameters, items)
    found.set_aside += world.from_first(lambda: _carry_out(store, settings.resume, start, found.target, job, mirrors))
    return found


def _settle_hyperparameters(script: Script, found: Resumed, settings: Settings) -> None:
    if found.restored is None:
        found.hyperparameters = script.start()
        return
    before = found.restored.hyperparameters
    found.changes = script.changes(before or {})
    if found.changes and before is not None and settings.hyperparameters == "script":
        script.put_in_place(before)
    found.hyperparameters = script.continued(before, settings.hyperparameters)


def _require_finished(target: ResumeTarget, settings: Settings) -> None:
    """Raise for a checkpoint of a step that was abandoned in the middle, unless it was accepted."""
    moved = target.manifest.metadata.get(UNFINISHED)
    if moved and UNFINISHED not in settings.accept:
        what = f"the loop was left inside step {target.manifest.step + 1:,}, which had already changed: {moved}"
        raise NotExact(differences=((UNFINISHED, what),))


def _quarantine_damaged(store: Store, name: str, refused: UnbrokenError, world: World, job: str) -> tuple[str, str]:
    """Quarantine a checkpoint that turned out damaged while it was read; every other error is raised again."""
    if not _is_damage(refused):
        raise refused
    cause = refused.cause if isinstance(refused, RankFailed) else refused
    reasons = tuple(cause.details()) or (cause.headline(),)
    world.from_first(lambda: quarantine(store, name, reasons, job=job, at_ns=time.time_ns()))
    return name, reasons[0]


def _is_damage(refused: UnbrokenError) -> bool:
    cause = refused.cause if isinstance(refused, RankFailed) else refused
    return isinstance(cause, DamagedCheckpoint | ManifestDamaged)


def _prepare(store: Store, settings: Settings, job: str, mirrors: RunMirrors | None) -> _Start:
    """What the settings request, unless an earlier job has carried it out; a start from scratch is carried out here."""
    if settings.resume == "auto":
        return _Start(elsewhere=settings.load_path, is_unasked=True)
    if mirrors is not None:
        # First: on a wiped disk, only a mirror knows that an earlier job has carried the request out.
        mirrors.learn_rewinds()
    names = newest_first(store, scan(store).committed)
    wanted = without_tag(settings.resume)
    last = last_request(store)
    followed = last if last is not None and last.text == settings.resume else None
    if wanted == SCRATCH:
        # Without force it is an error even if it was carried out before: the request means step 0.
        mirrored = {} if followed or mirrors is None else mirrors.ids_after(-1)
        if (names or mirrored) and not settings.force:
            newest = names[0] if names else min(mirrored)
            raise CheckpointsExist(store=store.root, count=len(names) or len(mirrored), newest=newest)
        if followed is None:
            _abandon_all(store, names, mirrored, job, request=settings.resume if settings.force else None)
        set_aside = () if followed else tuple(names)
        return _Start(elsewhere=settings.load_path, set_aside=set_aside, followed=followed)
    if followed is not None:
        elsewhere = wanted if followed.is_elsewhere else None
        return _Start(elsewhere=elsewhere, is_required=True, followed=followed)
    # A bare step or name is this run's own, though the working directory has something of that name.
    if is_bare(wanted):
        place, name = store, _named_here_or_mirrored(store, wanted, mirrors)
    else:
        place, name, _ = _checkpoint_at(wanted, store)
    # One directory may be named in two ways, by a link or by "..".
    if place.root.resolve() == store.root.resolve():
        return _Start(named=name, is_required=True)
    if names:
        # Neither may win silently: `load_path` is for starting from another run, and gives way to this one's own.
        raise CheckpointUnknown(reference=wanted, store=store.root, known=tuple(names))
    return _Start(elsewhere=wanted, is_required=True)


def _checkpoint_at(reference: str, store: Store) -> tuple[Store, str, Manifest]:
    """A checkpoint of another run, in a directory or in an object store."""
    if is_url(reference):
        return checkpoint_of(resolve_remote(reference))
    return resolve_checkpoint(reference, store.files)


def _named_here_or_mirrored(store: Store, wanted: str, mirrors: RunMirrors | None) -> str:
    try:
        return named_in(store, wanted)
    except CheckpointUnknown:
        if mirrors is None or not mirrors.fetch_named(wanted):
            raise
        return named_in(store, wanted)


def _carry_out(
    store: Store, request: str, start: _Start, target: ResumeTarget | None, job: str, mirrors: RunMirrors | None
) -> list[str]:
    """Record that the request was carried out, now that its checkpoint is loaded; returns what was abandoned.

    Only now: a target that is damaged or does not fit must leave the newer checkpoints where they are.
    """
    if target is None or not start.is_required or start.followed is not None:
        return []
    if start.named is not None:
        names = newest_first(store, scan(store).committed)
        elsewhere = mirrors.ids_after(target.manifest.step) if mirrors is not None else {}
        return rewind(
            store, names, target=start.named, job=job, at_ns=time.time_ns(), request=request, elsewhere=elsewhere
        )
    if target.store.root != store.root:
        path = str(target.store.path(target.name).absolute())
        record_rewind(store, target=path, abandoned={}, job=job, at_ns=time.time_ns(), request=request)
    return []


def _abandon_all(
    store: Store, names: list[str], elsewhere: Mapping[str, str], job: str, *, request: str | None
) -> None:
    ids = {name: manifest.id for name in names if (manifest := read_quietly(store, name))}
    if ids or elsewhere or request is not None:
        at_ns = time.time_ns()
        record_rewind(store, target=SCRATCH, abandoned=ids, job=job, at_ns=at_ns, request=request, elsewhere=elsewhere)
        move_abandoned(store, list(ids))
    for name in names:
        if name not in ids:
            quarantine(store, name, ("abandoned unread by a start from scratch",), job=job, at_ns=time.time_ns())


def _newer_without_manifest(store: Store, *, after_step: int) -> list[tuple[str, str]]:
    """Newer checkpoints without a manifest: lost, and reported as skipped."""
    names = without_manifest(store, scan(store))
    return [(name, f"{MANIFEST}: is missing") for name in names if (step_of(name) or 0) > after_step]


def _choose(store: Store, start: _Start, job: str) -> tuple[ResumeTarget | None, list[tuple[str, str]]]:
    if start.named is not None:
        return ResumeTarget(store, start.named, store.read_manifest(start.named)), []
    # Quick only: all checksums are verified anyway as the bytes are read.
    choice = resume_point(store, Level.QUICK, job=job, at_ns=time.time_ns())
    passed = [(over.name, over.reason) for over in choice.skipped]
    chosen = choice.chosen.manifest if choice.chosen is not None else None
    passed += _newer_without_manifest(store, after_step=chosen.step if chosen else -1)
    if choice.chosen is not None and chosen is not None:
        return ResumeTarget(store, choice.chosen.name, chosen), passed
    if start.is_unasked:
        # An earlier job may have quarantined the last ones: that is no reason to silently start over.
        passed += [(f"{QUARANTINE}/{name}", "it was quarantined as damaged") for name in scan(store).quarantined]
        if passed:
            return None, passed
    if start.elsewhere is not None:
        place, name, manifest = _checkpoint_at(start.elsewhere, store)
        return ResumeTarget(place, name, manifest), passed
    if start.is_required:
        raise NoUsableCheckpoint(store=store.root, skipped=tuple(passed))
    return None, passed
