"""Mirroring beside training: one thread for each mirror, which works off what the ledger says is pending.

The newest checkpoint goes first: it is the one that is wanted after a lost machine. A refusal is told once and tried
again with growing pauses for as long as the job lives; nothing is lost by it, since what is pending is never swept.
The threads and all that they start run with the lowest priority, so that training has the processors first.
"""

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from unbroken.errors import BucketMissing, Bug, CheckpointError, MirrorMissing, UnbrokenError, UsageError
from unbroken.mirror.address import Address
from unbroken.mirror.client import Client
from unbroken.mirror.ownership import directory_of_run, push_rewinds, require_present
from unbroken.mirror.remote import store_at
from unbroken.mirror.transfer import Limits, Stopped
from unbroken.mirror.upload import upload_checkpoint
from unbroken.quoting.log import logger
from unbroken.quoting.shell import shell_line
from unbroken.store.directory import Store
from unbroken.store.mirrored import Upload, forget_uploads, mirrored_ids, remote_name
from unbroken.store.names import MANIFEST
from unbroken.store.scan import newest_first, outline_quietly, scan

_log = logger(__name__)
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
_LOWEST_PRIORITY: Final = 19


class Told(Protocol):
    """Who hears how uploads end; called from the threads."""

    def mirrored(self, upload: Upload, seconds: float) -> None:
        """A checkpoint was verified in a mirror."""

    def refused(self, mirror: str, name: str, error: UnbrokenError) -> None:
        """A checkpoint could not be mirrored now."""


@dataclass(frozen=True)
class Mirror:
    """One mirror of a run: its address as the ledger knows it, and the client at the place of the checkpoints."""

    address: Address
    client: Client

    @property
    def url(self) -> str:
        """The address as text."""
        return str(self.address)


def pending(store: Store, mirror: str) -> list[str]:
    """The committed checkpoints that are not known to be in a mirror, newest first.

    Raises:
        StorageFailed: I/O error.
    """
    done = mirrored_ids(store, mirror)
    found = []
    for name in newest_first(store, scan(store).committed):
        manifest = outline_quietly(store, name)
        if manifest is not None and manifest.id not in done:
            found.append(name)
    return found


def forget_removed(store: Store, mirror: Mirror) -> list[str]:
    """Take back the records of local checkpoints that are no longer in a mirror; returns their names, pending again.

    Somebody has pruned the mirror, or deleted objects there: what the ledger says would be untrue.

    Raises:
        UnbrokenError: the mirror or the disk refused.
    """
    gone = removed_there(store, mirror)
    forget_uploads(store, mirror.url, gone)
    return list(gone.values())


def removed_there(store: Store, mirror: Mirror) -> dict[str, str]:
    """The names of local checkpoints that are recorded as mirrored and are no longer in the mirror, by id.

    Raises:
        UnbrokenError: the mirror or the disk refused.
    """
    remote, done, gone = store_at(mirror.client), mirrored_ids(store, mirror.url), dict[str, str]()
    for name in scan(store).committed:
        manifest = outline_quietly(store, name)
        if manifest is None or manifest.id not in done:
            continue
        called = remote_name(store, mirror.url, manifest.id)
        there = remote.files.find(remote.path(called) / MANIFEST) if called is not None else None
        if called is None or there is None or remote.read_manifest(called).id != manifest.id:
            gone[manifest.id] = name
    return gone


def local_damage(store: Store) -> str:
    """What to say of a checkpoint that could not be uploaded because it is damaged here."""
    fetch = shell_line(("unbroken", "fetch", directory_of_run(store)))
    return f"the local copy is damaged; `{fetch}` repairs it if a mirror has it"


