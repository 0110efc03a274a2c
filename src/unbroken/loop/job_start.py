"""Journals and logs the start of a job: where it resumes from, what it skipped, its walltime limit."""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict

import torch

from unbroken.loop.recorder import SilentRecorder
from unbroken.loop.resume import Resumed
from unbroken.loop.save_clock import SaveClock
from unbroken.loop.settings import Settings
from unbroken.quoting import amounts
from unbroken.quoting.log import logger
from unbroken.records.deadline import Deadline, skew_sentence
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.lease import Lease, number_of
from unbroken.records.process import host_name
from unbroken.state.capture import RNG
from unbroken.state.cursor import Cursor
from unbroken.state.fresh import unused_names
from unbroken.state.items import GradientsItem
from unbroken.store.rewind import next_request, without_tag
from unbroken.tested_versions import say_if_untested
from unbroken.world import World

_log = logger(__name__)


def record_resume(
    found: Resumed,
    recorder: SilentRecorder,
    settings: Settings,
    world: World,
    *,
    accepted_before: Collection[str] = (),
) -> None:
    """Journal where the job resumes from and what it skipped, and start its metrics."""
    for name, reason in found.skipped:
        recorder.event("checkpoint-skipped", name=name, reason=reason)
        if world.is_first:
            _log.warning("skipped %s: %s", name, reason)
    step = found.restored.step if found.restored else 0
    notes = found.restored.notes if found.restored else ()
    asked: dict[str, object] = {} if settings.resume == "auto" else {"requested": settings.resume}
    if found.followed is not None:
        asked["carried_out_by"] = found.followed.job
    if found.target is not None and (staged := found.target.staged) is not None:
        asked |= {"imported_from": found.target.path, "left_out": dict(staged.left_out)}
    recorder.event(
        "resume",
        step=step,
        name=found.target.name if found.target else None,
        notes=list(notes),
        abandoned=found.set_aside,
        changed=[change.name for change in found.changes if change.used(settings.hyperparameters) == "script"],
        **asked,
    )
    if world.is_first:
        _log_request(found, settings)
        _record_hyperparameters(found, settings, recorder)
    # RNG states that were accepted start over in every job.
    fresh = {*settings.accept} - {*accepted_before} | ({*settings.accept} & {RNG})
    is_comparable = not fresh and not notes and not found.set_aside
    recorder.begin_metrics(step, is_comparable=is_comparable, settings=found.computes_under)


def _log_request(found: Resumed, settings: Settings) -> None:
    """Log what became of a request to resume from another than the newest checkpoint."""
    if found.set_aside:
        # In an object store nothing is moved.
        what = "moved to abandoned/" if settings.checkpoints is None else "abandoned"
        _log.info("%s: %s", what, ", ".join(found.set_aside))
    if found.followed is not None and found.target is not None:
        _log.info(
            "resume '%s' was already carried out by job %s: continuing from the newest checkpoint; "
            "to do it again, use '%s'",
            without_tag(settings.resume),
            number_of(found.followed.job) or found.followed.job,
            next_request(settings.resume),
        )


def _record_hyperparameters(found: Resumed, settings: Settings, recorder: SilentRecorder) -> None:
    """Log and journal where the script constructs other values than the run started with, and which are used."""
    mode = settings.hyperparameters
    if found.changes:
        changed = [{**asdict(change), "used": change.used(mode)} for change in found.changes]
        recorder.event("hyperparameters", step=found.restored.step if found.restored else 0, changes=changed)
    for change in found.changes:
        _log.warning("%s", change.sentence(mode))


def record_accepted(
    found: Resumed, objects: Iterable[object], settings: Settings, recorder: SilentRecorder, world: World
) -> None:
    """Journal what was accepted, and warn of names that had no effect: they may be mistyped."""
    if not settings.accept:
        return
    unmet: list[str] = []
    if found.restored is not None:
        # Whether RNG states differ is found out when they are set, after everything else; gradients, in the first step.
        differed = (*found.restored.accepted, RNG, GradientsItem.name)
        unmet = unused_names(settings.accept, differed, list(objects))
    recorder.event("accept", names=list(settings.accept), unused=unmet)
    for name in unmet if world.is_first else ():
        _log.warning("accept '%s' had no effect: it did not change", name)


def record_data_notices(notices: Sequence[str], recorder: SilentRecorder, world: World) -> None:
    """Journal and log what the loader noticed about its data when its position was restored."""
    recorder.event("data", notices=list(notices))
    for notice in notices if world.is_first else ():
        _log.warning("data: %s", notice)


def warn_of_clock_skew(world: World) -> None:
    """Warn where the ranks' clocks differ so much that a lease or a deadline is misread. Collective."""
    shown = world.gather((time.time(), host_name()))
    said = skew_sentence([now_s for now_s, _ in shown], [host for _, host in shown]) if world.is_first else None
    if said is not None:
        _log.warning("%s", said)


def _lost_step(layout: Layout) -> int | None:
    """The newest step that was saved since somebody last asked for another start; None if there was no save."""
    newest: int | None = None
    for event in read_history(layout).of_kind("commit", "resume"):
        step = event.values.get("step")
        if event.kind == "resume" and "requested" in event.values:
            newest = None
        elif event.kind == "commit" and isinstance(step, int):
            newest = max(step, newest or 0)
    return newest


def log_start(
    layout: Layout,
    world: World,
    lease: Lease,
    found: Resumed,
    clock: SaveClock,
    deadline: Deadline | None,
    cursor: Cursor[object] | None = None,
    *,
    checkpoints: str | None = None,
) -> None:
    """Log what a job starts with, always in the same order; rank 0 only."""
    if not world.is_first:
        return
    ranks = amounts.plural(world.size, "rank")
    before = found.restored.world if found.restored else world.size
    was = "" if before == world.size else f" (saved by {amounts.plural(before, 'rank')})"
    _log.info("run %s, job %d, %s%s", layout.run, lease.number, ranks, was)
    if checkpoints is not None:
        _log.info("checkpoints are saved to %s", checkpoints)
    say_if_untested(torch.__version__, _log.warning)
    if found.restored is None or found.target is None:
        _log.info("starting at step 0")
        if lease.number > 1 and (saved := _lost_step(layout)) is not None:
            place = checkpoints or layout.checkpoints
            what = "the run has saved checkpoints up to step %s, and %s has none: stop this job if they should be there"
            _log.warning(what, f"{saved:,}", place)
    else:
        step = f"{found.restored.step:,}"
        if (staged := found.target.staged) is None:
            _log.info("resuming from step %s (%s, all checksums verified)", step, found.target.name)
        else:
            _log.info("starting from step %s of %s (%s)", step, found.target.path, staged.source.tool)
            for name, why in sorted(staged.left_out.items()):
                _log.warning("not imported: %s (%s)", name, why)
        for note in found.restored.notes:
            _log.warning("not exact: %s", note)
    if cursor is not None and (only_ranks := cursor.only_ranks) is not None and world.size > 1:
        what = "data: this loader resumes on %s only (it splits the samples by rank); on another number it is refused"
        _log.info(what, amounts.plural(only_ranks, "rank"))
    if deadline is not None:
        left = amounts.duration(deadline.at_s - time.time())
        kept = amounts.duration(clock.reserve.seconds(deadline.runtime_s))
        _log.info("walltime limit in %s (%s); the last save starts %s before it", left, deadline.source, kept)
    _log.info("checkpoint interval: %s", clock.describe())
