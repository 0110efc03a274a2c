"""``unbroken replay``: recomputes the steps between two checkpoints and compares the result bit for bit."""

import os
import secrets
import sys
from pathlib import Path

import click

from unbroken.cli.arguments import DiskPath, named_store
from unbroken.cli.output import Output, as_command
from unbroken.errors import BadUsage, ReplayUnfinished
from unbroken.files import LOCAL
from unbroken.launch import job_files
from unbroken.prove.replay import (
    ReplayFolder,
    ReplayOptions,
    ReplayResult,
    replay,
    replayed_command,
    require_fresh,
    require_sound,
    span_of,
)
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.report.style import Style
from unbroken.store.mirrored import read_direct

EXIT_DIFFER = 3


@as_command(
    "replay",
    examples=(
        ("unbroken replay runs/a 1000 2000", "a run of unbroken train"),
        ("unbroken replay runs/a 1000 latest -- train.py --lr 3e-4", "a run of your script"),
    ),
    exit_codes={0: "every bit is equal", 3: "the results differ, or a checkpoint is damaged"},
)
@click.argument("run", metavar="RUN")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option(
    "--nproc-per-node", type=click.IntRange(1), metavar="N", help="Number of ranks; any number gives the same bits."
)
@click.option(
    "--dir",
    "directory",
    type=DiskPath(),
    metavar="DIR",
    help="Directory for the recomputation, kept; default: a temporary one.",
)
@click.option(
    "--data-path",
    type=DiskPath(),
    metavar="DIR",
    help="Data directory; default: data.path of the run.",
)
@click.argument("words", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED)
def command(
    output: Output,
    run: str,
    first: str,
    second: str,
    nproc_per_node: int | None,
    directory: Path | None,
    data_path: Path | None,
    words: tuple[str, ...],
) -> int:
    """Recompute between two checkpoints, compare every bit.

    A and B are checkpoints of RUN: a step, a name, or latest. A run of `unbroken train` records its command; for any
    other run give its COMMAND: train.py, python train.py, torchrun --nproc-per-node {ranks} train.py. RUN is not
    changed.
    """
    store = named_store("replay", run, None)
    if (address := read_direct(store)) is not None:
        complaint = f"{run} saves its checkpoints to {address}, and replay reads those of a run directory only"
        raise BadUsage(command="unbroken replay", complaint=complaint)
    span = span_of(store, first, second)
    place = _place(directory)
    is_kept = directory is not None
    try:
        line = replayed_command(span, ReplayOptions(words, nproc_per_node, data_path), place, python=sys.executable)
        with output.progress("verifying", span.size_bytes, is_bytes=True) as advance:
            require_sound(span, advance)
        steps = amounts.plural(span.steps, "step")
        output.note(f"recomputing {steps} from {span.a.name} to {span.b.name} in {place.root}")
        with output.progress("recomputing", span.steps) as advance:
            found = replay(span, line, place, environ=os.environ, advance=advance)
        is_kept = is_kept or not found.is_equal
    except ReplayUnfinished:
        is_kept = True
        raise
    finally:
        if not is_kept:
            LOCAL.remove_tree(place.root)
    kept = place.root if is_kept else None
    fields = {**found.json_fields(), "directory": str(kept) if kept else None}
    output.document("unbroken.replay/2", fields, lambda: _text(found, kept, output.style))
    return 0 if found.is_equal else EXIT_DIFFER


def _place(directory: Path | None) -> ReplayFolder:
    """The directory of the recomputation: ``--dir`` or a temporary one."""
    if directory is None:
        root = Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108
        return ReplayFolder(job_files.make_outcome_path(root, f"replay-{secrets.token_hex(8)}"))
    require_fresh(directory)
    LOCAL.make_directory(directory)
    return ReplayFolder(directory)


def _text(found: ReplayResult, kept: Path | None, style: Style) -> str:
    verdict = style.good("equal") if found.is_equal else style.bad("differs")
    lines = [f"{verdict}  {printable(found.headline())}", *(f"       {printable(line)}" for line in found.lines())]
    if kept is not None:
        lines.append(f"       recomputation kept in {printable(str(kept))}")
    return "\n".join(lines)
