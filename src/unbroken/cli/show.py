"""``unbroken show``: shows the manifest of a checkpoint."""

import time

import click

from unbroken.cli.json_fields import iso_time, manifest_fields
from unbroken.cli.output import Output, as_command
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.records.run_references import resolve_checkpoint
from unbroken.report.style import Style
from unbroken.report.table import Column, table
from unbroken.store.manifest import Manifest


@as_command(
    "show",
    examples=(
        ("unbroken show runs/a", "the newest checkpoint"),
        ("unbroken show runs/a@1000 --tensors", "step 1,000 with all tensors"),
    ),
)
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option("--tensors", is_flag=True, help="Also list the tensors.")
def command(output: Output, checkpoint: str, tensors: bool) -> None:
    """Show the manifest of a checkpoint.

    CHECKPOINT is RUN@STEP, RUN@latest, RUN for the newest, or a checkpoint directory. Verifies the checksum of the
    manifest, but does not read the parts.
    """
    store, name, manifest = resolve_checkpoint(checkpoint)
    fields = {"path": str(store.path(name)), **manifest_fields(name, manifest)}
    output.document(
        "unbroken.show/2", fields, lambda: _text(str(store.path(name)), manifest, tensors=tensors, style=output.style)
    )


def _text(path: str, manifest: Manifest, *, tensors: bool, style: Style) -> str:
    age = amounts.ago((time.time_ns() - manifest.saved_at_ns) / 1e9)
    head = [
        ("checkpoint", path),
        ("step", f"{amounts.count(manifest.step)} ({manifest.kind})"),
        ("saved", f"{iso_time(manifest.saved_at_ns)} ({age}) by {manifest.origin}, job {manifest.job}"),
        ("size", f"{amounts.size(manifest.size_bytes)} in {amounts.plural(len(manifest.parts), 'part')}"),
        ("id", manifest.id),
    ]
    if manifest.fingerprint:
        head.append(("fingerprint", manifest.fingerprint))
    head += [(f"metric {name}", f"{value:g}") for name, value in sorted(manifest.metrics.items())]
    head += [(name, str(value)) for name, value in sorted(manifest.metadata.items())]
    width = max(len(label) for label, _ in head)
    lines = [f"{style.dim(printable(label).ljust(width))}  {printable(value)}" for label, value in head]
    rows = [(part.name, amounts.size(part.size_bytes), part.digest.whole) for part in manifest.parts]
    lines += ["", table([Column("part"), Column("size", is_number=True), Column("digest")], rows, style=style)]
    if tensors:
        named = [
            (printable(name), printable(tensor.dtype), "x".join(map(str, tensor.shape)), printable(tensor.digest))
            for name, tensor in sorted(manifest.tensors.items())
        ]
        columns = [Column("tensor"), Column("type"), Column("shape"), Column("digest")]
        lines += ["", table(columns, named, style=style) if named else "no tensors in the manifest"]
    return "\n".join(lines)
