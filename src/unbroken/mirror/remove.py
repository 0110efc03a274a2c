"""Removing checkpoints from a mirror: the manifest first, so that each stops existing in one instant."""

from collections.abc import Collection

from unbroken.mirror.client import Client
from unbroken.mirror.ownership import release_names
from unbroken.store.names import MANIFEST


def remove_checkpoints(client: Client, names: Collection[str]) -> None:
    """Remove checkpoints, each wholly or not at all for readers.

    Raises:
        UnbrokenError: the object store refused; what has no manifest any more is no checkpoint.
    """
    for name in names:
        remove_parts(client, name)
    release_names(client, names)


def remove_parts(client: Client, name: str) -> None:
    """Remove a checkpoint, or what there is of one, and keep the claim of its name.

    Raises:
        UnbrokenError: the object store refused; what has no manifest any more is no checkpoint.
    """
    # crash here: no manifest, so no checkpoint; its parts are removed when the same is done again.
    client.delete([f"{name}/{MANIFEST}"])
    client.delete([found.key for found in client.listing(name)])
