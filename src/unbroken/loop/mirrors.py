"""The mirrors of a run that trains: what a resume takes from them, and what is copied to them beside training.

Rank 0 alone has them. A mirror that was never used refuses at the start of the job, where somebody is looking; one that
has worked before is warned about and tried again, since training matters more than its second copy.
"""

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from unbroken.errors import DamagedCheckpoint, MirrorTaken, StorageError, UnbrokenError, UsageError
from unbroken.loop.recorder import SilentRecorder
from unbroken.loop.settings import Settings
from unbroken.mirror.address import parse_address
from unbroken.mirror.background import Mirror, Mirroring, forget_removed, local_damage, pending
from unbroken.mirror.bring_back import (
    Brought,
    Skipped,
    Taking,
    bring_back,
    fetch_named,
    learn_rewinds,
    remote_ids,
    repair,
)
from unbroken.mirror.client import open_client
from unbroken.mirror.ownership import Adopted, owned_first, require_own
from unbroken.mirror.remote import home_of, store_at
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
_SHOWN: Final = 4


def log_adopted(adopted: Adopted) -> None:
    """Say which run a directory without checkpoints continues; a warning if that run was in another directory."""
    if adopted.is_moved:
        _log.warning("%s; if that is another run, stop this job and give it a mirror of its own", adopted.sentence())
    else:
        _log.info("%s", adopted.sentence())


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
        self._refusals: dict[str, UnbrokenError] = {}
        # The ids of which a mirror has a damaged copy: all mirrors were tried, so they are not fetched again.
        self._skipped: set[str] = set()
        # Uploads of checkpoints whose save was not logged yet: that is done at an edge, and an upload may be faster.
        self._logged: set[str] = set()
        self._unlogged: list[tuple[Upload, float]] = []
        self._logging = threading.Lock()
        known = read_mirrors(store)
        self._mirrors = self._open_all(settings.mirrors, known)
        # What they hold was compared when they were opened; of the others this job knows nothing.
        self._unopened = {*known, *settings.mirrors} - {mirror.url for mirror in self._mirrors}
        # Before the first upload, and with those that could not be opened: what they lack is kept from now on.
        if settings.mirrors and tuple(settings.mirrors) != known:
            write_mirrors(store, settings.mirrors, job=job)
            if known and set(settings.mirrors) != set(known):
                _log.warning(
                    "this run is mirrored to %s from now on, as the settings of this job say, and was to %s: what "
                    "unbroken mirror --to and --forget have changed lasts only if the settings are changed too",
                    ", ".join(settings.mirrors),
                    ", ".join(known),
                )
        elif known and not settings.mirrors:
            _log.warning(
                "this run was mirrored to %s and this job does not mirror: what is not mirrored yet is kept; "
                "unbroken mirror uploads it, unbroken mirror --forget gives the mirror up",
                ", ".join(known),
            )
        self._mirroring: Mirroring | None = None

    def _open_all(self, texts: tuple[str, ...], known: tuple[str, ...]) -> list[Mirror]:
        """Those that can be used; those that cannot are warned about, if this run can continue without them."""
        opened: list[Mirror] = []
        refusals: list[tuple[str, StorageError]] = []
        for text in owned_first(self._store, texts):
            try:
                opened.append(self._open(text, is_known=text in known))
            except MirrorTaken:
                raise
            except StorageError as refused:
                refusals.append((text, refused))
        is_here = bool(refusals) and bool(scan(self._store).committed)
        # With a wiped disk nothing here says which mirrors were used before: of two, one is enough.
        is_there = bool(refusals) and not is_here and any(scan(store_at(each.client)).committed for each in opened)
        for text, refusal in refusals:
            if not (is_there or (is_here and text in known)):
                raise refusal
            message = "the mirror %s cannot be used by this job: %s; nothing is swept that it lacks"
            _log.warning(message, text, refusal.message)
        return sorted(opened, key=lambda mirror: texts.index(mirror.url))

    def _open(self, text: str, *, is_known: bool) -> Mirror:
        address = parse_address(text)
        client = open_client(home_of(address, self._store), self._store.files)
        adopted = require_own(self._store, client, new_id=secrets.token_hex(8), job=self._job, is_known=is_known)
        if adopted is not None:
            log_adopted(adopted)
        mirror = Mirror(address, client)
        if gone := forget_removed(self._store, mirror):
            _log.info("no longer in the mirror %s and uploaded again: %s", text, amounts.listed(gone, _SHOWN))
        return mirror

    # ---- resuming ----

    def learn_rewinds(self) -> None:
        """Take over what the mirrors know of requests that were carried out: after a wiped disk nothing here does.

        Raises:
            UnbrokenError: a mirror refused, and there is nothing here to resume from.
        """
        learn_rewinds(self._store, self._mirrors, self._taking, warn=_log.warning)

    def bring_back(self, without: Iterable[str] = ()) -> None:
        """Make the local store as new and as whole as the mirrors are; ``without`` names ids that stay there.

        Raises:
            UnbrokenError: a mirror refused, or all its copies are damaged, and there is nothing here to resume from.
        """
        for brought in bring_back(
            self._store,
            self._mirrors,
            self._taking,
            refused=self._note_refusal,
            skipped=self._note_skipped,
            without={*without, *self._skipped},
        ):
            self._note(brought)

    def _note_refusal(self, mirror: Mirror, refusal: StorageError) -> None:
        _log.warning("the mirror %s was not asked for newer checkpoints: %s", mirror.url, refusal.message)

    def _note_skipped(self, skipped: Skipped) -> None:
        if skipped.id is not None:
            self._skipped.add(skipped.id)
        self._recorder.event(
            "mirror-skipped", name=skipped.name, step=skipped.step, mirror=skipped.mirror, reason=skipped.reason
        )
        _log.warning("%s", skipped.sentence())

    def repair(self, name: str) -> bool:
        """Replace the damaged parts of a checkpoint by those of a mirror; says whether that was possible."""
        try:
            brought = repair(self._store, name, self._mirrors, self._taking, skipped=self._note_skipped)
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
        brought = fetch_named(self._store, wanted, self._mirrors, self._taking, skipped=self._note_skipped)
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
        self._logged.update(scan(self._store).committed)
        if self._mirrors:
            self._mirroring = Mirroring(self._store, self._mirrors, self._taking.limits, self, job=self._job)
            self._mirroring.start()

    def committed(self) -> None:
        """A checkpoint was committed."""
        if self._mirroring is not None:
            self._mirroring.committed()

    def away(self) -> Collection[str]:
        """The mirrors that this job has not found in place: what they are recorded to hold is not swept here."""
        return self._unopened | (self._mirroring.missing() if self._mirroring is not None else set())

    def mirrored(self, upload: Upload, seconds: float) -> None:
        """Note an upload; called from a thread."""
        self._refusals.pop(upload.mirror, None)
        self._recorder.event(
            "mirror",
            name=upload.name,
            mirror=upload.mirror,
            bytes=upload.size_bytes,
            seconds=seconds,
            remote_name=upload.remote_name,
        )
        with self._logging:
            self._unlogged.append((upload, seconds))
            self._log_uploads()

    def saved(self, name: str) -> None:
        """The save of a checkpoint was logged; its uploads may be, too."""
        with self._logging:
            self._logged.add(name)
            self._log_uploads()

    def _log_uploads(self, *, all_of_them: bool = False) -> None:
        uploads, self._unlogged = self._unlogged, []
        for upload, seconds in uploads:
            if all_of_them or upload.name in self._logged:
                _log.info("mirrored %s to %s in %.1f s", upload.name, upload.mirror, seconds)
            else:
                self._unlogged.append((upload, seconds))

    def refused(self, mirror: str, name: str, error: UnbrokenError) -> None:
        """Note a refusal, each kind now and then; called from a thread."""
        self._refusals[mirror] = error
        now_s, key = time.monotonic(), (mirror, error.kind)
        if now_s - self._warned.get(key, -_LOGGED_EVERY_S) < _LOGGED_EVERY_S:
            return
        self._warned[key] = now_s
        self._recorder.event("mirror-failed", name=name, mirror=mirror, error=error.kind, reason=error.message)
        what = f"{name} is not mirrored" if name else "nothing is mirrored"
        if isinstance(error, DamagedCheckpoint):
            _log.warning("%s to %s: %s; %s", what, mirror, next(iter(error.findings)), local_damage(self._store))
        elif isinstance(error, UsageError):
            _log.warning("%s to %s: %s; it is kept here; %s", what, mirror, error.message, _remedy(error))
        else:
            _log.warning("%s to %s yet: %s; it is kept here and tried again", what, mirror, error.message)

    def finish(self, *, longest_s: float | None, signalled: Callable[[], object]) -> None:
        """Wait for what is pending, at most as long as the settings and the walltime allow, and say what is left.

        A signal that arrives meanwhile ends the wait: what is pending is safe, and whoever sent it will kill the job.
        The signal that has ended training does not, nor do the copies of it that a launcher sends.
        """
        if self._mirroring is None:
            return
        wait_s = self._wait_s if longest_s is None else min(self._wait_s, longest_s)
        before = signalled()
        if not self._mirroring.wait(min(wait_s, _UNSAID_S)) and wait_s > _UNSAID_S:
            _log.info("waiting up to %s for uploads to the mirrors", amounts.duration(wait_s))
            self._mirroring.wait(wait_s - _UNSAID_S, is_cut_short=lambda: before is None and signalled() is not None)
        self._mirroring.close()
        for mirror in self._mirrors:
            if left := pending(self._store, mirror.url):
                reason = self._refusals.get(mirror.url)
                is_final = isinstance(reason, UsageError)
                _log.warning(
                    "%s not%s mirrored to %s%s: kept here; %s",
                    amounts.plural(len(left), "checkpoint"),
                    "" if is_final else " yet",
                    mirror.url,
                    f" ({reason.message})" if reason else "",
                    _remedy(reason) if reason and is_final else "the next job uploads them, or `unbroken mirror`",
                )

    def close(self) -> None:
        """End the uploads; what is on its way stays pending."""
        if self._mirroring is not None:
            self._mirroring.close()
        with self._logging:
            self._log_uploads(all_of_them=True)


def _remedy(error: UnbrokenError) -> str:
    """What changes a refusal that trying again does not."""
    remedies = error.help() or (error.explained("the causes, and what helps"),)
    return f"{remedies[0].command} ({remedies[0].effect})"
