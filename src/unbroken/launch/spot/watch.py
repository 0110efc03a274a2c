"""A thread that asks for notices beside training. It never raises into it and never makes it wait."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from unbroken.launch.spot.chosen import choose, listens
from unbroken.launch.spot.metadata import Silent, find_address
from unbroken.launch.spot.notices import Notice, Unreadable
from unbroken.launch.spot.services import Service, service_of
from unbroken.quoting.log import logger
from unbroken.run.stop import StopReason

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
