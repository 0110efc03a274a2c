"""Nodes that come and go: where agents of torchrun meet, how few of them may train, and how many.

torchrun's own rendezvous brings the agents together again after one of them was lost, and starts the ranks anew in a
world of another size; each such start is a job of the run. What keeps the bits the same is not here: it is the lease,
the last commit and the fold over lanes.
"""

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from unbroken.launch.torchrun import ENDPOINT

# Workers must not look for each other in the store in which the agents met: what an earlier world left there under the
# same names would be taken for an answer.
OWN_STORE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
DEFAULT_ID: Final = "unbroken"
_NODES: Final = re.compile(r"(?P<least>[0-9]{1,6})(?::(?P<most>[0-9]{1,6}))?")
_ENDPOINT: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/]+):(?P<port>[0-9]{1,5})")
_PORTS: Final = range(1, 65536)


@dataclass(frozen=True)
class Nodes:
    """How many nodes take part: at least, and at most."""

    least: int = 1
    most: int = 1

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True)
class Meeting:
    """Where agents find each other: ``endpoint`` is HOST:PORT, the same on each node, as is ``id``."""

    endpoint: str
    id: str = DEFAULT_ID
    settings: str | None = None

    def options(self, nodes: Nodes) -> list[str]:
        """The options that torchrun takes for it."""
        options = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", ENDPOINT, self.endpoint]
        options += ["--rdzv-id", self.id]
        if self.settings:
            options += ["--rdzv-conf", self.settings]
        if _is_loopback(self.endpoint):
            # All agents are on this machine, whose own name may lead nowhere.
            options += ["--local-addr", "127.0.0.1"]
        return options


def parse_nodes(text: str) -> Nodes | None:
    """``N`` or ``MIN:MAX``; None if it is neither."""
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
