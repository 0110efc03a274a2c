"""Weights & Biases: one run of a fixed id, which every job resumes.

Offline, wandb writes its file in blocks of 32 KiB: a killed job loses the steps of its last block, though ``log`` had
returned. So the last stored step is read from the file. Online, the service returns it.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import wandb
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from unbroken.records.metrics import Row
from unbroken.trackers.tracker import Ending, TrackedRun

# A larger file is not read: then what was written down counts.
_MOST_BYTES: Final = 1 << 28


class WandbTracker:
    """Shows a run in a project of wandb; wandb's own variables set the account and the server."""

    def __init__(self, project: str) -> None:
        self._project = project
        self._run: Any = None
        self._shown: int | None = None

    @property
    def name(self) -> str:
        """The project is part of it."""
        return f"wandb:{self._project}" if self._project else "wandb"

    def start(self, run: TrackedRun) -> None:
        """Start or resume the run; ``wandb.run`` of the script, if there is one, is left alone."""
        folder = os.environ.get("WANDB_DIR") or str(run.directory)
        # Before a new file of the same run is begun.
        self._shown = last_step_in(Path(folder) / "wandb", run.id)
        self._run = wandb.init(
            project=self._project or None,
            name=None if run.is_resumed else run.name,
            id=run.id,
            resume="allow",
            dir=folder,
            config=dict(run.config),
            reinit="create_new",
            # The process to watch is that of the training, which started this one; what it prints stays its own.
            settings=wandb.Settings(console="off", x_stats_pid=os.getppid()),
        )
        if not self._run.offline and self._run.starting_step > 0:
            self._shown = self._run.starting_step - 1
        elif not self._run.offline:
            self._shown = None

    def last_step(self) -> int | None:
        """The last step that was stored when the run was started."""
        return self._shown

    def log(self, rows: Sequence[Row]) -> None:
        """Hand the steps to wandb's own process."""
        for row in rows:
            # Committed: else the last step waits for the next one, and a kill loses it.
            self._run.log(dict(row.values), step=row.step, commit=True)

    def finish(self, ending: Ending) -> None:
        """Wait until wandb has stored everything."""
        if ending == "stopped" and not self._run.offline:
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if ending == "completed" else 1)


def make(target: str) -> WandbTracker:
    """The tracker of a project; empty for wandb's default."""
    return WandbTracker(target)


# ---- wandb's offline files ----

_MAGIC_BYTES: Final = 7
_BLOCK_BYTES: Final = 1 << 15
_HEAD: Final = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def last_step_in(folder: Path, run_id: str) -> int | None:
    """The last step in the offline files of a run, -1 if they have none; None if there are no files to read."""
    files = sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    if not files or sum(file.stat().st_size for file in files) > _MOST_BYTES:
        return None
    return max((step for file in files for step in steps_in(file)), default=-1)


def steps_in(file: Path) -> Iterator[int]:
    """The steps in one offline file; a kill may have cut off its end."""
    for data in _records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            yield record.history.step.num


def _records(data: bytes) -> Iterator[bytes]:
    at, parts = _MAGIC_BYTES, list[bytes]()
    while at + _HEAD.size <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEAD.size:
            at += left
            continue
        _, length, kind = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        part = data[at : at + length]
        at += length
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or len(part) < length:
            return
        parts = [part] if kind in (_WHOLE, _FIRST) else [*parts, part]
        if kind in (_WHOLE, _LAST):
            yield b"".join(parts)
