"""``unbroken pin`` and ``unpin``: protect a checkpoint from being deleted."""

import time

import click

from unbroken.cli.output import Output, as_command
from unbroken.records.run_references import resolve_checkpoint
from unbroken.store import sweep

_JOB = "cli"


@as_command("pin", examples=(("unbroken pin runs/a@1000 --reason paper", "keep step 1,000"),))
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option("--reason", default="", help="Note stored with the pin.")
def pin(output: Output, checkpoint: str, reason: str) -> None:
    """Protect a checkpoint from being deleted.

    Neither training nor `unbroken prune` deletes a pinned checkpoint. CHECKPOINT is RUN@STEP, RUN@latest, RUN for the
    newest, or a checkpoint directory.
    """
    store, name, manifest = resolve_checkpoint(checkpoint)
    is_new = sweep.pin(store, name, reason=reason, job=_JOB, at_ns=time.time_ns())
    fields = {"name": name, "id": manifest.id, "pinned": True, "changed": is_new}
    said = f"pinned {name}" if is_new else f"{name} is already pinned"
    output.document("unbroken.pin/1", fields, lambda: said)


@as_command("unpin", examples=(("unbroken unpin runs/a@1000", "let the keep policies decide again"),))
@click.argument("checkpoint", metavar="CHECKPOINT")
def unpin(output: Output, checkpoint: str) -> None:
    """Remove the pin of a checkpoint.

    The keep policies of the run apply to it again.
    """
    store, name, manifest = resolve_checkpoint(checkpoint)
    changed = sweep.unpin(store, name)
    fields = {"name": name, "id": manifest.id, "pinned": False, "changed": changed}
    said = f"unpinned {name}" if changed else f"{name} is not pinned"
    output.document("unbroken.pin/1", fields, lambda: said)
