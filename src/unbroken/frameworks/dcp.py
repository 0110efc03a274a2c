"""Torch's Distributed Checkpoint (DCP) as the checkpoints of a run: for loops that call ``dcp.save`` and ``dcp.load``.

    with unbroken_dcp.Checkpoints("out", save_steps=100) as checkpoints:
        if checkpoints.path:
            dcp.load(state, storage_reader=checkpoints.reader())
        for step in range(checkpoints.step + 1, 1001):
            train(step)
            if checkpoints.step_done(step):
                dcp.save(state, storage_writer=checkpoints.writer(step))
            if checkpoints.is_stopping:
                break

A checkpoint is written into a draft, digested and committed by one rename; the newest usable one is chosen; lease,
records, stop requests, keep rules, mirrors and drills are those of every run. The state dict is the script's own.
"""

from os import PathLike
from pathlib import Path
from typing import Unpack

import torch

from unbroken.errors import DamagedCheckpoint
from unbroken.files import LOCAL
from unbroken.frameworks.dcp_storage import ORIGIN, Source, SourceReader, Writer
from unbroken.frameworks.options import LoopOptions
from unbroken.frameworks.own_loop import OwnLoop
from unbroken.quoting.log import logger
from unbroken.store.directory import Store
from unbroken.store.foreign import DCP_METADATA
from unbroken.store.names import MANIFEST
from unbroken.store.references import resolve_checkpoint

__all__ = ["Checkpoints", "Reader", "Writer"]

_log = logger(__name__)


class Reader(SourceReader):
    """Reads a checkpoint for ``dcp.load`` without a run: for an evaluation, an export, another training.

    Every block is verified before it is used. Only what the state dict asks for is loaded.

    Args:
        reference: the folder of a checkpoint; a run, for its newest checkpoint; or ``RUN@1000``.

    Raises:
        UnbrokenError: there is no such checkpoint, or its index is damaged.
    """

    def __init__(self, reference: str | PathLike[str]) -> None:
        super().__init__(Source(*resolve_checkpoint(str(reference))), partial=True)


class Checkpoints(OwnLoop):
    """The checkpoints of a training that calls ``dcp.save`` and ``dcp.load``. Made on all ranks.

    It takes the run and chooses the newest checkpoint whose checksums all verify; a warning names each torn or damaged
    one that is skipped. Signals become stop requests at the first ``step_done``.

    Args:
        directory: the run. It contains the checkpoints as ``checkpoint-100``, or as ``checkpoint_id`` names them.
        resume: another checkpoint to go back to: its step or its name. This happens once.
        options: how the run is saved, kept and stopped: ``LoopOptions``.

    Raises:
        RunHeld: another job trains into this directory.
        NoUsableCheckpoint: there are checkpoints, and none can be used.
        UnbrokenError: storage or a mirror refused.
    """

    _position = "unless the state dict contains the loader (StatefulDataLoader), the script has to skip the batches of"

    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        resume: str | int | None = None,
        **options: Unpack[LoopOptions],
    ) -> None:
        super().__init__(
            directory,
            options,
            resume=resume,
            require=_require_dcp,
            origin=ORIGIN,
            version=f"torch {torch.__version__}",
            position=self._position,
        )

    def step_done(self, step: int, **metrics: object) -> bool:
        """Say that a step is complete. Collective.

        Args:
            step: its number, from 1 on.
            metrics: values of the step for the records, each a number or a tensor with one element.

        Returns:
            Whether to save now: a save is due, or the job has to stop.

        Raises:
            StartsOver: the checkpoint was not loaded, or steps are counted from the start again.
            LeaseLost: another job has taken the run.
            PeerLost: another rank is gone.
        """
        return self._edge(step, metrics)

    def reader(self, *, partial: bool = False) -> SourceReader:
        """The reader of the chosen checkpoint, for ``dcp.load``.

        Args:
            partial: allow a state dict that asks for less than was saved; without it, such a load is refused.

        Raises:
            ValueError: there is none: the run starts at step 0.
            DamagedCheckpoint: its index was damaged since it was chosen.
        """
        path, manifest = self._point.path, self._point.manifest
        if path is None or manifest is None:
            raise ValueError("the run has no checkpoint yet: ask for a reader where `path` is not None")
        source = Source(Store(path.parent, LOCAL), path.name, manifest)
        return SourceReader(source, partial=partial, loaded=self._note_loaded)

    def _note_loaded(self) -> None:
        self._is_loaded = True

    def writer(self, step: int | None = None) -> Writer:
        """A writer for ``dcp.save`` or ``dcp.async_save``; all ranks make one.

        Args:
            step: the step that is saved; None if ``checkpoint_id`` states it, as in ``out/step-200``.

        Raises:
            StartsOver: the checkpoint that the run has was not loaded.
        """
        run = self._open_run
        if self._point.manifest is not None and not self._is_loaded:
            self._require_loaded(self._step + 1)
        # Before the checkpoint exists: what a resume from there does not compute again must be in the records.
        run.recorder.flush(durable=True)
        run.clock.save_started()
        return Writer(run, lambda saved: self._folder(saved, {}), step)


def _require_dcp(path: Path) -> None:
    """Pass if a folder is a checkpoint of DCP whose bytes can be verified.

    Raises:
        DamagedCheckpoint: it has no index, or no manifest.
    """
    for name, why in ((DCP_METADATA, "it is not a checkpoint of torch's DCP"), (MANIFEST, "seal it first")):
        if LOCAL.find(path / name) is None:
            raise DamagedCheckpoint(path=path, findings=(f"{name}: is missing; {why}",))
