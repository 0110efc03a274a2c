"""Which process a job is, where a scheduler has placed it, and whether it still runs.

Host, boot and clock are handed in, so that tests can be other machines.
"""

import atexit
import concurrent.futures
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from unbroken.quoting import amounts
from unbroken.records.journal import Event, read_history
from unbroken.records.layout import Layout
from unbroken.records.lease import Holder
from unbroken.store.fields import as_whole
from unbroken.store.names import host_of

_T = TypeVar("_T")
_START_TIME_FIELD: Final = 19
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MACHINE_ID: Final = Path("/etc/machine-id")
_NETWORK_DEVICES: Final = Path("/sys/class/net")


def this_holder() -> Holder:
    """This process."""
    return holder_of(os.getpid())


def holder_of(pid: int) -> Holder:
    """A process that this one can see."""
    return Holder(host_name(), pid, process_started(pid), pid_scope())


def host_name() -> str:
    """This machine and this boot of it: after a restart no process of before is alive."""
    return host_of(socket.gethostname(), _text(_BOOT_ID)[:8] or None)


def pid_scope() -> str | None:
    """Where this process's numbers count: its PID namespace and its machine; None where the system does not tell.

    Host name and boot id are not enough: containers share both with ``--network host``, and machines cloned from one
    image in memory may share them too.
    """
    try:
        # A /proc of another PID namespace (one made without mounting its own) shows other processes under our numbers.
        if Path("/proc/self").readlink() != Path(str(os.getpid())):
            return None
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None
    identity = "\n".join([_text(_BOOT_ID), _text(_MACHINE_ID), *_wired_addresses()])
    return f"{namespace}-{hashlib.blake2s(identity.encode(), digest_size=4).hexdigest()}"


def _wired_addresses() -> list[str]:
    """The hardware addresses of wired network devices; wireless ones change theirs as they like."""
    try:
        devices = sorted(_NETWORK_DEVICES.iterdir())
    except OSError:
        return []
    return [
        _text(each / "address")
        for each in devices
        if (each / "device").exists() and not (each / "wireless").exists() and not (each / "phy80211").exists()
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def process_started(pid: int) -> str:
    """When a process of this machine began, in the kernel's ticks; "" if there is none."""
    return _started(pid) or ""


def _started(pid: int) -> str | None:
    """As ``process_started``, and None where the system does not show this process, if there is one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses and may hold anything, so count from behind it.
    fields = stat.rpartition(")")[2].split()
    # A zombie has ended and only waits to be noticed.
    return "" if fields[0] in ("Z", "X") else fields[_START_TIME_FIELD]


def process_of(holder: Holder) -> str | None:
    """When a holder's process began; "" if it is gone, None if it cannot be seen from here."""
    if holder.scope is None or holder.pid < 1 or (holder.host, holder.scope) != (host_name(), pid_scope()):
        return None
    started = _started(holder.pid)
    if started is not None:
        return started
    try:
        # /proc mounted with hidepid shows no process of another user; signal number 0 still tells that it is there.
        os.kill(holder.pid, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except OSError:
        return None
    return _started(holder.pid)


def recorded_processes(layout: Layout, job: int) -> Iterator[Holder]:
    """The processes that a job named when it started: its launcher, then its ranks; some may be gone since.

    Raises:
        StorageFailed: an I/O error.
    """
    start = read_history(layout).last("job-start", job=job)
    listed: Any = start.values.get("processes") if start is not None else None
    for each in listed if isinstance(listed, list) else []:
        if isinstance(each, dict):
            host, pid, began = each.get("host"), as_whole(each.get("pid")), each.get("process_started")
            scope = each.get("scope")
            if isinstance(host, str) and pid is not None and isinstance(began, str) and began:
                yield Holder(host, pid, began, scope if isinstance(scope, str) else None)


# ---- where a scheduler has placed the job ----

SLURM: Final = "slurm"


@dataclass(frozen=True)
class Placement:
    """One start of a job under a scheduler; ``requeues`` counts how often it was queued again before."""

    scheduler: str
    id: str
    requeues: int = 0
    nodes: str | None = None

    def as_json(self) -> dict[str, Any]:
        """As the journal keeps it."""
        return {"scheduler": self.scheduler, "id": self.id, "requeues": self.requeues, "nodes": self.nodes}

    def sentence(self) -> str:
        """``4711 on n[1-2], requeued once``."""
        times = {0: "", 1: ", requeued once"}.get(self.requeues, f", requeued {amounts.count(self.requeues)} times")
        return f"{self.id}{f' on {self.nodes}' if self.nodes else ''}{times}"


def placement(environ: Mapping[str, str]) -> Placement | None:
    """Where SLURM has placed this process; None outside of it. A task of an array is called as SLURM does, ``12_3``."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return None
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    name = f"{array}_{task}" if array and task else job
    return Placement(SLURM, name, int(restarts) if restarts.isdecimal() else 0, environ.get("SLURM_JOB_NODELIST"))


def placements(events: Iterable[Event]) -> tuple[tuple[int, Placement], ...]:
    """The chain: each job of a run that a scheduler started, by its number, and where that was."""
    return tuple(
        (event.job, found)
        for event in events
        if event.kind == "job-start" and (found := _decoded(event.values.get("placement"))) is not None
    )


def _decoded(said: object) -> Placement | None:
    if not isinstance(said, Mapping):
        return None
    scheduler, job, nodes = (said.get(name) for name in ("scheduler", "id", "nodes"))
    requeues = as_whole(said.get("requeues"))
    if not isinstance(scheduler, str) or not isinstance(job, str) or requeues is None:
        return None
    return Placement(scheduler, job, requeues, nodes if isinstance(nodes, str) else None)


def before_exit(opened: set[_T], end: Callable[[_T], None]) -> None:
    """End what is open when the interpreter exits, while threads can still be started: a last save needs them.

    ``atexit`` comes too late for that, after thread pools are closed. The way before it has no public name; without it
    ``atexit`` is better than nothing. Python 3.12 starts no thread there either: see ``is_without_threads``.
    """
    # The last to register is called first: thread pools are closed after this.
    import concurrent.futures.thread  # noqa: F401

    def end_all() -> None:
        if opened and not _starts_threads():
            _do_without_threads()
        for each in list(opened):
            end(each)

    register = getattr(threading, "_register_atexit", atexit.register)
    register(end_all)
    # A forked child, such as a loader worker, has a copy of what its parent has opened. It would save and release the
    # parent's run when it exits.
    os.register_at_fork(after_in_child=opened.clear)


_is_without_threads = False


def is_without_threads() -> bool:
    """Whether the interpreter exits and starts no thread any more: what a thread would do is done in the caller's."""
    return _is_without_threads


def _starts_threads() -> bool:
    thread = threading.Thread(target=lambda: None, name="unbroken-exit")
    try:
        thread.start()
    except RuntimeError:
        return False
    thread.join()
    return True


def _do_without_threads() -> None:
    global _is_without_threads
    _is_without_threads = True
    # Of the whole process: nothing but what is called at exit runs any more, and no pool could start a thread for it.
    concurrent.futures.ThreadPoolExecutor.submit = _submit_here  # type: ignore[method-assign]


def _submit_here(
    pool: object, call: Callable[..., _T], /, *args: object, **kwargs: object
) -> "concurrent.futures.Future[_T]":
    del pool
    done: concurrent.futures.Future[_T] = concurrent.futures.Future()
    try:
        done.set_result(call(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - it is for whoever asks for the result
        done.set_exception(error)
    return done
