"""``unbroken mirror``: copies checkpoints to the mirrors of a run and verifies them there."""

import os
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from unbroken.cli.arguments import FiniteRange
from unbroken.cli.output import Output, as_command
from unbroken.errors import (
    BadUsage,
    CheckpointError,
    DamagedCheckpoint,
    MirrorIncomplete,
    NotMirrored,
    StorageError,
    UnbrokenError,
)
from unbroken.mirror.address import addresses_in, is_url, parse_address
from unbroken.mirror.background import Mirror, forget_removed, local_damage, pending, removed_there
from unbroken.mirror.client import open_client
from unbroken.mirror.ownership import is_mirror, owned_first, push_rewinds, require_own
from unbroken.mirror.remote import home_of
from unbroken.mirror.transfer import Limits
from unbroken.mirror.upload import upload_checkpoint
from unbroken.quoting import amounts
from unbroken.records.layout import run_of
from unbroken.records.run_references import resolve
from unbroken.report.style import Style
from unbroken.store.directory import Store
from unbroken.store.mirrored import forget_uploads, mirrored_ids, read_mirrors, write_mirrors
from unbroken.store.scan import newest_first, read_quietly, scan


@dataclass
class _Done:
    """What became of the checkpoints of a run at one mirror."""

    mirror: str
    before: int
    pending: list[str]
    mirrored: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "mirror": self.mirror,
            "already_mirrored": self.before,
            "pending": self.pending,
            "mirrored": self.mirrored,
            "failed": [{"name": name, "reason": reason} for name, reason in self.failed],
        }


@as_command(
    "mirror",
    examples=(
        ("unbroken mirror runs/a", "upload what is not mirrored yet"),
        ("unbroken mirror runs/a --to s3://bucket/runs/a", "to a new mirror, from now on one of the run"),
        ("unbroken mirror outputs --to file:///shared/outputs", "sealed checkpoints of another tool"),
    ),
    exit_codes={0: "everything is mirrored", 74: "something is not mirrored"},
)
@click.argument("run", metavar="RUN")
@click.option("--to", multiple=True, metavar="ADDRESS", help="Add a mirror: s3://, gs://, az:// or file:///.")
@click.option("--forget", multiple=True, metavar="ADDRESS", help="Give up a mirror; nothing is deleted there.")
@click.option("--dry-run", is_flag=True, help="Show what would be uploaded, upload nothing.")
@click.option("--bytes-per-second", type=FiniteRange(1), metavar="N", help="Limit the bandwidth.")
def command(
    output: Output,
    run: str,
    to: tuple[str, ...],
    forget: tuple[str, ...],
    dry_run: bool,
    bytes_per_second: float | None,
) -> None:
    """Copy checkpoints to the mirrors of a run.

    Uploads every checkpoint that is not known to be in each mirror and verifies it there. A training job with a
    `mirror` setting does this by itself; this command finishes what a job left, or mirrors a run after the fact.
    An interrupted command can be repeated. Checkpoints that are not mirrored yet are never pruned.
    """
    store = _to_be_copied(run)
    job = f"mirror_{os.getpid()}"
    mirrors = _mirrors(store, to, forget, run)
    # One that is named anew is begun again, if it was emptied.
    known = set(read_mirrors(store)) - set(_named(to))
    opened, away = _opened_all(output, store, mirrors, job, known, is_dry=dry_run)
    if not dry_run and tuple(mirrors) != read_mirrors(store):
        for text in {str(parse_address(each)) for each in forget}:
            # First, so that a kill leaves a mirror that is asked anew. Were they kept, a mirror that is emptied and
            # added again would count as full.
            forget_uploads(store, text, mirrored_ids(store, text))
        write_mirrors(store, mirrors, job=job)
    done = [_counted(store, mirror) for mirror in opened]
    if away and not done:
        raise next(iter(away.values()))
    if not dry_run:
        total = sum(_size(store, each.pending) for each in done)
        with output.progress("upload", total, is_bytes=True) as advance:
            for mirror, each in zip(opened, done, strict=True):
                _upload(store, mirror, each, Limits(bytes_per_second=bytes_per_second, progress=advance), job)
    done += [_not_tried(store, text, refused) for text, refused in away.items()]
    fields = {"store": str(store.root), "dry_run": dry_run, "mirrors": [each.as_json() for each in done]}
    failed = tuple((f"{name} to {each.mirror}", reason) for each in done for name, reason in each.failed)
    if failed:
        raise MirrorIncomplete(failed=failed, mirrored=sum(len(each.mirrored) for each in done))
    output.document("unbroken.mirror/1", fields, lambda: _text(done, forget, dry_run=dry_run, style=output.style))


def _to_be_copied(run: str) -> Store:
    """The local store of a run."""
    store = resolve(run).store
    if is_url(str(store.root)) or is_mirror(store):
        complaint = f"the checkpoints at {store.root} are in a mirror already, and a mirror is made of a run directory"
        raise BadUsage(command="unbroken mirror", complaint=f"{complaint}; `unbroken fetch` copies them into one")
    return store