class Mirroring:
    """The uploads of one run in one process; made by the rank that commits."""

    def __init__(self, store: Store, mirrors: Sequence[Mirror], limits: Limits, told: Told, *, job: str) -> None:
        self._store, self._told, self._job = store, told, job
        self._is_stopped = threading.Event()
        # Each mirror has its own share of the memory; bandwidth is for each.
        share = max(limits.memory_bytes // max(len(mirrors), 1), 1)
        self._workers = [
            _Worker(self, mirror, replace(limits, memory_bytes=share, is_stopped=self._is_stopped.is_set))
            for mirror in mirrors
        ]

    def start(self) -> None:
        """Begin with what earlier jobs left."""
        for worker in self._workers:
            worker.thread.start()

    def committed(self) -> None:
        """A checkpoint was committed."""
        for worker in self._workers:
            worker.look_again()

    def missing(self) -> set[str]:
        """The mirrors that were in place and that their threads do not find any more."""
        return {worker.url for worker in self._workers if worker.is_missing}

    def wait(self, timeout_s: float, *, is_cut_short: Callable[[], bool] = lambda: False) -> bool:
        """Wait until every mirror has everything, at most so long; says whether nothing more can be gained by waiting.

        A refusal that only a person can change is not waited for.
        """
        until = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.look_again()
        while time.monotonic() < until and not is_cut_short():
            if all(worker.is_idle or worker.is_refused for worker in self._workers):
                return True
            time.sleep(0.05)
        return False

    def close(self) -> None:
        """End the threads; what is on its way is given up and stays pending."""
        self._is_stopped.set()
        for worker in self._workers:
            worker.look_again()
        for worker in self._workers:
            # A request that hangs is not waited for: the thread is a daemon, and the upload is pending.
            worker.thread.join(5.0)

    @property
    def is_stopped(self) -> bool:
        """Whether it was closed."""
        return self._is_stopped.is_set()


class _Worker:
    """The thread of one mirror."""

    def __init__(self, owner: Mirroring, mirror: Mirror, limits: Limits) -> None:
        self._owner, self._mirror, self._limits = owner, mirror, limits
        # How often it was asked to look for checkpoints, and up to which of these calls it found all of them mirrored:
        # a thread that has been woken and has not run yet is not idle.
        self._asked, self._answered = 0, -1
        self._is_asked = threading.Condition()
        # The last pass ended in a refusal that trying again does not change.
        self.is_refused = False
        # It was not there at the last look; until it was compared again, no record of it releases a local copy.
        self.is_missing = False
        self.thread = threading.Thread(target=self._run, name="unbroken-mirror", daemon=True)

    @property
    def url(self) -> str:
        """The address of the mirror."""
        return self._mirror.url

    @property
    def is_idle(self) -> bool:
        """Whether all that was committed before the last call of ``look_again`` is mirrored."""
        return self._answered == self._asked

    def look_again(self) -> None:
        """There may be something to upload, or it is time to end."""
        with self._is_asked:
            self._asked += 1
            self._is_asked.notify()

    def _run(self) -> None:
        # Of this thread alone on Linux, and of the threads that it starts: the client library's among them.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        pause_s = _FIRST_PAUSE_S
        while not self._owner.is_stopped:
            asked = self._asked
            try:
                is_done = self._pass()
            except Stopped:
                return
            if is_done:
                self._answered, pause_s = asked, _FIRST_PAUSE_S
                with self._is_asked:
                    while self._asked == asked:
                        self._is_asked.wait()
            else:
                # Not all jobs of a cluster at the same moment; and not from the global RNG, which is the training's.
                self._sleep(pause_s * random.Random().uniform(0.5, 1.0))  # noqa: S311 -- no secret
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._owner.is_stopped:
            time.sleep(0.05)

    def _pass(self) -> bool:
        """Upload what is pending, each at most once; says whether everything is there now."""
        store, url, tried = self._owner._store, self._mirror.url, set[str]()
        name = ""
        while True:
            try:
                if not tried:
                    # Not written to a directory that a disk is not mounted on any more.
                    require_present(store, self._mirror.client)
                    if self.is_missing:
                        forget_removed(store, self._mirror)
                        self.is_missing = False
                    push_rewinds(store, self._mirror.client, self._mirror.address)
                # Asked again after each: a newer one may have been committed meanwhile.
                left = pending(store, url)
                name = next((each for each in left if each not in tried), "")
                if not name:
                    self.is_refused = False
                    self._forget_gone()
                    return not left
                tried.add(name)
                self._upload(name)
            except Stopped:
                raise
            except UnbrokenError as refused:
                self.is_missing = self.is_missing or isinstance(refused, MirrorMissing | BucketMissing)
                self._owner._told.refused(url, name, refused)
                self.is_refused = isinstance(refused, UsageError)
                if not isinstance(refused, CheckpointError):
                    return False
                # Damage on the local disk is about one checkpoint: the others can be mirrored.
            except Exception as surprise:  # noqa: BLE001 - the top of a thread: nothing above could report it
                self._owner._told.refused(url, name, Bug(cause=f"{type(surprise).__name__}: {surprise}"))
                return False

    def _upload(self, name: str) -> None:
        owner, began_s = self._owner, time.monotonic()
        upload = upload_checkpoint(
            owner._store,
            name,
            self._mirror.client,
            self._mirror.url,
            self._limits,
            job=owner._job,
            clock_ns=time.time_ns,
        )
        owner._told.mirrored(upload, time.monotonic() - began_s)

    def _forget_gone(self) -> None:
        store, url = self._owner._store, self._mirror.url
        # The records first: what is recorded from now on, by the next job of this process too, is not looked at.
        known = mirrored_ids(store, url)
        here = {manifest.id for name in scan(store).committed if (manifest := outline_quietly(store, name))}
        if not self._owner.is_stopped:
            forget_uploads(store, url, known - here)
