"""Checkpoints to be mirrored, made without torch."""

import time
from collections.abc import Mapping
from pathlib import Path

from unbroken.mirror.address import parse_address
from unbroken.mirror.background import Mirror
from unbroken.mirror.client import Client, open_client
from unbroken.mirror.ownership import require_own
from unbroken.mirror.remote import home_of
from unbroken.mirror.transfer import Limits
from unbroken.mirror.upload import upload_checkpoint
from unbroken.store.commit import Record, begin, commit
from unbroken.store.directory import Store
from unbroken.store.mirrored import Upload, write_mirrors

SMALL: Mapping[str, int] = {"state/a": 3_000_000, "state/deep/b": 10_000, "empty": 0, "odd name %41 ü+=": 7}
# More than one piece, so that it goes up in several.
LARGE: Mapping[str, int] = {"state/a": (33 << 20) + 5, "meta": 10}


def content(part: str, size: int, step: int) -> bytes:
    unit = f"{part} of step {step} ".encode()
    return (unit * (size // len(unit) + 1))[:size]


def saved(store: Store, step: int, parts: Mapping[str, int] = SMALL, *, job: str = "a") -> str:
    draft = begin(store, step=step, job=job)
    reports = [draft.write_part(name, [content(name, size, step)]) for name, size in parts.items()]
    record = Record(kind="periodic", saved_at_ns=time.time_ns())
    return commit(draft, plan=list(parts), parts=reports, record=record)


def run_at(path: Path) -> Store:
    return Store(path / "checkpoints")


def client_of(store: Store, url: str) -> Client:
    return open_client(home_of(parse_address(url), store))


def opened(store: Store, url: str) -> Mirror:
    """What a job does before it uploads."""
    client = client_of(store, url)
    require_own(store, client, new_id="id-of-run", job="m")
    write_mirrors(store, [url], job="m")
    return Mirror(parse_address(url), client)


def uploaded(store: Store, name: str, mirror: Mirror, limits: Limits | None = None) -> Upload:
    return upload_checkpoint(store, name, mirror.client, mirror.url, limits or Limits(), job="m", clock_ns=time.time_ns)
