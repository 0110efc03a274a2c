"""The summary of a run from which text, JSON and page are all made, so that they cannot disagree."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from unbroken.disk import NodeKind
from unbroken.errors import CheckpointError, StorageFailed, UnbrokenError
from unbroken.files import LOCAL, Files
from unbroken.quoting import amounts
from unbroken.records.journal import Event, History, read_history
from unbroken.records.layout import Layout, run_of
from unbroken.records.lease import Lease, ProcessOf, Standing, read_current
from unbroken.records.metrics import Mismatch, Recomputed
from unbroken.records.outcome import Outcome, derive
from unbroken.records.process import Placement, placements
from unbroken.records.snapshot import RunState, read_run_state
from unbroken.records.stop import read_request
from unbroken.records.tracker_marks import known_ids, last_marks
from unbroken.store.check import Cause, Level, Verdict, verify
from unbroken.store.choose import Choice, choose
from unbroken.store.directory import Store
from unbroken.store.dumps import DumpSet, Pointer, read_pointers
from unbroken.store.fields import as_whole
from unbroken.store.keep import Policy, decide
from unbroken.store.manifest import Manifest
from unbroken.store.mirrored import mirrored_ids, read_direct, read_mirrors
from unbroken.store.names import MANIFEST, machine_of, step_of
from unbroken.store.scan import Inventory, newest_first, read_quietly, scan, without_manifest
from unbroken.store.seal import seal_command
from unbroken.store.sweep import candidates

# ---- emergency dumps that no job has used yet ----


@dataclass(frozen=True)
class Dumps:
    """The dumps of one step by one job: how many ranks point at theirs, where, and of how many there is a copy."""

    step: int
    world_size: int
    ranks: int
    hosts: tuple[str, ...]
    copies: int

    @property
    def name(self) -> str:
        """What resuming calls it."""
        return str(DumpSet(self.step, "", self.world_size))

    def sentence(self) -> str:
        """One line of text; whether the dumps are complete is checked by the next job."""
        where = ", ".join(self.hosts)
        copied = f", {self.copies} copied" if self.copies else ""
        return f"{self.ranks} of {amounts.plural(self.world_size, 'rank')} dumped on {where}{copied}; {self._then()}"

    @property
    def is_complete(self) -> bool:
        """Whether every rank points at a dump, so that together they may be a checkpoint."""
        return self.ranks == self.world_size

    def _then(self) -> str:
        """What the next job makes of them."""
        if not self.is_complete:
            return "not a checkpoint without the others"
        if self.copies == self.world_size:
            return "the next job makes a checkpoint of the copies, on any host"
        where = f"if it runs on {self.hosts[0]}" if len(self.hosts) == 1 else "if it runs on these hosts"
        return f"the next job makes a checkpoint of it, {where}"


def emergencies(pointers: Iterable[Pointer], *, after_step: int) -> list[Dumps]:
    """The dumps that are ahead of a step, newest first."""
    found: dict[DumpSet, list[Pointer]] = {}
    for pointer in pointers:
        if pointer.step > after_step:
            found.setdefault(pointer.dump_set, []).append(pointer)
    return [
        Dumps(
            dumps.step,
            dumps.world_size,
            len(theirs),
            tuple(sorted({machine_of(pointer.host) for pointer in theirs})),
            sum(pointer.copy is not None for pointer in theirs),
        )
        for dumps, theirs in sorted(found.items(), reverse=True)
    ]


# ---- mirrors ----


@dataclass(frozen=True)
class MirrorLag:
    """How far one mirror is behind: what it lacks, how old the oldest of that is, and what refused last."""

    mirror: str
    pending: tuple[str, ...]
    pending_bytes: int
    oldest_saved_at_ns: int | None
    newest_step: int | None
    refusal: str | None

    def sentence(self, now_s: float) -> str:
        """One line of text."""
        if not self.pending:
            return f"{self.mirror}  up to date"
        age = "" if self.oldest_saved_at_ns is None else amounts.duration(now_s - self.oldest_saved_at_ns / 1e9)
        many, size = amounts.plural(len(self.pending), "checkpoint"), amounts.size(self.pending_bytes)
        newest = "" if self.newest_step is None else f"; newest there: step {amounts.count(self.newest_step)}"
        refused = "" if self.refusal is None else f"; {self.refusal}"
        return f"{self.mirror}  {many} behind ({size}, for {age}){newest}{refused}"


def mirror_lags(store: Store, inventory: Inventory, history: History) -> tuple[MirrorLag, ...]:
    """How far each mirror of a run is behind its local checkpoints, from the ledger alone: no mirror is asked.

    Raises:
        StorageFailed: I/O error.
    """
    mirrors = read_mirrors(store)
    if not mirrors:
        return ()
    manifests = {name: manifest for name in inventory.committed if (manifest := read_quietly(store, name))}
    return tuple(_lag(store, mirror, manifests, history) for mirror in mirrors)


def _lag(store: Store, mirror: str, manifests: Mapping[str, Manifest], history: History) -> MirrorLag:
    done = mirrored_ids(store, mirror)
    missing = {name: manifest for name, manifest in manifests.items() if manifest.id not in done}
    events = [event for event in history.of_kind("mirror", "mirror-failed") if event.text("mirror") == mirror]
    is_refused = bool(events) and events[-1].kind == "mirror-failed"
    return MirrorLag(
        mirror,
        tuple(newest_first(store, missing)),
        sum(manifest.size_bytes for manifest in missing.values()),
        min((manifest.saved_at_ns for manifest in missing.values()), default=None),
        max((manifest.step for manifest in manifests.values() if manifest.id in done), default=None),
        events[-1].text("reason") if is_refused and missing else None,
    )


# ---- trackers ----


@dataclass(frozen=True)
class Tracked:
    """The run that one tracker shows: its id there, the last step it was sent, and how often it failed in this job."""

    tracker: str
    id: str
    sent: int | None
    failures: int = 0
    error: str | None = None

    def sentence(self) -> str:
        """One line of text."""
        sent = "nothing sent yet" if self.sent is None else f"sent up to step {amounts.count(self.sent)}"
        failed = f"; failed {amounts.plural(self.failures, 'time')}" if self.failures else ""
        return f"{self.tracker}  run {self.id}, {sent}{failed}" + (f": {self.error}" if self.error else "")


def tracked_runs(layout: Layout, history: History, files: Files = LOCAL) -> tuple[Tracked, ...]:
    """What the trackers of a run show, from its records alone: no tracker is asked.

    Raises:
        StorageFailed: I/O error.
    """
    if not (ids := known_ids(history.events)):
        return ()
    sent = last_marks(layout, [*ids.items()], files)
    return tuple(
        Tracked(name, run_id, sent.get((name, run_id)), *_failures(name, history)) for name, run_id in ids.items()
    )


def _failures(tracker: str, history: History) -> tuple[int, str | None]:
    """How often a tracker failed in the last job that had it, and what it said if it did not recover."""
    events = history.of_kind("tracker", "tracker-failed", "tracker-end")
    of_tracker = [event for event in events if event.text("tracker") == tracker]
    last = of_tracker[-1]
    if last.kind == "tracker-end":
        return last.whole("failures") or 0, last.text("error")
    return (1, last.text("error")) if last.kind == "tracker-failed" else (0, None)


# ---- the whole picture ----

_NO_MANIFEST: Final = f"{MANIFEST}: is missing"


@dataclass(frozen=True)
class StoreLine:
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
class Account:
    """What the data has served up to a checkpoint, added up over all ranks and jobs.

    ``agrees`` says whether it was what the data's function says: each sample of the run once.
    """

    samples: int
    digest: str
    agrees: bool

    def sentence(self) -> str:
        """One line of text."""
        samples = amounts.plural(self.samples, "sample")
        if self.agrees:
            return f"{samples} served, each exactly once ({self.digest})"
        return f"{samples} counted, but not each of them was served exactly once ({self.digest})"


def account_of(manifest: Manifest | None) -> Account | None:
    """What a checkpoint says of the data; None where its loader keeps no account."""
    said = manifest.metadata.get("data") if manifest is not None else None
    if not isinstance(said, Mapping):
        return None
    samples, digest, agrees = as_whole(said.get("samples")), said.get("digest"), said.get("agrees")
    if samples is None or not isinstance(digest, str) or not isinstance(agrees, bool):
        return None
    return Account(samples, digest, agrees)


@dataclass(frozen=True)
class Records:
    """What the journal of a run says, as far as ``status`` shows it."""

    jobs: int = 0
    crashed: int = 0
    torn: int = 0
    last_commit: Event | None = None
    recomputed: Recomputed = Recomputed()
    deadline_s: float | None = None
    is_stop_requested: bool = False
    placements: tuple[tuple[int, Placement], ...] = ()
    first_step: Event | None = None


@dataclass(frozen=True)
class RunSummary:
    """A run at one moment: who holds it, how far it is, what it could resume from."""

    run: str
    status: str
    lease: Lease | None
    standing: Standing | None
    state: RunState | None
    inventory: Inventory
    newest_usable: Manifest | None
    newest_usable_name: str | None
    skipped: tuple[tuple[str, str], ...]
    records: Records = Records()
    outcome: Outcome | None = None
    emergencies: tuple[Dumps, ...] = ()
    mirrors: tuple[MirrorLag, ...] = ()
    trackers: tuple[Tracked, ...] = ()
    # Where the checkpoints are, if not in the run directory.
    saved_to: str | None = None
    # False if the object store could not be asked: then nothing is known of the checkpoints.
    is_readable: bool = True

    @property
    def account(self) -> Account | None:
        """What the data has served up to the checkpoint that the run would resume from."""
        return account_of(self.newest_usable)


def summarize(store: Store, *, now_s: float, process_of: ProcessOf | None = None) -> RunSummary:
    """Look at a run: quick checks only, so that it answers in milliseconds on a login node.

    Raises:
        StorageFailed: an I/O error.
    """
    layout = run_of(store)
    place, saved_to, refusal = _place(store)
    # What is in the directory of such a run is older, and no job would resume from it.
    inventory = scan(place) if not refusal else Inventory()
    found = choose(newest_first(place, inventory.committed), lambda name: verify(place, name, Level.QUICK))
    lease = read_current(layout.run, store.files)
    state = read_run_state(layout, store.files)
    is_live = lease is not None and lease.seems_live(now_s=now_s, process_of=process_of)
    history = read_history(layout, store.files)
    outcome = derive(lease, history, state, is_live=is_live)
    requested = outcome is not None and outcome.status == "running" and _is_requested(layout, store)
    return RunSummary(
        run=str(layout.run),
        status=outcome.status if outcome else ("idle" if found.chosen else "empty"),
        lease=lease,
        standing=lease.standing(process_of) if lease is not None else None,
        state=state,
        inventory=inventory,
        newest_usable=found.chosen.manifest if found.chosen else None,
        newest_usable_name=found.chosen.name if found.chosen else None,
        skipped=(*refusal, *_skipped(place, inventory, found)),
        records=records_of(history, lease, outcome, is_stop_requested=requested),
        outcome=outcome,
        emergencies=tuple(emergencies(read_pointers(layout.run, store.files), after_step=_step(found))),
        mirrors=mirror_lags(store, inventory, history),
        trackers=tracked_runs(layout, history, store.files),
        saved_to=saved_to,
        is_readable=not refusal,
    )


def _place(store: Store) -> tuple[Store, str | None, tuple[tuple[str, str], ...]]:
    """Where the checkpoints of a run are; and why the object store could not be asked, if it could not."""
    address = read_direct(store)
    if address is None:
        return store, None, ()
    # Imported here: most runs save in their directory.
    from unbroken.mirror.remote import checkpoints_of

    try:
        place = checkpoints_of(store)
        scan(place)
    except UnbrokenError as refused:
        return store, address, ((address, refused.headline()),)
    return place, address, ()


def _step(found: Choice) -> int:
    return found.chosen.manifest.step if found.chosen is not None and found.chosen.manifest is not None else -1


def _skipped(store: Store, inventory: Inventory, found: Choice) -> tuple[tuple[str, str], ...]:
    """What is newer than the checkpoint to resume from and cannot be used, newest first."""
    reasons = {over.name: over.reason for over in found.skipped}
    for name in without_manifest(store, inventory):
        step = step_of(name)
        if step is None or step > _step(found):
            reasons[name] = _NO_MANIFEST
    return tuple((name, reasons[name]) for name in newest_first(store, reasons))


def _is_requested(layout: Layout, store: Store) -> bool:
    try:
        return read_request(layout, store.files) is not None
    except StorageFailed:
        # Another user's file, say; the job looks for itself, and what else is known of the run is worth showing.
        return False


def records_of(
    history: History, lease: Lease | None, outcome: Outcome | None, *, is_stop_requested: bool = False
) -> Records:
    """From the journal: how many jobs, the last commit, steps computed twice, the deadline."""
    current = lease.number if lease is not None else None
    ended = {event.job for event in history.of_kind("job-end")}
    is_over = outcome is None or outcome.status != "running"
    return Records(
        jobs=len(history.jobs),
        crashed=len([job for job in history.jobs if job not in ended and (job != current or is_over)]),
        torn=history.torn,
        last_commit=history.last("commit"),
        recomputed=recomputed_of(history),
        deadline_s=None if is_over else _deadline_s(history, current),
        is_stop_requested=is_stop_requested,
        placements=placements(history.events),
        first_step=history.last("first-step"),
    )


def _deadline_s(history: History, job: int | None) -> float | None:
    # The scheduler's latest answer overrides the environment of the job's start.
    if (moved := history.last("deadline", job=job)) is not None:
        return moved.instant("at_s")
    start = history.last("job-start", job=job)
    return start.instant("deadline_s") if start is not None else None


def recomputed_of(history: History) -> Recomputed:
    """The proof so far: of what each job says it has compared, its last word counts."""
    last = {event.job: event for event in history.of_kind("recomputed")}
    mismatches = tuple(
        Mismatch(
            event.whole("step") or 0,
            event.text("metric") or "",
            event.whole("first_job") or 0,
            event.text("first_bits") or "",
            event.job,
            event.text("second_bits") or "",
        )
        for event in history.of_kind("mismatch")
    )
    compared = sum(event.whole("compared") or 0 for event in last.values())
    return Recomputed(compared, sum(event.whole("agreeing") or 0 for event in last.values()), mismatches)


def checkpoint_lines(store: Store, policies: Sequence[Policy] = ()) -> list[StoreLine]:
    """Everything in a store, checkpoints first and newest first.

    Raises:
        StorageFailed: an I/O error.
    """
    inventory = scan(store)
    decision = decide(candidates(store, inventory.committed), policies)
    verdicts = (verify(store, name, Level.QUICK) for name in newest_first(store, inventory.committed))
    lines = [
        _committed_line(each, decision.kept.get(each.name, ()), is_latest=each.name == inventory.latest)
        for each in verdicts
        if not each.is_removed
    ]
    for torn in inventory.torn:
        files, size_bytes = torn.weigh(store)
        note = f"written by {torn.name.job}, never committed"
        lines.append(StoreLine(str(torn.name), "torn", torn.name.step, size_bytes=size_bytes, parts=files, note=note))
    lines += [StoreLine(name, "torn", step_of(name), note="its upload has not ended") for name in inventory.uploading]
    lines += [_moved_line(store, f"quarantine/{name}", "quarantined") for name in inventory.quarantined]
    lines += [_moved_line(store, name, "abandoned") for name in inventory.abandoned]
    lines += [StoreLine(leftover.name, "leftover", note="the next sweep removes it") for leftover in inventory.leftover]
    newest = max((line.step or 0 for line in lines if line.state == "committed"), default=-1)
    dumps = emergencies(read_pointers(run_of(store).run, store.files), after_step=newest)
    lines += [StoreLine(each.name, "emergency", each.step, parts=each.ranks, note=each.sentence()) for each in dumps]
    bereft = dict.fromkeys(without_manifest(store, inventory))
    lines += [StoreLine(name, "damaged", note=_NO_MANIFEST) for name in bereft]
    foreign = [name for name in inventory.foreign if name not in bereft]
    lines += [StoreLine(name, "foreign", note=_foreign_note(store, name)) for name in foreign]
    return lines


def _committed_line(verdict: Verdict, kept: tuple[str, ...], *, is_latest: bool) -> StoreLine:
    name, manifest = verdict.name, verdict.manifest
    note = str(verdict.findings[0]) if verdict.findings else ("latest" if is_latest else None)
    if manifest is None:
        return StoreLine(name, _state(verdict), note=note)
    return StoreLine(
        name,
        _state(verdict),
        manifest.step,
        manifest.kind,
        manifest.saved_at_ns,
        manifest.size_bytes,
        len(manifest.parts),
        kept,
        note,
    )


def _state(verdict: Verdict) -> str:
    if verdict.is_sound:
        return "committed"
    if verdict.is_damaged:
        return "damaged"
    # Not known to be damaged: another version, or another day, may read it.
    causes = {finding.cause for finding in verdict.findings}
    return "newer-format" if Cause.UNKNOWN_FORMAT in causes else "unreadable"


def _moved_line(store: Store, name: str, state: str) -> StoreLine:
    try:
        manifest = store.read_manifest(name)
    except (CheckpointError, StorageFailed):
        return StoreLine(name, state, note="its manifest does not verify")
    return StoreLine(
        name, state, manifest.step, manifest.kind, manifest.saved_at_ns, manifest.size_bytes, len(manifest.parts)
    )


def _foreign_note(store: Store, name: str) -> str:
    found = store.files.find(store.path(name))
    is_folder = found is not None and found.kind is NodeKind.DIRECTORY
    command = seal_command(store.files, store.path(name)) if is_folder else None
    return "not ours, never touched" + (f"; to make it a checkpoint: {command}" if command else "")
