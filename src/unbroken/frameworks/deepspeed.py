"""Runs for DeepSpeed engines in every ZeRO stage: ``save_checkpoint`` and ``load_checkpoint`` through a store.

    with unbroken_ds.Checkpoints(engine, "out", save_steps=100) as checkpoints:
        client_state = checkpoints.load()
        while engine.global_steps < 1000:
            loss = engine(batch(engine.global_steps))
            engine.backward(loss)
            engine.step()
            if checkpoints.step_done(loss=loss):
                checkpoints.save(client_state={...})
            if checkpoints.is_stopping:
                break

The engine writes into a draft. After the files of all ranks are digested, one rename makes it ``checkpoint-100``. The
RNG states of each rank are saved and restored too. A call that some ranks do not make raises an error instead of
waiting.
"""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final, Unpack

import torch
from deepspeed import DeepSpeedEngine
from deepspeed import __version__ as deepspeed_version

from unbroken.errors import DamagedCheckpoint, StorageError, UnbrokenError
from unbroken.files import LOCAL
from unbroken.frameworks.epoch_rng import packed, read_rng, rng_name
from unbroken.frameworks.folders import write_latest
from unbroken.frameworks.options import LoopOptions
from unbroken.frameworks.own_loop import OwnLoop, meet
from unbroken.frameworks.zero_engine import coming_bytes, is_accumulating
from unbroken.quoting.log import logger
from unbroken.state.rng import capture_rng, restore_rng, rng_devices
from unbroken.store.names import MANIFEST, scratch
from unbroken.tested_versions import minor_version

__all__ = ["Checkpoints"]

_log = logger(__name__)
TESTED: Final = ("0.19",)
ORIGIN: Final = "deepspeed"
_MICRO_STEPS: Final = "micro_steps"


