"""What a directory can take: free space for a save, checked before it, and its speed of durable writes."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from unbroken.disk import NodeKind
from unbroken.errors import NoRoom
from unbroken.files import LOCAL, Files
from unbroken.store.directory import Store
from unbroken.store.keep import Policy, decide
from unbroken.store.names import DraftName
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
        NoRoom: it has not; the error names what pruning by ``policies`` would free.
        StorageFailed: I/O error.
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


# ---- speed ----

PREFIX: Final = ".unbroken-disk-speed-"
SIZE_BYTES: Final = 64 << 20
_CHUNK_BYTES: Final = 4 << 20


def write_speed(
    directory: Path,
    *,
    clock: Callable[[], float],
    token: str,
    content: Callable[[int], bytes],
    files: Files = LOCAL,
    size_bytes: int = SIZE_BYTES,
) -> float:
    """Bytes per second, synced, into a directory.

    Args:
        directory: where; it exists.
        clock: seconds that never go back.
        token: a word that no other process uses, for the name of the scratch file.
        content: that many bytes that no file system can shrink: random ones.
        files: how the file is written.
        size_bytes: how many bytes are written.

    Raises:
        StorageFailed: I/O error.
    """
    for node in files.list_directory(directory):
        if node.name.startswith(PREFIX) and node.kind is NodeKind.FILE:
            # crash here: fewer scratch files of killed ones, which no reader looks at.
            files.remove_file(directory / node.name)
    chunk = content(min(_CHUNK_BYTES, size_bytes))
    scratch = directory / f"{PREFIX}{token}"
    started_s = clock()
    # crash here: a scratch file, which the next measurement removes.
    written = files.write_new(scratch, (chunk for _ in range(max(size_bytes // len(chunk), 1))))
    took_s = max(clock() - started_s, 1e-6)
    # crash here: the same.
    files.remove_file(scratch)
    return written / took_s
