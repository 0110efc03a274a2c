"""``unbroken release``: free a run whose holder is gone, after watching that nobody renews its lease."""

import os
import time

import click

from unbroken.cli.arguments import named_run
from unbroken.cli.output import Output, as_command
from unbroken.quoting import amounts
from unbroken.records.lease import Lease, Standing, release_expired
from unbroken.records.process import process_of
from unbroken.records.takeover import LeaseWatch


@as_command("release")
@click.argument("run", metavar="RUN", required=False)
@click.option("--output-dir", metavar="RUN", help="The same as RUN.")
def command(output: Output, run: str | None, output_dir: str | None) -> None:
    """Release a run whose job is gone, after watching its lease.

    A new job watches by itself and needs no release. This is for a lease that was damaged, rewritten or left by a job
    on another machine: it is watched for its time to live, a minute, and released if nobody renews it meanwhile. While
    its job is alive it is refused with exit code 7.
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
        return "no job holds this run; there is nothing to release"
    if watched_s < lease.ttl_s:
        return f"released: the process of {lease.describe()} is gone"
    return f"released: {lease.describe()} did not renew its lease for {amounts.duration(watched_s)}"
