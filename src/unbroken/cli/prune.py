"""``unbroken prune``: deletes checkpoints that no keep policy retains, and leftovers of crashes."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click

from unbroken.cli.arguments import FiniteRange
from unbroken.cli.output import Output, as_command
from unbroken.cli.policies import policies_of
from unbroken.disk import NodeKind
from unbroken.errors import BadUsage, UnbrokenError
from unbroken.mirror.address import is_url, parse_address
from unbroken.mirror.background import Mirror, removed_there
from unbroken.mirror.client import Client, open_client
from unbroken.mirror.ownership import require_present
from unbroken.mirror.remote import home_of
from unbroken.mirror.remove import remove_checkpoints
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.records.layout import Layout, run_of
from unbroken.records.lease import Lease, Standing, draft_judge, read_current
from unbroken.records.leftovers import left_scratch
from unbroken.records.process import process_of
from unbroken.records.run_references import is_run, resolve
from unbroken.records.takeover import LeaseWatch
from unbroken.report.style import Style
from unbroken.store.check import Level, verify
from unbroken.store.directory import Store
from unbroken.store.keep import Decision, Policy, best_by, compose, decide
from unbroken.store.mirrored import read_mirrors
from unbroken.store.names import DraftName, scratch_draft
from unbroken.store.references import Reference
from unbroken.store.scan import scan
from unbroken.store.sweep import SweepPlan, candidates, carry_out, plan_sweep


@as_command(
    "prune",
    examples=(
        ("unbroken prune runs/a --dry-run", "show what would be deleted"),
        ("unbroken prune runs/a --keep-last-k 3 --keep-milestone-every 1000", "with these policies"),
    ),
)
@click.argument("run", metavar="RUN")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, delete nothing.")
@click.option("--keep-last-k", type=click.IntRange(1), metavar="K", help="Keep the newest K steps.")
@click.option("--keep-milestone-every", type=click.IntRange(1), metavar="N", help="Keep steps that are multiples of N.")
@click.option("--keep-every-seconds", type=FiniteRange(1), metavar="T", help="Keep one checkpoint for every T seconds.")
@click.option("--keep-best", metavar="METRIC[:min|max]", help="Keep the best checkpoint by a metric.")
@click.option("--include-torn", is_flag=True, help="Also delete torn checkpoints of a run without a lease.")
def command(
    output: Output,
    run: str,
    dry_run: bool,
    keep_last_k: int | None,
    keep_milestone_every: int | None,
    keep_every_seconds: float | None,
    keep_best: str | None,
    include_torn: bool,
) -> None:
    """Delete checkpoints that no keep policy retains.

    Also deletes leftovers of crashed jobs. Without a --keep option the policies of the run's config apply; a run
    without a config keeps all checkpoints.

    Never deletes the newest usable checkpoint, pinned or damaged ones, those that a mirror of the run lacks or cannot
    be asked for, or foreign files. Verifies all checksums of the newest checkpoint first, so that the last good one
    is not deleted in favour of a damaged one. RUN may be a mirror, such as s3://bucket/runs/a; there two blocks of
    each part are verified.
    """
    found = resolve(run)
    store = found.store
    client = mirror_client(store)
    if include_torn and (client is not None or is_url(run)):
        complaint = "--include-torn is for directories: an unfinished upload may be that of a running job"
        raise BadUsage(command="unbroken prune", complaint=f"{complaint}, and the next job finishes or removes it")
    flags = (keep_last_k, keep_milestone_every, keep_every_seconds, keep_best)
    # `--keep-milestone-every 1000` alone must not keep all other checkpoints too, as no limit on the last k would.
    chosen = _composed(keep_last_k or 1, *flags[1:]) if any(flags) else policies_of(found.records or store)
    _require_measured(store, keep_best)
    # Of a mirror two blocks of each part are read: all of them would be a download.
    level = Level.FULL if client is None else Level.SAMPLED
    decision = _decided(store, chosen, output, level, reads_newest=not dry_run)
    is_live = _judge(store, output, include_torn=include_torn, watches=not dry_run and client is None)
    spared = _spared(found, decision.released)
    if client is None:
        spared |= _linked(store, decision.released) | _unconfirmed(store, decision.released)
    plan = plan_sweep(store, decision.released, is_live=is_live, spared=spared)
    left = () if client is not None else _scratch(store, is_live)
    # For a store without a run directory the plan has them already.
    scratch = [path for path in left if path.parent != store.root]
    if not dry_run and client is not None:
        remove_checkpoints(client, tuple(plan.checkpoints))
    elif not dry_run:
        carry_out(store, plan)
        for path in scratch:
            store.files.remove_file(path)
    fields = {
        "store": str(store.root),
        "dry_run": dry_run,
        "removed": list(plan.names),
        "removed_scratch": [str(path) for path in scratch],
        "freed_bytes": plan.freed_bytes,
        "not_removed": [{"name": name, "reason": reason} for name, reason in plan.left],
        "kept": {name: list(reasons) for name, reasons in decision.kept.items()},
    }
    names = (*plan.names, *(str(path) for path in scratch))
    output.document(
        "unbroken.prune/2", fields, lambda: _text(decision, plan, names, dry_run=dry_run, style=output.style)
    )


def mirror_client(store: Store) -> Client | None:
    """The client of a store that is in an object store; None for a directory."""
    if not is_url(str(store.root)):
        return None
    return open_client(parse_address(str(store.root)))


def _scratch(store: Store, is_live: Callable[[DraftName], bool]) -> Sequence[Path]:
    return left_scratch(run_of(store), is_live=lambda job: is_live(scratch_draft(job)), now_s=time.time())


def _composed(last_k: int, every_n: int | None, every_s: float | None, best: str | None) -> Sequence[Policy]:
    try:
        return compose(last_k, every_n, every_s, best)
    except ValueError as wrong:
        raise BadUsage(command="unbroken prune", complaint=str(wrong)) from wrong


def _require_measured(store: Store, best: str | None) -> None:
    """Reject a metric that no checkpoint has: a typo would delete the best one with all the others."""
    if best is None:
        return
    known = candidates(store, scan(store).committed)
    metric, measured = best_by(best).metric, sorted({name for each in known for name in each.metrics})
    if known and metric not in measured:
        measured_text = f"known metrics: {', '.join(measured)}" if measured else "they have no metrics"
        raise BadUsage(command="unbroken prune", complaint=f"no checkpoint has a metric '{metric}'; {measured_text}")


def _decided(store: Store, policies: Sequence[Policy], output: Output, level: Level, *, reads_newest: bool) -> Decision:
    known = candidates(store, scan(store).committed)
    while True:
        decision = decide(known, policies)
        if decision.newest is None or not decision.released or not reads_newest:
            return decision
        with output.progress(f"read {decision.newest}", 0, is_bytes=True) as advance:
            verdict = verify(store, decision.newest, level, progress=advance)
        if verdict.is_sound:
            return decision
        output.note(f"{decision.newest} is damaged, keeping an older one: {verdict.findings[0]}")
        known = [replace(each, is_usable=False) if each.name == decision.newest else each for each in known]


def _spared(named: Reference, released: Sequence[str]) -> dict[str, str]:
    """Never the directory named on the command line, and never a run, even one sealed like a checkpoint."""
    runs = [name for name in released if is_run(Layout(named.store.path(name)))]
    spared = dict.fromkeys(runs, "contains the records of a run")
    return spared if named.name is None else {**spared, named.name: "named on the command line"}


def _linked(store: Store, released: Sequence[str]) -> dict[str, str]:
    """Those to whose files links beside them lead: the best ones of a ``ModelCheckpoint`` of Lightning."""
    if not released:
        # There may be no directory yet.
        return {}
    files, root = store.files, store.root
    beside = [each for each in files.list_directory(root) if each.name not in released]
    folders = [root, *(root / each.name for each in beside if each.kind is NodeKind.DIRECTORY)]
    found: dict[str, str] = {}
    for link in (
        folder / each.name for folder in folders for each in files.list_present(folder) if each.kind is NodeKind.LINK
    ):
        end = Path(os.path.normpath(link.parent / (files.read_link(link) or "")))
        if end.parent.parent == root and end.parent.name in released:
            found[end.parent.name] = f"{link.relative_to(root)} is a link to it"
    return found


def _unconfirmed(store: Store, released: Sequence[str]) -> dict[str, str]:
    """Those that a mirror is recorded to hold and lacks, or cannot be asked for: what is here may be the only copy."""
    found: dict[str, str] = {}
    for text in read_mirrors(store) if released else ():
        address = parse_address(text)
        try:
            mirror = Mirror(address, open_client(home_of(address, store)))
            require_present(store, mirror.client)
            gone = set(removed_there(store, mirror).values())
        except UnbrokenError as refused:
            found |= dict.fromkeys(released, f"{text} cannot confirm that it has it: {refused.message}")
        else:
            found |= {name: f"it is not in {text} any more" for name in released if name in gone}
    return found


def _judge(store: Store, output: Output, *, include_torn: bool, watches: bool) -> Callable[[DraftName], bool]:
    run = run_of(store).run
    if include_torn and read_current(run, store.files) is None:
        return lambda draft: False
    live = draft_judge(run, is_live=lambda lease: _is_live(run, lease, output, watches=watches), files=store.files)
    return lambda draft: live(draft.job)


def _is_live(run: Path, lease: Lease, output: Output, *, watches: bool) -> bool:
    """Whether the holder may still be writing; the lease of an invisible one is watched before anything is deleted."""
    watch = LeaseWatch(run, monotonic=time.monotonic, process_of=process_of)
    if not watches:
        return lease.standing(process_of) is not Standing.GONE
    return watch.until_known(time.sleep, output.note) is Standing.ALIVE


def _text(decision: Decision, plan: SweepPlan, names: Sequence[str], *, dry_run: bool, style: Style) -> str:
    verb = "would delete" if dry_run else "deleted"
    lines = [
        f"{style.good('keep')}    {printable(name)}  ({', '.join(reasons)})" for name, reasons in decision.kept.items()
    ]
    lines += [f"{style.warn('skip')}    {printable(name)}  ({printable(reason)})" for name, reason in plan.left]
    lines += [f"{style.bad('delete')}  {printable(name)}" for name in names]
    what = amounts.plural(len(names), "entry", "entries")
    lines.append(f"{verb} {what}, {amounts.size(plan.freed_bytes)}")
    return "\n".join(lines)