class Checkpoints(OwnLoop):
    """The checkpoints of a DeepSpeed engine. Made on all ranks, after ``deepspeed.initialize``.

    It takes the run and chooses the newest checkpoint whose bytes all verify.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        directory: the run. Its checkpoints stand there, and ``checkpoint-100`` is their tag.
        resume: another checkpoint to go back to: its step or its name. That happens once.
        rank_wait_seconds: How long ``save`` and ``load`` wait for the ranks that have not called them.
        options: how it is saved, kept and stopped: ``LoopOptions``.

    Raises:
        RunHeld: another job trains into this directory.
        NoUsableCheckpoint: there are checkpoints, and none can be used.
        UnbrokenError: storage or a mirror refused.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        directory: str | PathLike[str],
        *,
        resume: str | int | None = None,
        rank_wait_seconds: float = 60.0,
        **options: Unpack[LoopOptions],
    ) -> None:
        self._engine: Any = engine
        self._meet_s, self._meetings = rank_wait_seconds, 0
        version = f"deepspeed {deepspeed_version}"
        super().__init__(directory, options, resume=resume, require=_require_deepspeed, origin=ORIGIN, version=version)
        if self._open_run.world.is_first and minor_version(deepspeed_version) not in TESTED:
            _log.warning("%s was not tested with unbroken (tested: %s)", version, ", ".join(TESTED))

    # ---- the loop ----

    def load(self) -> Mapping[str, Any] | None:
        """Load the chosen checkpoint into the engine; its client state, or None where the run starts at step 0.

        All ranks call it, before the first step.

        Raises:
            NotAllRanks: a rank did not call it.
            NotExact: another number of ranks or another ZeRO stage, and not accepted.
            DamagedCheckpoint: the engine did not load it.
        """
        run, path, manifest = self._open_run, self._point.path, self._point.manifest
        self._meet("load")
        if path is None or manifest is None:
            return None
        run.require_same(manifest.metadata, {"world_size": run.world.size, **self._facts()})
        loaded, client_state = self._engine.load_checkpoint(str(path.parent), tag=path.name)
        if loaded is None or self._engine.global_steps != manifest.step:
            finding = f"the engine is at step {self._engine.global_steps:,} after loading step {manifest.step:,}"
            raise DamagedCheckpoint(path=path, findings=(finding,))
        # The engine restores its steps and starts to count the micro-batches over.
        self._engine.micro_steps = manifest.metadata.get(_MICRO_STEPS, self._engine.micro_steps)
        saved = run.world.all_or_none(lambda: read_rng(path, run.world.rank))
        if saved is not None:
            restore_rng(saved["rng"])
            self._watch_rng()
        self._is_loaded = True
        return dict(client_state)

    def _watch_rng(self) -> None:
        """Warn if the script draws random numbers before its first step: a new iterator of a loader does."""
        restored = torch.get_rng_state()

        def look(engine: object, batch: object) -> None:
            hook.remove()
            if torch.equal(restored, torch.get_rng_state()):
                return
            self._open_run.recorder.event("data", notices=["draws from the global RNG before the first step"])
            if self._open_run.world.is_first:
                _log.warning(
                    "random numbers were drawn from torch's global RNG between load() and the first step, as by "
                    "iter(loader): not exact where a job without interruption draws none there; "
                    "give the loader a generator of its own"
                )

        hook = self._engine.register_forward_pre_hook(look)

    def _facts(self) -> dict[str, object]:
        return {"zero_stage": self._engine.zero_optimization_stage()}

    def step_done(self, **metrics: object) -> bool:
        """``engine.step()`` was called; whether to save now: it is due, or the job has to stop. Collective.

        Where the engine is still accumulating gradients, nothing happens.

        Args:
            metrics: values of the step for the records, each a number or a tensor with one element.

        Raises:
            StartsOver: the run has a checkpoint and ``load`` was not called.
            LeaseLost: another job has taken the run.
            PeerLost: another rank is gone.
        """
        step = int(self._engine.global_steps)
        return step != self._step and self._edge(step, metrics)

    def save(self, client_state: Mapping[str, Any] | None = None) -> str | None:
        """Save the step that is done; the name of the checkpoint, or None if storage refused. All ranks call it.

        A refusal is recorded, and training can continue: the last commit is intact. It is raised if the job has to
        stop.

        Args:
            client_state: what the script wants back from ``load``.

        Raises:
            ValueError: the engine is accumulating gradients, which it does not save.
            NotAllRanks: a rank did not call it.
            StartsOver: the run has a checkpoint and ``load`` was not called.
            StorageError: storage refused the last save of this job.
            LeaseLost: another job has taken the run.
        """
        run, step = self._open_run, int(self._engine.global_steps)
        if is_accumulating(self._engine):
            raise ValueError("save where a step is complete: DeepSpeed saves no gradients that are being accumulated")
        if self._point.manifest is not None and not self._is_loaded:
            self._require_loaded(step)
        self._meet("save")
        run.recorder.flush(durable=True)
        run.clock.save_started()
        staged = run.stage(step, coming_bytes=coming_bytes(self._engine))
        if isinstance(staged, StorageError):
            return self._go_on_after(staged)
        folder = self._folder(step, {**self._facts(), _MICRO_STEPS: self._engine.micro_steps})
        # Without its `latest`: the draft is not where that would point to.
        self._engine.save_checkpoint(
            str(staged), tag=folder.name, client_state=dict(client_state or {}), save_latest=False
        )
        rng = {"rng": capture_rng(rng_devices())}
        place = staged / folder.name / rng_name(run.world.rank)
        run.world.all_or_none(lambda: run.store.files.write_new(place, [packed(rng)]))
        run.world.from_first(lambda: self._copy_scripts(staged))
        done = run.publish(folder, is_staged=True)
        if done.error is not None:
            return self._go_on_after(done.error)
        run.world.from_first(lambda: write_latest(run.store, done.name or "", job=run.lease.job))
        return done.name

    def _go_on_after(self, error: UnbrokenError) -> str | None:
        """No checkpoint has come of a save; the last one of a job must not fail unnoticed."""
        if self._stop is not None:
            raise error
        return None

    def _copy_scripts(self, staged: Path) -> None:
        """Keep the converters that the engine puts beside its checkpoints."""
        run = self._open_run
        for script in sorted(staged.glob("*.py")):
            run.store.files.replace(
                run.store.path(script.name), script.read_bytes(), scratch=scratch(run.lease.job, script.name)
            )

    # ---- all ranks ----

    def _meet(self, what: str) -> None:
        """Wait for the other ranks, but not for ever: alone, the engine would.

        Raises:
            NotAllRanks: one did not come.
        """
        self._meetings += 1
        meet(self._open_run.world, what, number=self._meetings, longest_s=self._meet_s)


def _require_deepspeed(path: Path) -> None:
    """Pass if a folder is a checkpoint of DeepSpeed whose bytes can be verified.

    Raises:
        DamagedCheckpoint: it has no model states, or no manifest.
    """
    if not any(path.glob("*_model_states.pt")):
        finding = "no file *_model_states.pt: it is not a checkpoint of DeepSpeed"
        raise DamagedCheckpoint(path=path, findings=(finding,))
    if LOCAL.find(path / MANIFEST) is None:
        raise DamagedCheckpoint(path=path, findings=(f"{MANIFEST}: is missing; seal it first",))
