"""Giving signs of life: a thread that renews a job's lease until it is told to stop or loses it."""

import threading
from collections.abc import Callable
from pathlib import Path

from unbroken.errors import LeaseLost, StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.run.lease import Lease, release, renew


class Renewal:
    """Keeps one lease alive; ``lost`` says if another job has taken the run."""

    def __init__(self, run: Path, lease: Lease, *, clock: Callable[[], float], files: Files = LOCAL) -> None:
        self._run_directory = run
        self._lease = lease
        self._clock = clock
        self._files = files
        self._ended = threading.Event()
        self.lost: LeaseLost | None = None
        # A daemon: a loop that hangs at its end must not be kept alive, and looking alive, by its own lease.
        self._thread = threading.Thread(target=self._renew, name="unbroken-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._ended.wait(self._lease.ttl_s / 4):
            try:
                self._lease = renew(self._run_directory, self._lease, now_s=self._clock(), files=self._files)
            except LeaseLost as lost:
                self.lost = lost
                return
            except StorageFailed:
                # A hiccup of the storage: three more tries fit into the time to live.
                continue

    def end(self) -> None:
        """Stop renewing and let the run go, unless another job has it already.

        Raises:
            StorageFailed: the system refused; the lease then expires by itself.
        """
        self._ended.set()
        self._thread.join()
        if self.lost is None:
            try:
                release(self._run_directory, self._lease, now_s=self._clock(), files=self._files)
            except LeaseLost as lost:
                self.lost = lost
