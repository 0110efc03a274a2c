"""Connected gloo groups: the ranks confirm to each other that they are connected, and try again where one is not.

Gloo knows a connection by a small number that arrives at a port. A connection that was meant for another job, which has
just closed the port that this one was given, may carry a number that fits: then it is taken for one of this job's, and
the group fails at once or at the first exchange. Where many jobs start on one machine this happens every few hours.

So a group is used only after every rank has exchanged a token with every other. Each rank reports to the store whether
that worked; where one could not, all drop the group and connect again under another name, a few times. A rank that is
gone reports nothing: the others wait for it as long as for one in an exchange, and end with ``PeerLost``.
"""

import contextlib
import datetime
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from unbroken import torch_private
from unbroken.errors import NoConnection, PeerError, PeerLost
from unbroken.quoting import amounts
from unbroken.quoting.log import logger
from unbroken.torch_private import PrefixStore, Store

_log = logger(__name__)
G = TypeVar("G")

ATTEMPTS: Final = 3
# How long connecting may take once every rank is there: milliseconds, or minutes where thousands meet in one store.
_CONNECT_S: Final = 120.0
_CONNECT_S_PER_RANK: Final = 0.1
# Gloo waits five times as long as it is told for a rank that has given up, and the default group is not abandoned.
_INIT_S: Final = 12.0
_GLOO_WAITS: Final = 5
_LOOK_FIRST_S, _LOOK_LAST_S = 0.02, 0.5
_FAILED: Final = "failed"
_TOKEN_BITS: Final = 62
_SHOWN_RANKS: Final = 8


def connected_group(store: Store, rank: int, size: int, timeout_s: float) -> Any:  # noqa: ANN401
    """A gloo group of its own over a store that nobody else uses; an exchange may take ``timeout_s``. Collective.

    Raises:
        PeerLost: a rank did not come, or is gone.
        NoConnection: the ranks are there and cannot connect.
    """
    seconds = min(timeout_s, _CONNECT_S + _CONNECT_S_PER_RANK * size)

    def connect(attempt: Store, token: int) -> Any:  # noqa: ANN401
        def make() -> Any:  # noqa: ANN401
            group = dist.ProcessGroupGloo(attempt, rank, size, datetime.timedelta(seconds=timeout_s))
            _require_tokens(group, token, rank, size)
            return group

        return _unless_another_failed(make, attempt, seconds)

    with noticing_loss(rank):
        return _confirmed(store, rank, size, timeout_s, connect, wait_s=2 * seconds)


def init_gloo(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Make the default process group, as ``torch.distributed.init_process_group("gloo", ...)`` does. Collective.

    Raises:
        PeerLost: a rank did not come, or is gone.
        NoConnection: the ranks are there and cannot connect.
    """
    seconds = min(timeout_s, _INIT_S + _CONNECT_S_PER_RANK * size)

    def connect(attempt: Store, token: int) -> Any:  # noqa: ANN401
        # Where the timeout stays as it is now, a short one would end later exchanges too soon.
        within = datetime.timedelta(seconds=seconds if torch_private.can_set_timeout() else timeout_s)
        # What is left of an attempt that failed on another rank.
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo", store=attempt, rank=rank, world_size=size, timeout=within)
        group = torch_private.default_cpu_group()
        _require_tokens(group, token, rank, size)
        return group

    with noticing_loss(rank):
        group = _confirmed(store, rank, size, timeout_s, connect, wait_s=2 * _GLOO_WAITS * seconds)
        torch_private.set_timeout(group, timeout_s)


def _confirmed(
    store: Store,
    rank: int,
    size: int,
    timeout_s: float,
    connect: Callable[[Store, int], G],
    *,
    wait_s: float,
) -> G:
    """What ``connect`` gives, on every rank in the same attempt."""
    if rank == 0:
        store.set("token", str(secrets.randbits(_TOKEN_BITS)))
    _wait_for_all(store, "here", rank, size, timeout_s)
    token = int(store.get("token"))
    said = ""
    for number in range(ATTEMPTS):
        attempt = PrefixStore(str(number), store)
        group: G | None = None
        try:
            group = connect(attempt, token)
        except RuntimeError as refused:
            attempt.compare_set(_FAILED, "", f"rank {rank}: {first_line(refused)}")
        _wait_for_all(attempt, "reported", rank, size, wait_s)
        if group is not None and not attempt.check([_FAILED]):
            return group
        said = attempt.get(_FAILED).decode()
        _log.info("attempt %d of %d to connect over gloo: %s", number + 1, ATTEMPTS, said)
    raise NoConnection(rank=rank, symptom=said, attempts=ATTEMPTS)


def _unless_another_failed(make: Callable[[], G], attempt: Store, seconds: float) -> G:
    """What ``make`` gives; abandoned where another rank reports that it could not connect.

    Raises:
        RuntimeError: it failed, another rank did, or it takes too long.
    """
    made: list[G] = []
    refused: list[str] = []

    def run() -> None:
        try:
            made.append(make())
        except RuntimeError as error:
            # Its words only: with its traceback it would keep the group, and the others' connections to it.
            refused.append(first_line(error))

    # Gloo waits for a rank that has given up as long as for one in an exchange, and looks at no store meanwhile.
    thread = threading.Thread(target=run, name="unbroken-connect", daemon=True)
    thread.start()
    ends_at, pause_s = time.monotonic() + seconds, _LOOK_FIRST_S
    while True:
        thread.join(pause_s)
        pause_s = min(2 * pause_s, _LOOK_LAST_S)
        if made:
            return made[0]
        if refused:
            raise RuntimeError(refused[0])
        if attempt.check([_FAILED]):
            raise RuntimeError("another rank could not connect")
        if time.monotonic() >= ends_at:
            raise RuntimeError(f"not connected within {seconds:.0f} s")


def _require_tokens(group: Any, token: int, rank: int, size: int) -> None:  # noqa: ANN401
    """Exchange a token with every other rank.

    Raises:
        RuntimeError: a connection is closed, or somebody else is at its other end.
    """
    found = torch.empty(size, dtype=torch.int64, device="cpu")
    sent = torch.full((size,), token + rank, dtype=torch.int64, device="cpu")
    group.alltoall_base(found, sent, [], [], dist.AllToAllOptions()).wait()
    foreign = [other for other, answer in enumerate(found.tolist()) if answer != token + other]
    if foreign:
        raise RuntimeError(f"rank {foreign[0]} answered with the token of another job")


def _wait_for_all(store: Store, place: str, rank: int, size: int, timeout_s: float) -> None:
    """Report to the store that this rank has reached a place, and wait for the others.

    Raises:
        PeerLost: some did not report in time.
    """
    store.set(f"{place}-{rank}", "1")
    if store.add(place, 1) >= size:
        store.set(f"all-{place}", "1")
    try:
        store.wait([f"all-{place}"], datetime.timedelta(seconds=timeout_s))
    except RuntimeError as late:
        lacking = [other for other in range(size) if not store.check([f"{place}-{other}"])]
        shown = amounts.listed([*map(str, lacking)], _SHOWN_RANKS)
        said = f"no connection to rank {shown} within {timeout_s:.0f} s" if lacking else first_line(late)
        raise PeerLost(rank=rank, symptom=said) from late


@contextlib.contextmanager
def noticing_loss(rank: int) -> Iterator[None]:
    """Raise ``PeerLost`` for what gloo reports as a socket error: a rank that should answer does not."""
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as broken:
        raise PeerLost(rank=rank, symptom=first_line(broken)) from broken


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its class where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
