"""Which process a job is, and whether it still runs; what the machine knows of itself, handed to those who decide."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from unbroken.run.journal import read_history
from unbroken.run.layout import Layout
from unbroken.run.lease import Holder
from unbroken.store.fields import as_whole
from unbroken.store.hosts import boot_of, host_of, same_host

_START_TIME_FIELD: Final = 19


def this_holder() -> Holder:
    """This process."""
    pid = os.getpid()
    return Holder(host_name(), pid, process_started(pid))


def host_name() -> str:
    """This machine and this boot of it: after a restart no process of before is alive."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return host_of(socket.gethostname(), boot.read_text().strip()[:8] if boot.exists() else None)


def process_started(pid: int) -> str:
    """When a process of this machine began, in the kernel's ticks; "" if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    # The second field is the program's name in parentheses and may hold anything, so count from behind it.
    fields = stat.rpartition(")")[2].split()
    # A zombie has ended and only waits to be noticed.
    return "" if fields[0] in ("Z", "X") else fields[_START_TIME_FIELD]


def process_of(host: str, pid: int) -> str | None:
    """When a holder's process began; "" if it is gone, None if it is on another machine and cannot be seen.

    A machine whose name matches and whose boot does not has restarted since: the process is gone.
    """
    here = host_name()
    if host == here:
        return process_started(pid)
    return "" if same_host(host, here) and None not in (boot_of(host), boot_of(here)) else None


def recorded_processes(layout: Layout, job: int) -> Iterator[Holder]:
    """The processes that a job named when it started: its launcher, then its ranks; some may be gone since.

    Raises:
        StorageFailed: the system refused.
    """
    start = read_history(layout).last("job-start", job=job)
    listed: Any = start.values.get("processes") if start is not None else None
    for each in listed if isinstance(listed, list) else []:
        if isinstance(each, dict):
            host, pid, began = each.get("host"), as_whole(each.get("pid")), each.get("process_started")
            if isinstance(host, str) and pid is not None and isinstance(began, str) and began:
                yield Holder(host, pid, began)
