"""Polling for preemption notices in a thread: which service, which process, and the thread itself.

The thread never raises into training and never makes it wait.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from unbroken.errors import BadSpot, StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.launch.spot.notices import CLOUDS, Cloud, Notice, Unreadable
from unbroken.launch.spot.services import Service, Unreachable, find_address, service_of
from unbroken.quoting.log import logger
from unbroken.records.stop import StopReason

# ---- which service, which process ----

VARIABLE: Final = "UNBROKEN_SPOT"
AUTO: Final = "auto"
OFF: Final = "off"
WORDS: Final = (*CLOUDS, AUTO, OFF)
DMI: Final = Path("/sys/class/dmi/id")
# The local rank of a process, as the different launchers set it.
_LOCAL_RANKS: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_LIMIT_BYTES: Final = 4096
# DMI names of the clouds; the asset tag distinguishes Azure from any other Hyper-V machine.
_MARKS: Final[tuple[tuple[str, str, Cloud], ...]] = (
    ("sys_vendor", "amazon ec2", "aws"),
    ("bios_version", "amazon", "aws"),
    ("product_name", "google compute engine", "gcp"),
    ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "azure"),
)


def choose(setting: str | None, environ: Mapping[str, str], dmi: Path = DMI, files: Files = LOCAL) -> Cloud | None:
    """The cloud to poll: the setting, else ``UNBROKEN_SPOT``, else none; ``auto`` detects it from DMI.

    Raises:
        BadSpot: the name is unknown.
    """
    source, word = ("Settings.spot", setting) if setting else (VARIABLE, environ.get(VARIABLE, "").strip())
    if word == AUTO:
        return detect(dmi, files)
    if not word or word == OFF:
        return None
    for cloud in CLOUDS:
        if word == cloud:
            return cloud
    raise BadSpot(source=source, value=word, complaint=f"it must be one of {', '.join(WORDS)}")


def detect(dmi: Path = DMI, files: Files = LOCAL) -> Cloud | None:
    """The cloud of this machine, from its DMI names; uses no network."""
    for file, mark, cloud in _MARKS:
        try:
            text = files.read_bytes(dmi / file, limit_bytes=_LIMIT_BYTES)
        except StorageFailed:
            # Missing or not readable.
            continue
        if mark in text.decode("ascii", errors="replace").lower():
            return cloud
    return None


def polls_here(environ: Mapping[str, str]) -> bool:
    """Whether this process polls: local rank 0 of each node, or a process without a local rank.

    A notice concerns one node, so rank 0 alone would miss those of the other nodes.
    """
    ranks = (environ.get(variable, "").strip() for variable in _LOCAL_RANKS)
    return next((rank for rank in ranks if rank), "0") == "0"


# ---- the thread ----

# The shortest warning that any cloud gives is 30 s.
EVERY_S: Final = 2.0
_log = logger(__name__)


class SpotWatch:
    """Polls the service of a cloud until there is a notice or ``end`` is called."""

    def __init__(self, service: Service, every_s: float = EVERY_S) -> None:
        self._service, self._every_s = service, every_s
        self._ended = threading.Event()
        self._notice: Notice | None = None
        self._is_reported = False
        self._thread = threading.Thread(target=self._run, name="unbroken-spot", daemon=True)

    def start(self) -> "SpotWatch":
        """Start polling."""
        self._thread.start()
        return self

    def look(self) -> StopReason | None:
        """The notice as a reason to stop, if there is one; does no I/O."""
        notice = self._notice
        return None if notice is None else StopReason("spot", notice.sentence())

    @property
    def deadline_s(self) -> float | None:
        """When the machine is taken away, in seconds since 1970, if known."""
        notice = self._notice
        return None if notice is None else notice.at_s

    def end(self) -> None:
        """Stop polling; does not wait for a request in progress."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            if self._poll_once():
                return
            self._ended.wait(self._every_s)

    def _poll_once(self) -> bool:
        """Whether there is a notice; an error is logged once, until the service responds again."""
        try:
            found = self._service.poll()
        except (Unreachable, Unreadable) as trouble:
            if not self._is_reported:
                _log.warning("cannot read spot notices: %s; trying again every %g s", trouble, self._every_s)
            self._is_reported = True
            return False
        if self._is_reported:
            _log.warning("spot notices can be read again")
        self._is_reported = False
        if found is not None:
            _log.warning("preemption notice: %s", found.sentence())
            self._notice = found
        return found is not None


def watch(setting: str | None, environ: Mapping[str, str], clock: Callable[[], float] = time.time) -> SpotWatch | None:
    """A watch, not started yet, if spot notices are on and this process polls for its node; else None.

    Raises:
        BadSpot: the setting or the address cannot be used.
    """
    cloud = choose(setting, environ)
    # Before the check of the local rank: a wrong address must fail on every rank alike.
    address = find_address(environ)
    if cloud is None or not polls_here(environ):
        return None
    _log.info("polling %s for spot notices at %s", cloud, address.host)
    return SpotWatch(service_of(cloud, address, clock))
