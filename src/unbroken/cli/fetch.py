"""``unbroken fetch``: brings checkpoints back from a mirror."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from unbroken.cli.arguments import FiniteRange
from unbroken.cli.output import Output, as_command
from unbroken.errors import (
    BadUsage,
    DamagedCheckpoint,
    FetchIncomplete,
    FormatUnknown,
    ManifestDamaged,
    NotMirrored,
    NoUsableCheckpoint,
    StorageError,
    StorageFailed,
    UnbrokenError,
)
from unbroken.mirror.address import address_of, is_url, parse_address
from unbroken.mirror.background import Mirror
from unbroken.mirror.bring_back import Brought, Skipped, Taking, bring_back, fetch_named, repair, take_rewinds
from unbroken.mirror.client import Client, open_client
from unbroken.mirror.fetch import Fetched, command_job, sweep_own_drafts
from unbroken.mirror.ownership import adopt, require_adoptable, require_present
from unbroken.mirror.remote import home_of, resolve_remote
from unbroken.mirror.transfer import Limits
from unbroken.quoting import amounts
from unbroken.records.layout import require_reachable
from unbroken.records.process import host_name
from unbroken.records.run_references import resolve
from unbroken.report.style import Style
from unbroken.store.check import Level, is_removed, verify
from unbroken.store.directory import Store
from unbroken.store.mirrored import read_mirrors
from unbroken.store.names import CHECKPOINTS
from unbroken.store.references import Reference, named_in
from unbroken.store.scan import newest_first, read_quietly, scan, without_manifest

_ATTEMPTS: Final = 5


@as_command(
    "fetch",
    examples=(
        ("unbroken fetch s3://bucket/runs/a runs/a", "the newest checkpoint, into a run directory"),
        ("unbroken fetch s3://bucket/runs/a@1000 runs/a", "the checkpoint of step 1,000"),
        ("unbroken fetch runs/a", "repair a run from its own mirrors, and fetch what is newer there"),
    ),
    exit_codes={
        0: "fetched, or all of it was there",
        3: "no whole copy: damage in the mirror, or here and not repaired",
        5: "there is no checkpoint",
    },
)
@click.argument("source", metavar="MIRROR|RUN")
@click.argument("run", metavar="[RUN]", required=False)
@click.option("--all", "is_all", is_flag=True, help="Fetch all checkpoints, not only the newest.")
@click.option("--refresh", is_flag=True, help="Replace a local checkpoint of the same name that differs.")
@click.option("--dry-run", is_flag=True, help="Show what would be fetched, fetch nothing.")
@click.option("--bytes-per-second", type=FiniteRange(1), metavar="N", help="Limit the bandwidth.")
def command(
    output: Output,
    source: str,
    run: str | None,
    is_all: bool,
    refresh: bool,
    dry_run: bool,
    bytes_per_second: float | None,
) -> None:
    """Fetch checkpoints from a mirror.

    MIRROR is an address such as s3://bucket/runs/a, with @STEP for one checkpoint; RUN is where it goes. A run that is
    given alone is repaired from its own mirrors. Checkpoints are staged, verified and then published: an interrupted
    fetch leaves the old copy or none. Of a damaged local checkpoint only the damaged parts are fetched. If the newest
    copy is damaged, the next older one is fetched. A dry run looks at names and sizes in the mirror, not at the bytes.
    """
    limits = Limits(bytes_per_second=bytes_per_second)
    if is_url(source) and parse_address(source.rpartition("@")[0] or source).scheme and run is None:
        raise BadUsage(command="unbroken fetch", complaint="missing argument RUN: the directory to fetch into")
    if not is_url(source):
        if run is not None or is_all or refresh:
            complaint = "RUN alone is repaired from its own mirrors; to fetch from elsewhere, give MIRROR RUN"
            raise BadUsage(command="unbroken fetch", complaint=complaint)
        store, done = _repair_run(output, source, limits, dry_run=dry_run)
    else:
        # Not "nothing given": an unset variable in a script must not fetch into the working directory.
        require_reachable(run or "")
        store, done = _fetch_into(output, source, Path(run or ""), limits, (is_all, refresh, dry_run))
    fields = {"store": str(store.root), "dry_run": dry_run, "checkpoints": done}
    output.document("unbroken.fetch/1", fields, lambda: _text(done, dry_run=dry_run, style=output.style))


def _fetch_into(
    output: Output, source: str, run: Path, limits: Limits, asked: tuple[bool, bool, bool]
) -> tuple[Store, list[dict[str, Any]]]:
    attempt = 0
    while True:
        attempt += 1
        found = resolve_remote(source)
        names = _wanted(found)
        try:
            return _fetch_names(output, found, names, run, limits, asked)
        except StorageFailed:
            # A run at work removes old checkpoints; then there is a newer one, or an error that says what there is.
            if attempt == _ATTEMPTS or not any(is_removed(found.store, name) for name in names):
                raise


def _fetch_names(
    output: Output, found: Reference, names: list[str], run: Path, limits: Limits, asked: tuple[bool, bool, bool]
) -> tuple[Store, list[dict[str, Any]]]:
    is_all, is_refreshing, dry_run = asked
    remote, is_named = found.store, found.name is not None
    store = Store(run / CHECKPOINTS if remote.root.name == CHECKPOINTS else run)
    taking = _taking(limits, is_dry=dry_run)
    _prepare(store, remote, taking)
    fetched: list[Fetched] = []
    failed: list[tuple[str, str]] = []
    read = [read_quietly(remote, name) for name in names[: None if is_all else 1]]
    total = sum(manifest.size_bytes for manifest in read if manifest is not None)
    with output.progress("fetch", total, is_bytes=True) as advance:
        limits.progress = advance
        for name in names:
            try:
                fetched.append(taking.take(remote, name, store, is_refreshing=is_refreshing))
            except (DamagedCheckpoint, FormatUnknown, ManifestDamaged) as damaged:
                if is_named:
                    raise
                failed.append((name, _first_finding(damaged)))
                output.note(f"skipped {name} in {remote.root}: {failed[-1][1]}")
            else:
                if not is_all:
                    break
    if failed and (is_all or not fetched):
        raise FetchIncomplete(mirror=str(remote.root), failed=tuple(failed), fetched=len(fetched))
    return store, [_fetched_row(each, str(remote.root)) for each in fetched]


def _taking(limits: Limits, *, is_dry: bool) -> Taking:
    return Taking(command_job(host_name(), os.getpid()), time.time_ns, limits, is_dry)


def _prepare(store: Store, remote: Store, taking: Taking) -> None:
    """Make the directory part of the run that the mirror belongs to; a dry run only looks whether it can be."""
    if taking.is_dry:
        require_adoptable(store, _client(remote))
        return
    store.files.make_directory(store.root, durable=True)
    sweep_own_drafts(store, host_name())
    adopt(store, _client(remote), job=taking.job)
    take_rewinds(remote, store, taking)


def _first_finding(damaged: UnbrokenError) -> str:
    return next(iter(damaged.details()), damaged.message)


def _client(remote: Store) -> Client:
    text = str(remote.root)
    return open_client(parse_address(text) if is_url(text) else address_of(remote.root))


def _wanted(found: Reference) -> list[str]:
    """What to fetch: the one that is named, all, or the first of these that is whole."""
    if found.name is not None:
        return [found.name]
    names = newest_first(found.store, scan(found.store).committed)
    if not names:
        raise NoUsableCheckpoint(store=found.store.root)
    return names


def _repair_run(output: Output, run: str, limits: Limits, *, dry_run: bool) -> tuple[Store, list[dict[str, Any]]]:
    place, at, wanted = run.rpartition("@")
    store = resolve(place if at and "/" not in wanted else run).store
    if is_url(str(store.root)):
        complaint = f"the run saves to {store.root}, not to a local disk; `unbroken fetch {store.root} RUN` copies it"
        raise BadUsage(command="unbroken fetch", complaint=complaint)
    known = read_mirrors(store)
    if not known:
        raise NotMirrored(run=run)
    taking = _taking(limits, is_dry=dry_run)
    repairing = _Repairing(output, store, taking)
    if not dry_run:
        sweep_own_drafts(store, host_name())
    mirrors = repairing.opened(known)
    with output.progress("fetch", 0, is_bytes=True) as advance:
        limits.progress = advance
        if at and "/" not in wanted:
            repairing.fetch(wanted, mirrors)
        else:
            repairing.repair_all(mirrors)
    repairing.require_done(", ".join(known))
    return store, [_fetched_row(each.fetched, each.mirror) for each in repairing.done]


class _Repairing:
    """What became of a run that is repaired from its own mirrors."""

    def __init__(self, output: Output, store: Store, taking: Taking) -> None:
        self._output, self._store, self._taking = output, store, taking
        self.done: list[Brought] = []
        self._failed: list[tuple[str, str]] = []
        self._refusals: list[StorageError] = []
        self._skipped: set[str] = set()

    def opened(self, texts: Sequence[str]) -> list[Mirror]:
        """The mirrors that are there."""
        mirrors = []
        for text in texts:
            address = parse_address(text)
            try:
                client = open_client(home_of(address, self._store))
                require_present(self._store, client)
            except StorageError as refused:
                self._refuse(text, refused)
            else:
                mirrors.append(Mirror(address, client))
        return mirrors

    def fetch(self, wanted: str, mirrors: Sequence[Mirror]) -> None:
        """Fetch or repair the checkpoint that is named."""
        brought = fetch_named(self._store, wanted, mirrors, self._taking, skipped=self._skip)
        if brought is not None:
            self.done.append(brought)
        elif not self._refusals:
            # Unknown, unless it is here; then no mirror has it.
            self._look(named_in(self._store, wanted), [])

    def repair_all(self, mirrors: Sequence[Mirror]) -> None:
        """Repair every local checkpoint, and fetch what is newer in a mirror."""
        found = scan(self._store)
        for name in (*found.committed, *without_manifest(self._store, found)):
            self._look(name, mirrors)
        repaired = {each.fetched.manifest.id for each in self.done}
        try:
            self.done += bring_back(
                self._store,
                mirrors,
                self._taking,
                refused=lambda mirror, refused: self._refuse(mirror.url, refused),
                skipped=self._skip,
                without={*repaired, *self._skipped},
                is_repairing=False,
            )
        except NoUsableCheckpoint:
            if not self._failed:
                raise

    def require_done(self, known: str) -> None:
        """Pass if nothing here is damaged and every mirror was asked."""
        if self._failed or self._refusals:
            for each in self.done:
                self._output.note(each.sentence())
        if self._failed:
            raise FetchIncomplete(mirror=known, failed=tuple(self._failed), fetched=len(self.done))
        if self._refusals:
            raise self._refusals[0]

    def _look(self, name: str, mirrors: Sequence[Mirror]) -> None:
        verdict = verify(self._store, name, Level.FULL)
        is_lost = name in without_manifest(self._store, scan(self._store))
        if verdict.is_sound or (verdict.is_removed and not is_lost):
            return
        try:
            brought = repair(self._store, name, mirrors, self._taking, skipped=self._skip)
        except UnbrokenError as refused:
            self._failed.append((name, f"{verdict.findings[0]}; {refused.message}"))
            return
        if brought is not None:
            self.done.append(brought)
        else:
            why = "a mirror could not be asked" if self._refusals else "no mirror has it"
            self._failed.append((name, f"{verdict.findings[0]}; {why}"))

    def _skip(self, skipped: Skipped) -> None:
        if skipped.id is not None:
            self._skipped.add(skipped.id)
        self._output.note(skipped.sentence())

    def _refuse(self, mirror: str, refused: StorageError) -> None:
        self._refusals.append(refused)
        self._output.note(f"the mirror {mirror} could not be asked: {refused.message}")


def _row(
    name: str, step: int | None, mirror: str, amount: tuple[int | None, int | None], *, is_new: bool
) -> dict[str, Any]:
    parts, size_bytes = amount
    return {"name": name, "step": step, "mirror": mirror, "bytes": size_bytes, "parts": parts, "is_new": is_new}


def _fetched_row(fetched: Fetched, mirror: str) -> dict[str, Any]:
    amount = (len(fetched.parts), fetched.size_bytes)
    return _row(fetched.name, fetched.manifest.step, mirror, amount, is_new=fetched.is_new)


def _text(done: Sequence[dict[str, Any]], *, dry_run: bool, style: Style) -> str:
    lines = []
    for row in done:
        if dry_run:
            word = "would fetch" if row["is_new"] else "would repair"
        elif row["is_new"]:
            word = "fetched"
        else:
            word = "repaired" if row["parts"] else "ok"
        what = f"{amounts.plural(row['parts'], 'part')}, {amounts.size(row['bytes'])}, " if row["parts"] else ""
        step = f"step {amounts.count(row['step'])}, " if row["step"] is not None else ""
        lines.append(f"{style.good(word)}  {row['name']}  ({step}{what}from {row['mirror']})")
    return "\n".join(lines) or "nothing to fetch: all local checkpoints verify, and no mirror has a newer one"
