"""``unbroken diff``: compares two checkpoints by the checksums in their manifests."""

import click

from unbroken.cli.output import Output, as_command
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.records.run_references import resolve_checkpoint
from unbroken.report.style import Style
from unbroken.store.compare import CheckpointDifference, compare

EXIT_DIFFER = 3


@as_command(
    "diff",
    examples=(("unbroken diff runs/a@1000 runs/b@1000", "same step of two runs"),),
    exit_codes={0: "all tensors are equal", 3: "some differ"},
)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
def command(output: Output, first: str, second: str) -> int:
    """Compare two checkpoints tensor by tensor.

    A and B are RUN@STEP, RUN@latest, RUN for its newest, or checkpoint directories. Compares the checksums in the
    manifests and reads no tensors. A manifest without tensors is compared part by part. Gradients that only one of the
    two contains are ignored: the first saves of a job contain those that may still be used, later ones do not.
    """
    _, first_name, first_manifest = resolve_checkpoint(first)
    _, second_name, second_manifest = resolve_checkpoint(second)
    found = compare(first_manifest, second_manifest)
    fields = {
        "a": {"name": first_name, "id": first_manifest.id, "step": first_manifest.step},
        "b": {"name": second_name, "id": second_manifest.id, "step": second_manifest.step},
        "compared": found.unit,
        "is_same": found.is_same,
        "same": found.same,
        "differ": [{"name": name, "how": how} for name, how in found.differ],
        "only_in_a": list(found.only_first),
        "only_in_b": list(found.only_second),
        "ignored": list(found.ignored),
    }
    output.document("unbroken.diff/1", fields, lambda: _text(found, output.style))
    return 0 if found.is_same else EXIT_DIFFER


def _text(found: CheckpointDifference, style: Style) -> str:
    unit = found.unit
    ignored = f"; {amounts.plural(len(found.ignored), 'gradient')} of only one ignored" if found.ignored else ""
    if found.is_same:
        return f"{style.good('equal')}  {amounts.plural(found.same, unit)}, all checksums equal{ignored}"
    lines = [f"{style.bad('differs')}  {printable(name)}: {printable(how)}" for name, how in found.differ]
    lines += [f"{style.warn('only in A')}  {printable(name)}" for name in found.only_first]
    lines += [f"{style.warn('only in B')}  {printable(name)}" for name in found.only_second]
    changed = len(found.differ) + len(found.only_first) + len(found.only_second)
    lines.append(f"{amounts.plural(changed, unit)} differ, {amounts.count(found.same)} are equal{ignored}")
    return "\n".join(lines)
