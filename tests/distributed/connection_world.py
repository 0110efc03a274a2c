"""What ranks run that connect over a store which misleads some of them."""

import datetime
import os
import re
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Literal

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from unbroken import connection, torch_private
from unbroken.connection import init_gloo
from unbroken.errors import NoConnection, PeerLost
from unbroken.world import World

Fault = Literal["none", "closed port", "stranger", "token", "killed"]
# An IPv4 address as gloo publishes it: the family, the port and the host.
_ADDRESS = re.compile(rb"(\x02\x00)..(\x7f...)", re.DOTALL)
# Of two ranks the one with the larger port connects, compared as these bytes stand in memory: every port of gloo is
# larger than these, so that the rank that reads one connects to it.
_CLOSED_PORT = 0x0100
_STRANGERS_PORTS = range(0x2000, 0x7F00, 0x100)


class Misleading(Store):
    """The store of all ranks, from which this one reads something else a number of times."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.fault: Fault = "none"
        self.times = 0
        self.listening: socket.socket | None = None

    def mislead(self, fault: Fault, times: int) -> None:
        """Give the next readings of an address or of a token another answer."""
        self.fault, self.times = fault, times

    def get(self, key: str) -> bytes:
        found = self.store.get(key)
        is_token = self.fault == "token"
        if not (key.endswith("token") if is_token else _ADDRESS.search(found)) or not self.times:
            return found
        self.times -= 1
        if is_token:
            return str(int(found) + 1).encode()
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        port = self.port_of_stranger() if self.fault == "stranger" else _CLOSED_PORT
        return _ADDRESS.sub(lambda address: address[1] + struct.pack(">H", port) + address[2], found)

    def port_of_stranger(self) -> int:
        """Where somebody listens who is not of this world: he accepts, and does not answer."""
        if self.listening is None:
            self.listening = socket.socket()
            for port in _STRANGERS_PORTS:
                try:
                    self.listening.bind(("127.0.0.1", port))
                    break
                except OSError:
                    continue
            self.listening.listen()
            threading.Thread(target=accept_and_close, args=(self.listening,), daemon=True).start()
        return int(self.listening.getsockname()[1])

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.store.compare_set(key, expected, desired)

    def wait(self, keys: list[str], timeout: datetime.timedelta = datetime.timedelta(seconds=60)) -> None:
        self.store.wait(keys, timeout)


def accept_and_close(listening: socket.socket) -> None:
    """Accept connections; close each when somebody sends over it, after the eight bytes by which gloo connects."""
    while True:
        with listening.accept()[0] as connection:
            connection.recv(8, socket.MSG_WAITALL)
            connection.recv(1)


def keep_timeouts() -> None:
    """Be as torch before 2.13, in which a gloo group keeps the timeout that it was made with."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torch_private, "can_set_timeout", lambda: False)
    patch.setattr(torch_private, "set_timeout", lambda group, timeout_s: None)


def connect(
    folder: str,
    fault: Fault,
    misled: tuple[int, ...],
    attempts: int,
    timeout_s: float,
    is_default: bool,
    keeps_timeout: bool = False,
) -> object:
    """Connect while some ranks are misled in the first attempts; what a world over that connection says then."""
    if keeps_timeout:
        keep_timeouts()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = Misleading(FileStore(str(Path(folder) / "store"), size))
    # Gloo reads the addresses of all ranks, its own too, before it connects to the first.
    times = (attempts * size if fault != "token" else 1) if rank in misled else 0
    try:
        if is_default:
            store.mislead(fault, times)
            init_gloo(store, rank, size, timeout_s)
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            store.mislead(fault, times)
        world = World.current(timeout_s=timeout_s)
    except (NoConnection, PeerLost) as refused:
        return refused
    answers = world.all_gather(rank)
    dist.barrier()
    return answers, store.times


def exchange_late(folder: str, keeps_timeout: bool) -> str:
    """Connect within eight seconds and exchange after nine; the timeout of an exchange is a minute."""
    if keeps_timeout:
        keep_timeouts()
    pytest.MonkeyPatch().setattr(connection, "_INIT_S", 8.0)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    init_gloo(FileStore(str(Path(folder) / "store"), size), rank, size, 60.0)
    if rank == 1:
        time.sleep(9)
    dist.barrier()
    return "exchanged"
