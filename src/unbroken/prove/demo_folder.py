"""The folder a demo is kept in: whose it may be, and how an earlier demo in it gives way to a new one.

Promises that nothing is ever removed that a demo did not make, nor anything that another demo is at work on.
"""

import secrets
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from unbroken import amounts
from unbroken.disk import NodeKind
from unbroken.errors import BadUsage, StorageFailed
from unbroken.errors.tree import quoted
from unbroken.files import LOCAL, Files
from unbroken.prove.demo_plan import NEEDED_BYTES, Places, config_text
from unbroken.run.lease import DIRECTORY as LEASES
from unbroken.run.lease import Holder, ProcessOf, acquire

COMMAND: Final = "unbroken demo"


def fresh_folder() -> Path:
    """A new temporary folder, which nobody removes: it is there to be looked at.

    Raises:
        StorageFailed: the system refused.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="unbroken-demo-"))
    except OSError as refusal:
        where = Path(refusal.filename or ".")
        raise StorageFailed(operation="make", path=where, cause=refusal.strerror or str(refusal)) from refusal


def prepare(
    folder: Path,
    *,
    holder: Holder,
    now_s: float,
    process_of: ProcessOf,
    files: Files = LOCAL,
) -> Places:
    """Make the demo's folder ready: a new or an empty one, or that of an earlier demo, which is begun anew.

    Args:
        folder: where to keep the demo.
        holder: who runs it.
        now_s: seconds since 1970.
        process_of: as ``lease.acquire`` takes it: whether another demo's process still lives.
        files: the storage.

    Raises:
        BadUsage: it is a file, or holds other things.
        RunHeld: another demo is at work in it.
        StorageFailed: the system refused, or the disk has no room for the demo.
    """
    places = Places(folder.resolve())
    _require_own(places, folder, files)
    files.make_directory(places.folder)
    free_bytes = files.space(places.folder).free_bytes
    if free_bytes < NEEDED_BYTES:
        cause = f"it needs {amounts.size(NEEDED_BYTES)}, and {amounts.size(free_bytes)} are free"
        raise StorageFailed(operation="hold the demo", path=places.folder, cause=cause)
    # What is removed below must not be what another demo is at work on.
    acquire(places.folder, holder, token=secrets.token_hex(4), now_s=now_s, process_of=process_of, files=files)
    for path in places.made():
        # crash here: less of an earlier demo; the lease says whose folder it is.
        files.remove_tree(path)
    # crash here: a folder with a lease and no config; the next demo takes it for its own.
    files.replace(places.config, config_text(places).encode(), scratch=places.scratch.name, durable=False)
    return places


def _require_own(places: Places, asked: Path, files: Files) -> None:
    """Pass if a folder is a demo's own, empty, or not there: nothing of anybody else is ever removed."""
    found = files.find(places.folder)
    if found is None:
        return
    if found.kind is not NodeKind.DIRECTORY:
        raise BadUsage(command=COMMAND, complaint=f"--dir is a file and not a folder: {asked}")
    names = {node.name for node in files.list_directory(places.folder)}
    others = names - {LEASES, places.scratch.name} - {path.name for path in places.made()}
    if others or (names and LEASES not in names):
        held = ", ".join(sorted(others or names)[:3])
        complaint = f"--dir is a folder that holds other things ({held}); the demo wants one of its own: {asked}"
        raise BadUsage(command=COMMAND, complaint=complaint)


def called() -> str:
    """How this very program is called, in the fewest words that work when pasted."""
    beside = Path(sys.executable).parent / "unbroken"
    found = shutil.which("unbroken")
    if found is not None and Path(found).resolve() == beside.resolve():
        return "unbroken"
    return quoted(beside) if beside.exists() else f"{quoted(sys.executable)} -m unbroken"
