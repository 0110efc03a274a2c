"""``unbroken ls``: lists the checkpoints of a run."""

import time

import click

from unbroken.cli.json_fields import listing_fields
from unbroken.cli.output import Output, as_command
from unbroken.cli.policies import quiet_policies_of
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.records.run_references import resolve
from unbroken.records.summary import StoreLine, checkpoint_lines
from unbroken.report.style import Style
from unbroken.report.table import Column, table
from unbroken.store.foreign import import_from_store

_MISSING = "-"


@as_command("ls", examples=(("unbroken ls runs/a", "newest first"), ("unbroken ls runs/a --json", "for scripts")))
@click.argument("run", metavar="RUN")
def command(output: Output, run: str) -> None:
    """List the checkpoints of a run.

    RUN is a run directory, its checkpoints directory, or a directory of sealed checkpoints. Reads only names, sizes and
    manifests; `unbroken verify --full` verifies checksums.
    """
    found = resolve(run)
    store = found.store
    lines = checkpoint_lines(store, quiet_policies_of(found.records or store))
    fields = {"store": str(store.root), "entries": [listing_fields(line) for line in lines]}
    output.document("unbroken.ls/1", fields, lambda: _text(lines, now_ns=time.time_ns(), style=output.style))
    if not any(line.state == "committed" for line in lines) and (
        importing := import_from_store(store.root, store.files)
    ):
        output.note(f"another tool has written checkpoints here; to make a run of one: {importing}")


def _text(lines: list[StoreLine], *, now_ns: int, style: Style) -> str:
    if not lines:
        return "no checkpoints yet"
    warnings = dict.fromkeys(("torn", "quarantined", "emergency", "newer-format", "unreadable"), style.warn)
    paint = {"committed": style.good, "damaged": style.bad, **warnings}
    columns = [
        Column("step", is_number=True),
        Column("name"),
        Column("saved"),
        Column("size", is_number=True),
        Column("parts", is_number=True),
        Column("state"),
        Column("kept because"),
        Column("note"),
    ]
    rows = [
        (
            _MISSING if line.step is None else amounts.count(line.step),
            printable(line.name),
            _MISSING if line.saved_at_ns is None else amounts.ago((now_ns - line.saved_at_ns) / 1e9),
            _MISSING if line.size_bytes is None else amounts.size(line.size_bytes),
            _MISSING if line.parts is None else amounts.count(line.parts),
            paint.get(line.state, style.dim)(line.state.replace("-", " ")),
            ", ".join(line.kept_because),
            printable(line.note or ""),
        )
        for line in lines
    ]
    return table(columns, rows, style=style)
