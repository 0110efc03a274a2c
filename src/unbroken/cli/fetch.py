"""``unbroken fetch``: brings checkpoints back from a mirror."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from unbroken.cli.arguments import FiniteRange
from unbroken.cli.output import Output, as_command
from unbroken.errors import BadUsage, NotMirrored, NoUsableCheckpoint, StorageFailed
from unbroken.mirror.address import address_of, is_url, parse_address
from unbroken.mirror.background import Mirror
from unbroken.mirror.bring_back import Brought, Taking, bring_back, fetch_named, repair, take_rewinds
from unbroken.mirror.client import Client, open_client
from unbroken.mirror.fetch import Fetched, command_job, fetch_checkpoint, sweep_own_drafts
from unbroken.mirror.ownership import adopt
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
from unbroken.store.references import Reference, checkpoint_of
from unbroken.store.scan import newest_first, read_quietly, scan

_ATTEMPTS: Final = 5


@as_command(
    "fetch",
    examples=(
        ("unbroken fetch s3://bucket/runs/a runs/a", "the newest checkpoint, into a run directory"),
        ("unbroken fetch s3://bucket/runs/a@1000 runs/a", "the checkpoint of step 1,000"),
        ("unbroken fetch runs/a", "repair a run from its own mirrors, and fetch what is newer there"),
    ),
    exit_codes={0: "fetched, or all of it was there", 3: "the mirror's copy is damaged", 5: "there is no checkpoint"},
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
    fetch leaves the old copy or none. Of a damaged local checkpoint only the damaged parts are fetched.
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
    is_all, is_refreshing, dry_run = asked
    attempt = 0
    while True:
        attempt += 1
        found = resolve_remote(source)
        names = _wanted(found, is_all=is_all)
        try:
            return _fetch_names(output, found.store, names, run, limits, is_refreshing=is_refreshing, dry_run=dry_run)
        except StorageFailed:
            # A run at work removes old checkpoints; then there is a newer one, or an error that says what there is.
            if attempt == _ATTEMPTS or not any(is_removed(found.store, name) for name in names):
                raise


def _fetch_names(
    output: Output,
    remote: Store,
    names: list[str],
    run: Path,
    limits: Limits,
    *,
    is_refreshing: bool,
    dry_run: bool,
) -> tuple[Store, list[dict[str, Any]]]:
    store = Store(run / CHECKPOINTS if remote.root.name == CHECKPOINTS else run)
    manifests = {name: remote.read_manifest(name) for name in names}
    if dry_run:
        return store, [
            _row(name, manifest.step, str(remote.root), (len(manifest.parts), manifest.size_bytes), is_new=True)
            for name, manifest in manifests.items()
        ]
    job = command_job(host_name(), os.getpid())
    taking = Taking(job, time.time_ns, limits)
    client = _client(remote)
    store.files.make_directory(store.root, durable=True)
    sweep_own_drafts(store, host_name())
    adopt(store, client, job=job)
    take_rewinds(remote, store, taking)
    total = sum(manifest.size_bytes for manifest in manifests.values())
    with output.progress("fetch", total, is_bytes=True) as advance:
        limits.progress = advance
        fetched = [
            fetch_checkpoint(remote, name, store, limits, job=job, at_ns=time.time_ns(), is_refreshing=is_refreshing)
            for name in names
        ]
    return store, [_fetched_row(each, str(remote.root)) for each in fetched]


def _client(remote: Store) -> Client:
    text = str(remote.root)
    return open_client(parse_address(text) if is_url(text) else address_of(remote.root))


def _wanted(found: Reference, *, is_all: bool) -> list[str]:
    if found.name is not None:
        return [found.name]
    if not is_all:
        return [checkpoint_of(found)[1]]
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
    addresses = [parse_address(text) for text in known]
    mirrors = [Mirror(each, open_client(home_of(each, store))) for each in addresses]
    if dry_run:
        verdicts = [verify(store, name, Level.FULL) for name in scan(store).committed]
        damaged = [(each.name, each.manifest) for each in verdicts if not each.is_sound]
        return store, [
            _row(name, manifest.step if manifest else None, known[0], (None, None), is_new=False)
            for name, manifest in damaged
        ]
    taking = Taking(command_job(host_name(), os.getpid()), time.time_ns, limits)
    sweep_own_drafts(store, host_name())
    with output.progress("fetch", 0, is_bytes=True) as advance:
        limits.progress = advance
        if at and "/" not in wanted:
            brought = fetch_named(store, wanted, mirrors, taking)
            done = [brought] if brought is not None else []
        else:
            done = _bring_all_back(output, store, mirrors, taking)
    return store, [_fetched_row(each.fetched, each.mirror) for each in done]


def _bring_all_back(output: Output, store: Store, mirrors: Sequence[Mirror], taking: Taking) -> list[Brought]:
    names = [name for name in scan(store).committed if read_quietly(store, name) is not None]
    tried = [repair(store, name, mirrors, taking) for name in names]
    done = [each for each in tried if each is not None]
    return done + bring_back(store, mirrors, taking, warn=output.note)


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
