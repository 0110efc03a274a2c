"""``unbroken pin`` and ``unpin``: a person's word that a checkpoint is to be kept."""

import time

import click

from unbroken.cli.output import Output, as_command
from unbroken.records.references import resolve_checkpoint
from unbroken.store import sweep

_JOB = "cli"


@as_command("pin")
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option("--reason", default="", help="Why, for whoever finds it.")
def pin(output: Output, checkpoint: str, reason: str) -> None:
    """Keep a checkpoint whatever the policies say.

    CHECKPOINT is its directory, RUN@1000, RUN@latest, or RUN for the newest.
    """
    store, name, manifest = resolve_checkpoint(checkpoint)
    is_new = sweep.pin(store, name, reason=reason, job=_JOB, at_ns=time.time_ns())
    fields = {"name": name, "id": manifest.id, "pinned": True, "changed": is_new}
    said = f"{name} is pinned" if is_new else f"{name} was pinned already"
    output.document("unbroken.pin/1", fields, lambda: said)


@as_command("unpin")
@click.argument("checkpoint", metavar="CHECKPOINT")
def unpin(output: Output, checkpoint: str) -> None:
    """Take a pin back; the policies decide again."""
    store, name, manifest = resolve_checkpoint(checkpoint)
    changed = sweep.unpin(store, name)
    fields = {"name": name, "id": manifest.id, "pinned": False, "changed": changed}
    said = f"{name} is no longer pinned" if changed else f"{name} was not pinned"
    output.document("unbroken.pin/1", fields, lambda: said)
