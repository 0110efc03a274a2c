"""Room for a save, asked before it: a full disk is met here and not halfway through."""

from collections.abc import Callable, Collection
from typing import Final

from unbroken.errors import NoRoom
from unbroken.store.keep import Policy, decide
from unbroken.store.names import DraftName
from unbroken.store.place import Store
from unbroken.store.scan import scan
from unbroken.store.sweep import candidates, plan_sweep

RESERVE_BYTES: Final = 64 << 20
RESERVE_INODES: Final = 16


def require_room(
    store: Store,
    *,
    coming_bytes: int,
    coming_files: int,
    policies: Collection[Policy] = (),
    is_live: Callable[[DraftName], bool] = lambda _: True,
    reserve_bytes: int = RESERVE_BYTES,
    reserve_inodes: int = RESERVE_INODES,
) -> None:
    """Pass if the file system has bytes and inodes for the coming save and a reserve.

    Raises:
        NoRoom: it has not; the error says what pruning by ``policies`` would free.
        StorageFailed: the system refused to say.
    """
    store.files.make_directory(store.root)
    space = store.files.space(store.root)
    has_inodes = space.free_inodes is None or space.free_inodes >= coming_files + reserve_inodes
    if space.free_bytes >= coming_bytes + reserve_bytes and has_inodes:
        return
    released = decide(candidates(store, scan(store).committed), tuple(policies)).released
    plan = plan_sweep(store, released, is_live=is_live)
    raise NoRoom(
        path=store.root,
        needed_bytes=coming_bytes,
        reserve_bytes=reserve_bytes,
        free_bytes=space.free_bytes,
        needed_inodes=coming_files,
        reserve_inodes=reserve_inodes,
        free_inodes=space.free_inodes,
        prunable_bytes=plan.freed_bytes,
        prunable=plan.names,
    )
