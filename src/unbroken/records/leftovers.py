"""Scratch files that crashes have left in a run's directory, beside the records they were to replace.

Those in the store are the store's to sweep. A scratch file of a job goes once that job can no longer write; one of a
command, which holds no lease, once it is a day old: writing it takes milliseconds. Files of other names stay.
"""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from unbroken.disk import NodeKind
from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.records.layout import Layout
from unbroken.records.lease import DIRECTORY as LEASES
from unbroken.records.lease import number_of
from unbroken.store.dumps import FOLDER as EMERGENCIES
from unbroken.store.names import is_leased, scratch_owner

_COMMAND_DONE_S: Final = 86_400.0
# Where a run has records that are replaced, below its directory.
_FOLDERS: Final = ("", LEASES, EMERGENCIES, "tokenizer")


def left_scratch(
    layout: Layout, *, is_live: Callable[[str], bool], now_s: float, further: Iterable[Path] = (), files: Files = LOCAL
) -> list[Path]:
    """The scratch files that no process will rename any more; ``is_live`` says of a job whether it may still write.

    Raises:
        StorageFailed: an I/O error.
    """
    found = []
    for folder in (*(layout.run / name for name in _FOLDERS), *further):
        status = files.find(folder)
        if status is None or status.kind is not NodeKind.DIRECTORY:
            continue
        for node in files.list_directory(folder):
            owner = scratch_owner(node.name) if node.kind is NodeKind.FILE else None
            if owner is not None and _is_left(folder / node.name, owner, is_live, now_s, files):
                found.append(folder / node.name)
    return found


def _is_left(path: Path, owner: str, is_live: Callable[[str], bool], now_s: float, files: Files) -> bool:
    if is_leased(owner):
        return not is_live(owner)
    status = files.find(path)
    return status is not None and now_s - status.modified_ns / 1e9 > _COMMAND_DONE_S


def sweep_scratch(
    layout: Layout, *, holder: int, now_s: float, further: Iterable[Path] = (), files: Files = LOCAL
) -> None:
    """Remove what jobs before this one have left; ``holder`` is the number of the job that holds the run now.

    What cannot be listed or removed is left for the next job: it does no harm.
    """
    with contextlib.suppress(StorageFailed):
        left = left_scratch(
            layout,
            is_live=lambda job: (number_of(job) or 0) >= holder,
            now_s=now_s,
            further=further,
            files=files,
        )
        for path in left:
            # crash here: fewer scratch files, which no reader looks at.
            files.remove_file(path)
