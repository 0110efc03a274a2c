"""The options passed to torchrun: signals, shutdown timeout, number of nodes, rendezvous.

The launcher never imports torch; which options this version of torchrun knows is read from its source file. Unknown
ones are left out: the launcher signals the workers and keeps the timeout itself.
"""

import importlib.util
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors import TorchMissing

MODULE: Final = "torch.distributed.run"
ENDPOINT: Final = "--rdzv-endpoint"
# Without SIGINT: after Ctrl-C torchrun ends its workers with SIGTERM, while a forwarded SIGINT would reach a worker
# twice and count as the second one, which kills it.
SIGNALS: Final = "SIGTERM,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
SHUTDOWN_VARIABLE: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def launcher_text() -> str:
    """The source code of torchrun.

    Raises:
        TorchMissing: torch is not installed.
    """
    found = importlib.util.find_spec("torch")
    for place in (found.submodule_search_locations or ()) if found else ():
        source = Path(place) / "distributed" / "run.py"
        if source.is_file():
            return source.read_text(encoding="utf-8", errors="replace")
    raise TorchMissing(purpose="starting several processes")


def stopping_options(text: str, shutdown_timeout_s: int) -> list[str]:
    """The options on signals and shutdown timeout, as far as this version of torchrun has them."""
    options: list[str] = []
    if '"--signals-to-handle"' in text:
        options += ["--signals-to-handle", SIGNALS]
    if '"--shutdown-timeout"' in text:
        options += ["--shutdown-timeout", str(shutdown_timeout_s)]
    return options


# ---- nodes and rendezvous ----

# Workers must not use the rendezvous store of the agents: keys of an earlier world there would be taken for current.
OWN_STORE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
DEFAULT_ID: Final = "unbroken"
_NODES: Final = re.compile(r"(?P<least>[0-9]{1,6})(?::(?P<most>[0-9]{1,6}))?")
_ENDPOINT: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/]+):(?P<port>[0-9]{1,5})")
_PORTS: Final = range(1, 65536)


@dataclass(frozen=True)
class Nodes:
    """The number of nodes: minimum and maximum."""

    least: int = 1
    most: int = 1

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of the agents: ``endpoint`` is HOST:PORT, the same on all nodes, as is ``id``."""

    endpoint: str
    id: str = DEFAULT_ID
    settings: str | None = None

    def options(self, nodes: Nodes) -> list[str]:
        """The options for torchrun."""
        options = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", ENDPOINT, self.endpoint]
        options += ["--rdzv-id", self.id]
        if self.settings:
            options += ["--rdzv-conf", self.settings]
        if _is_loopback(self.endpoint):
            # All agents are on this machine, whose host name may not resolve.
            options += ["--local-addr", "127.0.0.1"]
        return options


def parse_nodes(text: str) -> Nodes | None:
    """Parse ``N`` or ``MIN:MAX``; None if it is neither."""
    match = _NODES.fullmatch(text)
    if match is None:
        return None
    least = int(match["least"])
    most = int(match["most"] or least)
    return Nodes(least, most) if 0 < least <= most else None


def is_endpoint(text: str) -> bool:
    """Whether a text is ``HOST:PORT``."""
    match = _ENDPOINT.fullmatch(text)
    return match is not None and int(match["port"]) in _PORTS


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
