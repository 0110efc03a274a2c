"""A thread that asks for notices beside training. It never raises into it and never makes it wait."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from unbroken.errors import BadSpot, StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.launch.spot.notices import CLOUDS, Cloud, Notice, Unreadable
from unbroken.launch.spot.services import Service, Silent, find_address, service_of
from unbroken.quoting.log import logger
from unbroken.records.stop import StopReason

# ---- which service, which process ----

VARIABLE: Final = "UNBROKEN_SPOT"
AUTO: Final = "auto"
OFF: Final = "off"
WORDS: Final = (*CLOUDS, AUTO, OFF)
DMI: Final = Path("/sys/class/dmi/id")
# Who started the processes of a node says which of them is which; each launcher in its own variable.
_LOCAL_RANKS: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_LIMIT_BYTES: Final = 4096
# What firmware calls a machine of a cloud; Azure's tag tells it from any other machine under Hyper-V.
_MARKS: Final[tuple[tuple[str, str, Cloud], ...]] = (
    ("sys_vendor", "amazon ec2", "aws"),
    ("bios_version", "amazon", "aws"),
    ("product_name", "google compute engine", "gcp"),
    ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "azure"),
)


def choose(setting: str | None, environ: Mapping[str, str], dmi: Path = DMI, files: Files = LOCAL) -> Cloud | None:
    """The cloud to listen to: as set, else by ``UNBROKEN_SPOT``, else none; ``auto`` looks at the firmware's names.

    Raises:
        BadSpot: the word is not known.
    """
    source, word = ("Settings.spot", setting) if setting else (VARIABLE, environ.get(VARIABLE, "").strip())
    if word == AUTO:
        return detect(dmi, files)
    if not word or word == OFF:
        return None
    for cloud in CLOUDS:
        if word == cloud:
            return cloud
    raise BadSpot(source=source, value=word, complaint=f"it is none of {', '.join(WORDS)}")


def detect(dmi: Path = DMI, files: Files = LOCAL) -> Cloud | None:
    """The cloud that this machine is of, by the names its firmware gives; the network is never asked."""
    for file, mark, cloud in _MARKS:
        try:
            text = files.read_bytes(dmi / file, limit_bytes=_LIMIT_BYTES)
        except StorageFailed:
            # Not there, or not for us to read: then it tells nothing.
            continue
        if mark in text.decode("ascii", errors="replace").lower():
            return cloud
    return None


def listens(environ: Mapping[str, str]) -> bool:
    """Whether this process is to listen: the first one of its node, or any that does not know its place there.

    A notice concerns one node, so the first rank of the world alone would not hear those of the others.
    """
    places = (environ.get(variable, "").strip() for variable in _LOCAL_RANKS)
    return next((place for place in places if place), "0") == "0"


# ---- the thread ----

# The shortest warning that any cloud gives is 30 s.
EVERY_S: Final = 2.0
_log = logger(__name__)


class SpotWatch:
    """Asks a cloud's service again and again until there is a notice or it is ended."""

    def __init__(self, service: Service, every_s: float = EVERY_S) -> None:
        self._service, self._every_s = service, every_s
        self._ended = threading.Event()
        self._notice: Notice | None = None
        self._is_trouble_told = False
        self._thread = threading.Thread(target=self._listen, name="unbroken-spot", daemon=True)

    def start(self) -> "SpotWatch":
        """Begin to ask."""
        self._thread.start()
        return self

    def look(self) -> StopReason | None:
        """The notice as a reason to stop; costs nothing."""
        notice = self._notice
        return None if notice is None else StopReason("spot", notice.sentence())

    @property
    def deadline_s(self) -> float | None:
        """When the machine goes, in seconds since 1970, where a notice says so."""
        notice = self._notice
        return None if notice is None else notice.at_s

    def end(self) -> None:
        """Ask no more. A question that nobody answers is not waited for."""
        self._ended.set()

    def _listen(self) -> None:
        while not self._ended.is_set():
            if self._ask_once():
                return
            self._ended.wait(self._every_s)

    def _ask_once(self) -> bool:
        """Whether there is a notice; trouble is told once, until there is an answer again."""
        try:
            found = self._service.ask()
        except (Silent, Unreadable) as trouble:
            if not self._is_trouble_told:
                _log.warning("spot notices cannot be read: %s; it is tried again every %g s", trouble, self._every_s)
            self._is_trouble_told = True
            return False
        if self._is_trouble_told:
            _log.warning("spot notices can be read again")
        self._is_trouble_told = False
        if found is not None:
            _log.warning("this machine will be taken away: %s", found.sentence())
            self._notice = found
        return found is not None


def watch(setting: str | None, environ: Mapping[str, str], clock: Callable[[], float] = time.time) -> SpotWatch | None:
    """A watch, not started yet, where one is set and this process is the one of its node that listens; else None.

    Raises:
        BadSpot: the setting or the address cannot be used.
    """
    cloud = choose(setting, environ)
    # Looked at before anything else decides: a wrong address is refused on every rank alike.
    address = find_address(environ)
    if cloud is None or not listens(environ):
        return None
    _log.info("listens to the spot notices of %s at %s", cloud, address.host)
    return SpotWatch(service_of(cloud, address, clock))
