"""``unbroken show``: what one checkpoint says of itself."""

import time

import click

from unbroken.cli.facts import instant, manifest_facts
from unbroken.cli.output import Output, as_command
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.records.references import resolve_checkpoint
from unbroken.report.style import Style
from unbroken.report.table import Column, table
from unbroken.store.manifest import Manifest


@as_command("show")
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option("--tensors", is_flag=True, help="List the tensors, where the manifest names them.")
def command(output: Output, checkpoint: str, tensors: bool) -> None:
    """Show the manifest of one checkpoint.

    CHECKPOINT is its directory, RUN@1000, RUN@latest, or RUN for the newest. The manifest is proven against its own
    digest first; the parts are not read.
    """
    store, name, manifest = resolve_checkpoint(checkpoint)
    facts = {"path": str(store.path(name)), **manifest_facts(name, manifest)}
    output.document(
        "unbroken.show/2", facts, lambda: _text(str(store.path(name)), manifest, tensors=tensors, style=output.style)
    )


def _text(path: str, manifest: Manifest, *, tensors: bool, style: Style) -> str:
    age = amounts.ago((time.time_ns() - manifest.saved_at_ns) / 1e9)
    head = [
        ("checkpoint", path),
        ("step", f"{amounts.count(manifest.step)} ({manifest.kind})"),
        ("written", f"{instant(manifest.saved_at_ns)} ({age}) by {manifest.origin}, job {manifest.job}"),
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
        lines += ["", table(columns, named, style=style) if named else "the manifest names no tensors"]
    return "\n".join(lines)
