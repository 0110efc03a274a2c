"""``unbroken stop``: requests a clean stop through the run directory, or kills the job on this machine."""

import os
import signal
import time
from collections.abc import Callable

import click

from unbroken.cli.arguments import FiniteRange, named_run
from unbroken.cli.output import Output, as_command
from unbroken.errors import RunsElsewhere, StillRunning
from unbroken.quoting import amounts
from unbroken.quoting.shell import for_shell
from unbroken.quoting.terminal import printable
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.lease import Lease, Standing
from unbroken.records.process import host_name, placements, process_of, recorded_processes
from unbroken.records.stop import request_stop
from unbroken.records.takeover import LeaseWatch
from unbroken.store.names import scratch

POLL_S = 0.1
# A killed process is gone in milliseconds, unless it waits for storage in the kernel; then it is reported as running.
KILL_WAIT_S = 10.0


@as_command(
    "stop",
    examples=(
        ("unbroken stop runs/a", "request a stop and return"),
        ("unbroken stop runs/a --wait 600", "wait until the job has saved and exited"),
        ("unbroken stop runs/a --force", "kill it now"),
    ),
    exit_codes={
        0: "stop requested, or no job is running",
        7: "the job still runs after --wait, or cannot be killed here",
    },
)
@click.argument("run", metavar="RUN", required=False)
@click.option("--output-dir", metavar="RUN", help="Same as RUN.")
@click.option("--force", is_flag=True, help="Kill the job now; work since the last checkpoint is lost.")
@click.option("--wait", type=FiniteRange(0), metavar="S", help="Wait up to S seconds for the job to exit.")
def command(output: Output, run: str | None, output_dir: str | None, force: bool, wait: float | None) -> None:
    """Stop a run after a last save, or kill it.

    The job saves and exits after its current step. The request is a file in the run directory, so it works from any
    machine that can write there. --force kills the processes instead and works only on the machine they run on.
    """
    layout = named_run("stop", run, output_dir)
    watch = LeaseWatch(layout.run, monotonic=time.monotonic, process_of=process_of)
    standing, lease = watch.look(), watch.lease
    if lease is None or standing is Standing.GONE:
        fields = {"run": str(layout.run), "was_running": False, "has_ended": True, "job": None, "killed": []}
        output.document("unbroken.stop/1", fields, lambda: _nothing_to_stop(layout))
        return
    killed: list[int] = []
    if force:
        killed = _kill(layout, lease)
        wait = max(wait or 0.0, KILL_WAIT_S)
    else:
        request_stop(layout, job=lease.number, by=host_name(), scratch=scratch(f"stop_{os.getpid()}", "request"))
    has_ended = _await(lambda: _holds(watch, lease), wait or 0.0)
    if wait and not has_ended:
        raise StillRunning(path=layout.run, holder=lease.describe(), waited_s=wait)
    fields = {
        "run": str(layout.run),
        "was_running": True,
        "has_ended": has_ended,
        "job": lease.number,
        "killed": killed,
    }
    output.document("unbroken.stop/1", fields, lambda: printable(_text(layout, watch, killed, has_ended=has_ended)))


def _text(layout: Layout, watch: LeaseWatch, killed: list[int], *, has_ended: bool) -> str:
    holder = watch.lease.describe() if watch.lease else ""
    if killed:
        return f"killed {holder} ({amounts.plural(len(killed), 'process', 'processes')})"
    if has_ended:
        return f"stopped: {holder} has exited"
    said = f"stop requested: {holder} saves and exits after its current step"
    if watch.look() is not Standing.UNKNOWN:
        return said
    check = f"unbroken release {for_shell(layout.run)}"
    return f"{said}; if it may be dead, run `{check}`: its process is not visible from here"


def _nothing_to_stop(layout: Layout) -> str:
    said = "no job is running; nothing to stop"
    placed = placements(read_history(layout).events)
    # A requeued job that waits in the queue can only be cancelled.
    return f"{said}; to remove a requeued job: scancel {for_shell(placed[-1][1].id)}" if placed else said


def _holds(watch: LeaseWatch, lease: Lease) -> bool:
    standing = watch.look()
    return standing is not Standing.GONE and watch.lease is not None and watch.lease.number == lease.number


def _await(is_there: Callable[[], bool], wait_s: float) -> bool:
    deadline_s = time.monotonic() + wait_s
    while is_there():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def _kill(layout: Layout, lease: Lease) -> list[int]:
    if process_of(lease.holder) is None:
        reason = f"it runs on {lease.holder.host}, and this is {host_name()}"
        if lease.holder.host == host_name():
            reason = "it runs in another container or PID namespace on this machine, or on a clone of it"
        raise RunsElsewhere(path=layout.run, holder=lease.describe(), reason=reason)
    killed: list[int] = []
    # The launcher first: it would restart the ranks.
    for each in [*recorded_processes(layout, lease.number), lease.holder]:
        # Process ids are reused: kill only the process whose start time is the recorded one.
        if each.pid not in killed and each.pid > 1 and process_of(each) == each.process_started:
            try:
                os.kill(each.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:
                reason = f"process {each.pid} belongs to another user"
                raise RunsElsewhere(path=layout.run, holder=lease.describe(), reason=reason) from None
            killed.append(each.pid)
    return killed
