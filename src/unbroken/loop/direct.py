"""Opening a run that saves straight to an object store, and noticing that its checkpoints are in another place.

Where checkpoints go is a setting, and a setting can change: a job that then found nothing would start at step 0. So the
run directory records the object store, and a job that looks elsewhere is refused while the other place is ahead.
"""

import secrets
from typing import Final

from unbroken.errors import CheckpointsElsewhere, Help
from unbroken.loop.mirrors import log_adopted
from unbroken.loop.settings import Settings
from unbroken.mirror.address import parse_address
from unbroken.mirror.client import Client, open_client
from unbroken.mirror.direct import DirectStore, open_direct
from unbroken.mirror.ownership import require_own
from unbroken.mirror.remote import home_of, store_at
from unbroken.mirror.transfer import LEAST_MEMORY_BYTES, Limits
from unbroken.records.layout import Layout
from unbroken.records.lease import Lease
from unbroken.state.pieces import MOST_FILES
from unbroken.store.directory import Store
from unbroken.store.mirrored import read_direct, write_direct
from unbroken.store.scan import newest_first, outline_quietly, scan
from unbroken.world import World

_NONE: Final = -1


def open_checkpoints(layout: Layout, settings: Settings, world: World, lease: Lease) -> DirectStore | None:
    """The object store that this job saves to, on every rank; None if it saves in the run directory. Collective.

    Raises:
        CheckpointsElsewhere: the run has newer checkpoints in another place than the settings name.
        MirrorTaken: the address belongs to another run.
        UnbrokenError: the object store refused.
    """
    local = Store(layout.checkpoints)
    if settings.checkpoints is None:
        world.from_first(lambda: _require_here(layout, local, lease))
        return None
    address = settings.checkpoints

    def opened() -> DirectStore:
        client = open_client(home_of(parse_address(address), local))
        if world.is_first:
            new_id, is_known = secrets.token_hex(8), read_direct(local) == address
            adopted = require_own(local, client, new_id=new_id, job=lease.job, is_second_copy=False, is_known=is_known)
            if adopted is not None:
                log_adopted(adopted)
            _require_there(layout, local, client, address)
        memory_bytes = max(settings.mirror_memory_bytes // (settings.files_per_rank or MOST_FILES), LEAST_MEMORY_BYTES)
        limits = Limits(memory_bytes, settings.mirror_bytes_per_second)
        direct = open_direct(client, lease.job, limits, is_first=world.is_first)
        if world.is_first and read_direct(local) != address:
            write_direct(local, address, job=lease.job)
        return direct

    return world.all_or_none(opened)


def _require_here(layout: Layout, local: Store, lease: Lease) -> None:
    """Pass if no object store is known to be ahead of the run directory."""
    recorded = read_direct(local)
    if recorded is None:
        return
    remote = store_at(open_client(home_of(parse_address(recorded), local)))
    if _newest_step(remote) > _newest_step(local):
        remedy = Help(f"unbroken fetch {recorded} {layout.run}", "fetch the newest one into the run directory")
        raise CheckpointsElsewhere(run=layout.run, found=recorded, named="the run directory", remedy=remedy)
    write_direct(local, None, job=lease.job)


def _require_there(layout: Layout, local: Store, client: Client, address: str) -> None:
    """Pass unless this run saved in its directory until now and the object store does not have that."""
    if read_direct(local) == address:
        # Decided by an earlier job; what is in the directory is older, also after a rewind in the object store.
        return
    if _newest_step(local) > _newest_step(store_at(client)):
        remedy = Help(f"unbroken mirror {layout.run} --to {address}", "copy them there first")
        raise CheckpointsElsewhere(run=layout.run, found="the run directory", named=address, remedy=remedy)


def _newest_step(store: Store) -> int:
    for name in newest_first(store, scan(store).committed):
        if (manifest := outline_quietly(store, name)) is not None:
            return manifest.step
    return _NONE
