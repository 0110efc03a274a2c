"""Giving signs of life: a thread that renews a job's lease until it is told to stop, loses it, or the run is gone."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from unbroken.errors import LeaseLost, RunGone, StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.run.lease import Lease, is_present, release, renew

_LOOK_S: Final = 1.0


class Renewal:
    """Keeps one lease alive; ``lost`` says if another job has taken the run, or the run directory is gone."""

    def __init__(self, run: Path, lease: Lease, *, clock: Callable[[], float], files: Files = LOCAL) -> None:
        self._run_directory = run
        self._lease = lease
        self._clock = clock
        self._files = files
        self._ended = threading.Event()
        self.lost: LeaseLost | RunGone | None = None
        # A daemon: a loop that hangs at its end must not be kept alive, and looking alive, by its own lease.
        self._thread = threading.Thread(target=self._renew, name="unbroken-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        every_s = self._lease.ttl_s / 4
        look_s = min(_LOOK_S, every_s)
        waited_s = 0.0
        while not self._ended.wait(look_s):
            waited_s += look_s
            try:
                # A run that was moved or deleted is noticed within a second, not at the next renewal.
                if waited_s < every_s and is_present(self._run_directory, self._lease, self._files):
                    continue
                waited_s = 0.0
                self._lease = renew(self._run_directory, self._lease, now_s=self._clock(), files=self._files)
            except (LeaseLost, RunGone) as lost:
                self.lost = lost
                return
            except StorageFailed:
                # A hiccup of the storage: three more tries fit into the time to live.
                continue

    def end(self) -> None:
        """Stop renewing and give the run up, unless another job has it already or it is gone.

        Raises:
            StorageFailed: the system refused; the next job then watches the lease until it counts as expired.
        """
        self._ended.set()
        self._thread.join()
        if self.lost is None:
            try:
                release(self._run_directory, self._lease, now_s=self._clock(), files=self._files)
            except (LeaseLost, RunGone) as lost:
                self.lost = lost
