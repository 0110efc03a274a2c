"""The mirrors of a run that trains: what a resume takes from them, and what is copied to them beside training.

Rank 0 alone has them. A mirror that was never used refuses at the start of the job, where somebody is looking; one that
has worked before is warned about and tried again, since training matters more than its second copy.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Final

from unbroken.errors import MirrorTaken, StorageError, UnbrokenError
from unbroken.loop.recorder import SilentRecorder
from unbroken.loop.settings import Settings
from unbroken.mirror.address import parse_address
from unbroken.mirror.background import Mirror, Mirroring, forget_removed, pending
from unbroken.mirror.bring_back import Brought, Taking, bring_back, fetch_named, learn_rewinds, remote_ids, repair
from unbroken.mirror.client import open_client
from unbroken.mirror.ownership import require_own
from unbroken.mirror.remote import home_of
from unbroken.mirror.transfer import Limits
from unbroken.quoting import amounts
from unbroken.quoting.log import logger
from unbroken.store.directory import Store
from unbroken.store.mirrored import Upload, read_mirrors, write_mirrors
from unbroken.store.scan import scan

_log = logger(__name__)
# So often a refusal of the same kind is logged again.
_LOGGED_EVERY_S: Final = 600.0
# A shorter wait for uploads needs no line.
_UNSAID_S: Final = 2.0


class RunMirrors:
    """The mirrors of one run in one job, on rank 0."""

    def __init__(self, store: Store, settings: Settings, recorder: SilentRecorder, *, job: str) -> None:
        """Open the mirrors that the settings name.

        Raises:
            MirrorTaken: a mirror belongs to another run.
            UnbrokenError: a mirror that this run has never used refused.
        """
        self._store, self._recorder, self._job = store, recorder, job
        limits = Limits(settings.mirror_memory_bytes, settings.mirror_bytes_per_second)
        self._taking = Taking(job, time.time_ns, limits)
        self._wait_s = settings.mirror_wait_seconds
        self._warned: dict[tuple[str, str], float] = {}
        known = read_mirrors(store)
        self._mirrors = [opened for text in settings.mirrors if (opened := self._open(text, known)) is not None]
        # Before the first upload, and with those that could not be opened: what they lack is kept from now on.
        if settings.mirrors and tuple(settings.mirrors) != known:
            write_mirrors(store, settings.mirrors, job=job)
        elif known and not settings.mirrors:
            _log.warning(
                "this run was mirrored to %s and this job does not mirror: what is not mirrored yet is kept; "
                "unbroken mirror uploads it, unbroken mirror --forget gives the mirror up",
                ", ".join(known),
            )
        self._mirroring: Mirroring | None = None

    def _open(self, text: str, known: tuple[str, ...]) -> Mirror | None:
        address = parse_address(text)
        try:
            client = open_client(home_of(address, self._store), self._store.files)
            require_own(self._store, client, new_id=secrets.token_hex(8), job=self._job)
            if gone := forget_removed(self._store, Mirror(address, client)):
                _log.info("no longer in the mirror %s and uploaded again: %s", text, ", ".join(gone))
        except MirrorTaken:
            raise
        except StorageError as refused:
            if text not in known or not scan(self._store).committed:
                raise
            message = "the mirror %s cannot be used by this job: %s; nothing is swept that it lacks"
            _log.warning(message, text, refused.message)
            return None
        return Mirror(address, client)

    # ---- resuming ----

    def learn_rewinds(self) -> None:
        """Take over what the mirrors know of requests that were carried out: after a wiped disk nothing here does.

        Raises:
            UnbrokenError: a mirror refused, and there is nothing here to resume from.
        """
        learn_rewinds(self._store, self._mirrors, self._taking, warn=_log.warning)

    def bring_back(self) -> None:
        """Make the local store as new and as whole as the mirrors are.

        Raises:
            UnbrokenError: a mirror refused, and there is nothing here to resume from.
        """
        for brought in bring_back(self._store, self._mirrors, self._taking, warn=_log.warning):
            self._note(brought)

    def repair(self, name: str) -> bool:
        """Replace the damaged parts of a checkpoint by those of a mirror; says whether that was possible."""
        try:
            brought = repair(self._store, name, self._mirrors, self._taking)
        except UnbrokenError as refused:
            _log.warning("%s is damaged and could not be repaired from a mirror: %s", name, refused.message)
            return False
        if brought is not None:
            self._note(brought)
        return brought is not None

    def fetch_named(self, wanted: str) -> bool:
        """Fetch the checkpoint that a step or a name means; says whether a mirror has it.

        Raises:
            UnbrokenError: a mirror refused, or the disk.
        """
        brought = fetch_named(self._store, wanted, self._mirrors, self._taking)
        if brought is not None:
            self._note(brought)
        return brought is not None

    def ids_after(self, step: int) -> Mapping[str, str]:
        """The checkpoints of the mirrors behind a step, which a rewind to it gives up.

        Raises:
            UnbrokenError: a mirror refused: what it holds could not be given up.
        """
        return remote_ids(self._mirrors, after_step=step)

    def _note(self, brought: Brought) -> None:
        fetched = brought.fetched
        self._recorder.event(
            "mirror-fetch",
            name=fetched.name,
            step=fetched.manifest.step,
            mirror=brought.mirror,
            parts=list(fetched.parts),
            bytes=fetched.size_bytes,
            is_whole=fetched.is_new,
        )
        _log.info("%s (%s)", brought.sentence(), amounts.size(fetched.size_bytes))

    # ---- beside training ----

    def start(self) -> None:
        """Begin to upload, with what earlier jobs left first."""
        if self._mirrors:
            self._mirroring = Mirroring(self._store, self._mirrors, self._taking.limits, self, job=self._job)
            self._mirroring.start()

    def committed(self) -> None:
        """A checkpoint was committed."""
        if self._mirroring is not None:
            self._mirroring.committed()

    def mirrored(self, upload: Upload, seconds: float) -> None:
        """Note an upload; called from a thread."""
        self._recorder.event(
            "mirror",
            name=upload.name,
            mirror=upload.mirror,
            bytes=upload.size_bytes,
            seconds=seconds,
            remote_name=upload.remote_name,
        )
        _log.info("mirrored %s to %s in %.1f s", upload.name, upload.mirror, seconds)

    def refused(self, mirror: str, name: str, error: UnbrokenError) -> None:
        """Note a refusal, each kind now and then; called from a thread."""
        now_s, key = time.monotonic(), (mirror, error.kind)
        if now_s - self._warned.get(key, -_LOGGED_EVERY_S) < _LOGGED_EVERY_S:
            return
        self._warned[key] = now_s
        self._recorder.event("mirror-failed", name=name, mirror=mirror, error=error.kind, reason=error.message)
        what = f"{name} is not mirrored" if name else "nothing is mirrored"
        _log.warning("%s to %s yet: %s; it is kept here and tried again", what, mirror, error.message)

    def finish(self, *, longest_s: float | None) -> None:
        """Wait for what is pending, at most as long as the settings and the walltime allow, and say what is left."""
        if self._mirroring is None:
            return
        wait_s = self._wait_s if longest_s is None else min(self._wait_s, longest_s)
        if not self._mirroring.wait(min(wait_s, _UNSAID_S)) and wait_s > _UNSAID_S:
            _log.info("waiting up to %s for uploads to the mirrors", amounts.duration(wait_s))
            self._mirroring.wait(wait_s - _UNSAID_S)
        self._mirroring.close()
        for mirror in self._mirrors:
            if left := pending(self._store, mirror.url):
                many = amounts.plural(len(left), "checkpoint")
                _log.warning(
                    "%s not yet mirrored to %s: the next job goes on, or `unbroken mirror`; kept until then",
                    many,
                    mirror.url,
                )

    def close(self) -> None:
        """End the uploads; what is on its way stays pending."""
        if self._mirroring is not None:
            self._mirroring.close()