def _mirrors(store: Store, to: Sequence[str], forget: Sequence[str], run: str) -> list[str]:
    known = read_mirrors(store)
    if not all(map(addresses_in, to)):
        # As of an unset variable in a script: without an error, nobody would notice that nothing was added.
        raise BadUsage(command="unbroken mirror", complaint="--to is empty; it needs the address of a mirror")
    gone = [str(parse_address(text)) for text in forget]
    for text in gone:
        if text not in known:
            raise BadUsage(command="unbroken mirror", complaint=f"{text} is not a mirror of this run")
    mirrors = [text for text in dict.fromkeys((*known, *_named(to))) if text not in gone]
    if not mirrors and not gone:
        raise NotMirrored(run=str(run_of(store).run) if store.root.is_absolute() else run)
    return mirrors


def _named(to: Sequence[str]) -> list[str]:
    return [str(parse_address(text)) for each in to for text in addresses_in(each)]


def _opened_all(
    output: Output, store: Store, texts: Sequence[str], job: str, known: Collection[str], *, is_dry: bool
) -> tuple[list[Mirror], dict[str, StorageError]]:
    """The mirrors that are there, and why the others are not; one that is new to the run has to be there."""
    opened, away = dict[str, Mirror](), dict[str, StorageError]()
    for text in owned_first(store, texts):
        try:
            opened[text] = _opened(output, store, text, job, is_known=text in known, is_dry=is_dry)
        except StorageError as refused:
            if text not in known:
                raise
            away[text] = refused
    return [opened[text] for text in texts if text in opened], away


def _not_tried(store: Store, text: str, refused: StorageError) -> _Done:
    """A mirror that is not there: of all checkpoints nothing is known, whatever was recorded."""
    names = newest_first(store, scan(store).committed)
    return _Done(text, 0, names, failed=[(names[0] if names else "nothing", refused.message)])


def _opened(output: Output, store: Store, text: str, job: str, *, is_known: bool, is_dry: bool) -> Mirror:
    address = parse_address(text)
    client = open_client(home_of(address, store))
    adopted = require_own(store, client, new_id=secrets.token_hex(8), job=job, is_known=is_known, is_dry=is_dry)
    if adopted is not None:
        output.note(adopted.sentence())
    mirror = Mirror(address, client)
    if not is_dry:
        forget_removed(store, mirror)
    return mirror


def _counted(store: Store, mirror: Mirror) -> _Done:
    """What is in a mirror and what is not; a dry run has not taken back the records of what was removed there."""
    known, left = _known(store, mirror.url), pending(store, mirror.url)
    gone = set(removed_there(store, mirror).values()) if known else set[str]()
    return _Done(mirror.url, len(known - gone), newest_first(store, [*left, *gone]))


def _known(store: Store, mirror: str) -> set[str]:
    done = mirrored_ids(store, mirror)
    return {
        name
        for name in scan(store).committed
        if (manifest := read_quietly(store, name)) is not None and manifest.id in done
    }


def _size(store: Store, names: Sequence[str]) -> int:
    return sum(manifest.size_bytes for name in names if (manifest := read_quietly(store, name)) is not None)


def _upload(store: Store, mirror: Mirror, done: _Done, limits: Limits, job: str) -> None:
    push_rewinds(store, mirror.client, mirror.address)
    for name in done.pending:
        try:
            upload_checkpoint(store, name, mirror.client, mirror.url, limits, job=job, clock_ns=time.time_ns)
        except UnbrokenError as refused:
            done.failed.append((name, _reason(store, refused)))
            if not isinstance(refused, CheckpointError):
                # The store itself refuses: the others would fare no better.
                done.failed += [(rest, "not tried") for rest in done.pending[done.pending.index(name) + 1 :]]
                return
        else:
            done.mirrored.append(name)


def _reason(store: Store, refused: UnbrokenError) -> str:
    if not isinstance(refused, DamagedCheckpoint):
        return refused.message
    return f"{next(iter(refused.findings))}; {local_damage(store)}"


def _text(done: Sequence[_Done], forget: Sequence[str], *, dry_run: bool, style: Style) -> str:
    lines = []
    for each in done:
        names = each.pending if dry_run else each.mirrored
        word = "would upload" if dry_run else "mirrored"
        what = ", ".join(names) if names else "nothing"
        before = f"; {amounts.plural(each.before, 'checkpoint')} mirrored before" if each.before else ""
        lines.append(f"{style.good(word)}  {what} to {each.mirror}{before}")
    lines = lines or ["no mirrors left"]
    if forget and not dry_run:
        lines.append(f"{style.warn('note')}  a job whose settings name {' or '.join(forget)} adds it again")
    return "\n".join(lines)
