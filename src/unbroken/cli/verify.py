"""``unbroken verify``: verifies checkpoints against the checksums in their manifests."""

import time

import click

from unbroken.cli.json_fields import verification_fields
from unbroken.cli.output import Output, as_command
from unbroken.errors import NoUsableCheckpoint
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.records.run_references import resolve
from unbroken.report.style import Style
from unbroken.store.check import Level, Verdict, verify, without_its_manifest
from unbroken.store.directory import Store
from unbroken.store.foreign import import_from_store
from unbroken.store.scan import newest_first, read_quietly, scan, without_manifest

EXIT_DAMAGED = 3


@as_command(
    "verify",
    examples=(
        ("unbroken verify runs/a", "names and sizes of all checkpoints"),
        ("unbroken verify runs/a --full", "all checksums of all checkpoints"),
        ("unbroken verify runs/a@1000 --full", "one checkpoint"),
    ),
    exit_codes={
        0: "no damage found",
        3: "a checkpoint is damaged or has lost its manifest; byte ranges are shown",
        5: "there is no checkpoint",
    },
)
@click.argument("what", metavar="RUN|CHECKPOINT")
@click.option("--full", "level", flag_value=Level.FULL.value, help="Verify all checksums.")
@click.option("--sampled", "level", flag_value=Level.SAMPLED.value, help="Verify two random blocks of each part.")
@click.option("--quick", "level", flag_value=Level.QUICK.value, help="Check only names, sizes and manifests (default).")
@click.option("--num-workers", type=click.IntRange(1, 64), default=4, metavar="N", help="Number of reader threads.")
def command(output: Output, what: str, level: str | None, num_workers: int) -> int:
    """Verify the checksums of checkpoints.

    RUN verifies all its checkpoints, CHECKPOINT (RUN@STEP, RUN@latest or a directory) only one. Changes nothing.
    """
    found = resolve(what)
    asked = Level(level or Level.QUICK.value)
    names, lost = ([found.name], ()) if found.name else _in_store(found.store)
    if not names and not lost:
        raise NoUsableCheckpoint(
            store=found.store.root, importing=import_from_store(found.store.root, found.store.files)
        )
    with output.progress(f"verify {asked.value}", _bytes_to_read(found.store, names, asked), is_bytes=True) as advance:
        verdicts = [
            verify(found.store, name, asked, seed=time.time_ns(), workers=num_workers, progress=advance)
            for name in names
        ]
    verdicts += [without_its_manifest(name, asked) for name in lost]
    if all(verdict.is_removed for verdict in verdicts):
        raise NoUsableCheckpoint(
            store=found.store.root, importing=import_from_store(found.store.root, found.store.files)
        )
    is_sound = all(verdict.is_sound or verdict.is_removed for verdict in verdicts)
    fields = {
        "store": str(found.store.root),
        "level": asked.value,
        "is_sound": is_sound,
        "checkpoints": [verification_fields(verdict) for verdict in verdicts],
    }
    output.document("unbroken.verify/1", fields, lambda: _text(verdicts, output.style))
    return 0 if is_sound else EXIT_DAMAGED


def _in_store(store: Store) -> tuple[list[str], tuple[str, ...]]:
    """All checkpoints, and those that have lost their manifest."""
    inventory = scan(store)
    return newest_first(store, inventory.committed), without_manifest(store, inventory)


def _bytes_to_read(store: Store, names: list[str], level: Level) -> int:
    if level is Level.QUICK:
        return 0
    return sum(manifest.size_bytes for name in names if (manifest := read_quietly(store, name)))


def _text(verdicts: list[Verdict], style: Style) -> str:
    lines = []
    for verdict in verdicts:
        if verdict.is_sound:
            lines.append(f"{style.good('ok')}       {verdict.name}  ({_scope(verdict)})")
        elif verdict.is_removed:
            lines.append(f"removed  {verdict.name}  (meanwhile, by its run or a command)")
        else:
            word = style.bad("damaged") if verdict.is_damaged else style.warn("unknown")
            lines.append(f"{word}  {verdict.name}  ({amounts.plural(len(verdict.findings), 'finding')})")
            lines += [f"         {finding}" for finding in verdict.findings]
        lines += [f"         {printable(name)}: not in the manifest, not checked" for name in verdict.foreign]
    return "\n".join(lines)


def _scope(verdict: Verdict) -> str:
    parts = amounts.plural(len(verdict.manifest.parts), "part") if verdict.manifest else ""
    if verdict.level is Level.QUICK:
        return f"{parts}, names and sizes checked; --full verifies all checksums"
    return f"{parts}, {amounts.size(verdict.checked_bytes)} read, all checksums verified"
