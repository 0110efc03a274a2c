"""torchtitan's ``CheckpointManager`` with the checkpoints of a run: one import in the config registry.

    from unbroken.frameworks.torchtitan import CheckpointManager

    checkpoint = CheckpointManager.Config(enable=True, interval=500)

It writes and reads torchtitan's own folders ``step-N`` through the writer and the reader of ``dcp``. ``save``, which
torchtitan calls after every step, is the edge at which a stop is answered: it saves and raises ``SystemExit``, upon
which ``Trainer.train`` returns. With ``enable=False`` or ``load_only=True`` it is torchtitan's own and takes no run.
"""

import sys
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
import torch.distributed.checkpoint as dcp
import torchtitan
from torchtitan.components import checkpointer
from torchtitan.components.checkpointer import MODEL, AsyncMode
from torchtitan.tools.filesystem import is_remote
from torchtitan.tools.utils import GarbageCollection

from unbroken.frameworks.dcp import Checkpoints
from unbroken.quoting.log import logger
from unbroken.tested_versions import minor_version
from unbroken.world import is_first_process

__all__ = ["CheckpointManager"]

_log = logger(__name__)
TESTED: Final = ("0.3",)


class _WithLoader(Checkpoints):
    """Torchtitan saves its data loader with the rest."""

    _position = ""


class CheckpointManager(checkpointer.CheckpointManager):  # type: ignore[misc] # torchtitan has no types
    """torchtitan's manager; each checkpoint is committed by one rename, verified before it is loaded, and mirrored.

    Attributes:
        run: The ``Checkpoints`` of the run; None with ``enable=False`` or ``load_only=True``.
    """

    run: Checkpoints | None = None
    _is_closed = False

    @dataclass(kw_only=True, slots=True)
    class Config(checkpointer.CheckpointManager.Config):  # type: ignore[misc] # torchtitan has no types
        """torchtitan's options, and those of the run; each means what ``unbroken.Settings`` says of it.

        ``keep_latest_k`` is carried out by the run: an old checkpoint is deleted after a new one is committed.
        ``load_step`` goes back to a step once: a later job with the same value continues from the newest.

        Attributes:
            last_save_model_only: False, and refused if True: the last checkpoint is one to resume from.
            mirror: A second store, to which every checkpoint is copied beside training.
            max_runtime_seconds: Walltime of one job; None: ``SLURM_JOB_END_TIME``, else ``UNBROKEN_MAX_RUNTIME``.
            spot: Save and stop when this cloud reclaims the machine.
            keep_milestone_every: Keep every checkpoint whose step is a multiple of this.
            keep_every_seconds: Keep one checkpoint per this many seconds.
        """

        last_save_model_only: bool = False
        mirror: str | None = None
        max_runtime_seconds: float | None = None
        spot: Literal["aws", "gcp", "azure", "auto", "off"] | None = None
        keep_milestone_every: int | None = None
        keep_every_seconds: float | None = None

    def __init__(self, config: Config, **parts: Any) -> None:  # noqa: ANN401 - torchtitan's own
        """Take the run and choose its newest checkpoint whose bytes all verify.

        Raises:
            ValueError: an option of torchtitan does not go with a run.
            RunHeld: another job trains into this folder.
            NoUsableCheckpoint: there are checkpoints, and none can be used.
            UnbrokenError: storage or a mirror refused.
        """
        if not config.enable or config.load_only:
            super().__init__(config, **parts)
            return
        _require_usable(config)
        # The run deletes old checkpoints. Torchtitan's thread would not ask whether the new one is committed.
        without_limit: Any = replace(config)
        without_limit.keep_latest_k = 0
        super().__init__(without_limit, **parts)
        self._asked_step = config.load_step
        self.run = _WithLoader(
            self.folder,
            resume=None if config.load_step == -1 else config.load_step,
            keep_last_k=config.keep_latest_k or None,
            keep_milestone_every=config.keep_milestone_every,
            keep_every_seconds=config.keep_every_seconds,
            mirror=config.mirror,
            max_runtime_seconds=config.max_runtime_seconds,
            spot=config.spot,
        )
        if is_first_process() and minor_version(torchtitan.__version__) not in TESTED:
            tested = ", ".join(TESTED)
            _log.warning("torchtitan %s was not tested with unbroken (tested: %s)", torchtitan.__version__, tested)

    def __del__(self) -> None:
        """Close what torchtitan has opened; the run of a manager that nobody closed is ended with its error later."""
        if getattr(self, "enable", False):
            super()._close()

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | None:
        """Save as torchtitan does, through the writer of the run.

        Raises:
            ValueError: the format of Hugging Face was asked for, which no job can resume from.
            UnbrokenError: nothing was committed; torch raises it on every rank.
        """
        if to_hf:
            raise ValueError("to_hf=True saves weights alone: convert the last checkpoint of the run instead")
        run = self._open_run
        done: Any = None
        if async_mode is AsyncMode.ASYNC:
            done = dcp.async_save(
                state_dict, storage_writer=run.writer(), checkpoint_id=checkpoint_id, process_group=self.pg
            )
        else:
            dcp.save(state_dict, storage_writer=run.writer(), checkpoint_id=checkpoint_id)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        found: Future[Any] | None = done
        return found

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load as torchtitan does; a checkpoint of the run through its reader, which verifies every block.

        Raises:
            UnbrokenError: the checkpoint is damaged, or has more than the state asks for.
        """
        if self.run is None or self.run.path is None:
            # From elsewhere: ``initial_load_path``, or the weights of Hugging Face.
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        # Of a seed checkpoint, at step 0, torchtitan loads the weights alone.
        is_partial = bool(self.exclude_from_loading) or self.run.step == 0
        dcp.load(state_dict, storage_reader=self.run.reader(partial=is_partial), checkpoint_id=checkpoint_id)
        self.states[MODEL].load_state_dict(state_dict)

    @property
    def _open_run(self) -> Checkpoints:
        if self.run is None:
            raise RuntimeError("this CheckpointManager has no run: enable=False or load_only=True")
        return self.run

    # ---- what torchtitan gives subclasses to override ----

    def _load(self, step: int = -1) -> bool:
        run = self.run
        if run is None or run.path is None:
            return bool(super()._load(step))
        if step not in (-1, self._asked_step, run.step):
            raise ValueError(f"the run continues from step {run.step:,}: set load_step={step} in the config")
        return bool(super()._load(run.step))

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        run = self.run
        if run is None or curr_step == 0:
            # A seed checkpoint is made before any step.
            return bool(super()._save(curr_step, last_step))
        is_due = run.step_done(curr_step)
        is_saved = bool(super()._save(curr_step, last_step or is_due))
        if run.is_stopping and not last_step:
            raise SystemExit(0)
        return is_saved

    def _close(self) -> None:
        super()._close()
        if self.run is not None and not self._is_closed:
            self._is_closed = True
            # Closed where an error is handled, the job ends with that error.
            error = sys.exception()
            self.run.__exit__(type(error) if error is not None else None, error, None)


def _require_usable(config: CheckpointManager.Config) -> None:
    if config.async_mode == "async_with_pinned_mem":
        raise ValueError(
            "async_mode='async_with_pinned_mem' saves from a process that does not hold the run: use 'async'"
        )
    if config.last_save_model_only:
        raise ValueError(
            "last_save_model_only=True ends the run with a checkpoint that cannot be resumed from: unset it, and "
            "convert the last checkpoint"
        )
    if is_remote(config.folder):
        raise ValueError(f"{config.folder} is not a directory: train into one, and set mirror={config.folder!r}")
