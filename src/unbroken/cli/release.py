"""``unbroken release``: releases a run whose job is gone, after waiting that its lease is not renewed."""

import os
import time

import click

from unbroken.cli.arguments import named_run
from unbroken.cli.output import Output, as_command
from unbroken.quoting import amounts
from unbroken.records.lease import Lease, Standing, release_expired
from unbroken.records.process import process_of
from unbroken.records.takeover import LeaseWatch


@as_command(
    "release",
    examples=(("unbroken release runs/a", "takes up to a minute"),),
    exit_codes={0: "released, or no job holds the run", 7: "the job is alive"},
)
@click.argument("run", metavar="RUN", required=False)
@click.option("--output-dir", metavar="RUN", help="Same as RUN.")
def command(output: Output, run: str | None, output_dir: str | None) -> None:
    """Release the lease of a job that is gone.

    Rarely needed: a new job waits for the lease of a dead one by itself. Use it for a lease that is damaged, or was
    left by a job on another machine. It is released if it is not renewed within its time to live, one minute.
    """
    layout = named_run("release", run, output_dir)
    watch = LeaseWatch(layout.run, monotonic=time.monotonic, process_of=process_of)
    standing = watch.until_known(time.sleep, output.note)
    if standing is Standing.ALIVE:
        raise watch.held()
    lease = watch.lease
    was_held = lease is not None and not lease.is_released
    if lease is not None and was_held:
        release_expired(layout.run, lease, by=f"cli{os.getpid()}")
    fields = {
        "run": str(layout.run),
        "job": lease.number if lease else None,
        "holder": lease.describe() if lease else None,
        "was_held": was_held,
        "watched_s": round(watch.watched_s, 1),
    }
    output.document("unbroken.release/1", fields, lambda: _text(lease, watch.watched_s))


def _text(lease: Lease | None, watched_s: float) -> str:
    if lease is None or lease.is_released:
        return "no job holds this run; nothing to release"
    if watched_s < lease.ttl_s:
        return f"released: {lease.describe()} is no longer running"
    return f"released: {lease.describe()} did not renew its lease for {amounts.duration(watched_s)}"
