"""The events of a Lightning ``Trainer`` as calls of a ``LightningJob``, for ``lightning`` and ``pytorch_lightning``.

``Events`` is a mixin for a callback of either package, ``Redirected`` for its ``CheckpointIO``; ``Sharded`` replaces
the save and load of a ``DeepSpeedStrategy``. Imports neither package.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from unbroken.errors import NoUsableCheckpoint, UnbrokenError
from unbroken.frameworks.framework_run import open_framework_run
from unbroken.frameworks.left_training import what_left
from unbroken.frameworks.lightning_job import ORIGIN, LightningJob, SaveOptions
from unbroken.frameworks.lightning_links import FILE, savers_of
from unbroken.frameworks.lightning_state import OURS
from unbroken.frameworks.options import RunOptions, settings_of
from unbroken.loop.console import show_lines
from unbroken.loop.settings import Settings
from unbroken.mirror.address import parse_address
from unbroken.mirror.client import open_client
from unbroken.mirror.remote import home_of, store_at
from unbroken.quoting.log import logger
from unbroken.records.drill import read_drill
from unbroken.records.layout import absolute_run
from unbroken.records.process import before_exit
from unbroken.records.stop import StopReason
from unbroken.store.check import Level, verify
from unbroken.store.directory import Store
from unbroken.store.scan import newest_first, scan
from unbroken.world import is_first_process

_log = logger(__name__)


class Stopped(SystemExit):
    """Raised by ``fit`` when the job has saved and stops before its target; the same command resumes it.

    It ends the process with exit code 0, so that nothing that follows ``fit`` sees a training that is not complete.
    """

    def __init__(self, reason: StopReason) -> None:
        super().__init__(0)
        self.reason = reason.sentence()

    def __str__(self) -> str:
        """Why the job stopped."""
        return self.reason


class Redirected:
    """A ``CheckpointIO`` around another one; commits to the run what a ``ModelCheckpoint`` saves."""

    def __init__(self, inner: Any, events: "Events") -> None:  # noqa: ANN401 - a CheckpointIO of either package
        self.inner, self._events = inner, events

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:  # noqa: ANN401
        """Save; called on rank 0."""

        def write(at: Path) -> None:
            self.inner.save_checkpoint(checkpoint, str(at), storage_options)

        job = self._events.job
        if job is None or "://" in str(path):
            self.inner.save_checkpoint(checkpoint, path, storage_options)
        else:
            job.write(checkpoint, Path(path), write)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ANN401
        """Load; called on every rank."""
        # The default of the inner one keeps tensors where they are; passing None would not.
        more = {} if map_location is None else {"map_location": map_location}

        def read(at: Path) -> dict[str, Any]:
            found: dict[str, Any] = self.inner.load_checkpoint(str(at), weights_only=weights_only, **more)
            return found

        return self._events.load(path, read)

    def remove_checkpoint(self, path: Any) -> None:  # noqa: ANN401
        """Remove what a ``ModelCheckpoint`` deletes; called on rank 0."""
        job = self._events.job
        if job is None or not job.remove(Path(path)):
            self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        """Lightning has ended."""
        self.inner.teardown()


class Sharded:
    """Saves and loads for a ``DeepSpeedStrategy``, whose ranks write one folder together without a ``CheckpointIO``.

    Replaces ``save_checkpoint`` and ``load_checkpoint`` of the strategy for one stage of a Trainer.
    """

    def __init__(self, strategy: Any, events: "Events") -> None:  # noqa: ANN401
        self._strategy, self._events = strategy, events

    def install(self) -> None:
        """Replace the two methods."""
        self.remove()
        self._strategy_save, self._strategy_load = self._strategy.save_checkpoint, self._strategy.load_checkpoint
        self._strategy.save_checkpoint, self._strategy.load_checkpoint = self._save, self._load

    def remove(self) -> None:
        """Restore them."""
        for name in ("save_checkpoint", "load_checkpoint"):
            vars(self._strategy).pop(name, None)

    def _save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:  # noqa: ANN401
        """Save; called on every rank."""
        # Rank 0 says where: what a callback made of its logger may differ.
        path = self._strategy.broadcast(filepath)

        def write(at: Path) -> None:
            self._strategy_save(checkpoint, str(at), storage_options)

        job = self._events.job
        if job is None or "://" in str(path):
            self._strategy_save(checkpoint, path, storage_options)
        else:
            job.write(checkpoint, Path(path), write)

    def _load(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ANN401
        """Load; called on every rank."""

        def read(at: Path) -> dict[str, Any]:
            found: dict[str, Any] = self._strategy_load(str(at), weights_only)
            return found

        return self._events.load(checkpoint_path, read)


class Observed:
    """The first of all callbacks: records the loss of a step before another callback saves the step."""

    def __init__(self, events: "Events") -> None:
        super().__init__()
        self._events = events

    def on_train_batch_end(
        self, trainer: object, pl_module: object, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """A batch is trained."""
        if self._events.job is not None:
            self._events.job.log_step(outputs)


class Events:
    """What the callbacks of both packages do; their arguments are described where they are used."""

    # Of the package that the callback belongs to.
    version = ""
    redirect: Callable[..., Any]
    observe: Callable[..., Any]
    saver: Callable[..., Any]
    # Among the checkpoint callbacks of a Trainer, the one that is no ModelCheckpoint.
    is_of_run = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_steps: int | None = None,
        keep_last_k: int = 2,
        **options: Unpack[RunOptions],
    ) -> None:
        super().__init__(dirpath=str(directory))  # type: ignore[call-arg]
        self._directory = absolute_run(str(directory))
        self._options = SaveOptions(save_steps, keep_last_k)
        known, saved = RunOptions.__optional_keys__, {"save_steps": save_steps, "keep_last_k": keep_last_k}
        self._settings = settings_of(options, known, called="Callback", **saved)
        self.job: LightningJob | None = None
        self._hint: Path | None = None
        self._savers: list[Any] = []
        self._is_over = False
        self._sharded: Sharded | None = None

    # ---- what the Trainer asks ----

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint for ``ckpt_path="last"``: the newest of the run, here or in a mirror; None without any.

        A hint: the checkpoint to load is chosen later, on all ranks, after its bytes are verified.
        """
        drill = read_drill(os.environ)
        directory = drill.directory if drill is not None and drill.directory is not None else self._directory
        self._hint = _newest_in(Store(directory), self._settings)
        return None if self._hint is None else str(self._hint)

    @property
    def best_model_path(self) -> str:
        """The one of the first ``ModelCheckpoint``; without a ``ModelCheckpoint`` the newest checkpoint."""
        if self._savers:
            return str(self._savers[0].best_model_path)
        newest = _newest_in(Store(self._directory), None)
        return "" if newest is None else str(newest / FILE)

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        # Lightning tells the first checkpoint callback what the processes that it has started have come to.
        if self._savers:
            self._savers[0].best_model_path = path

    @property
    def last_model_path(self) -> str:
        """As ``best_model_path``."""
        return str(self._savers[0].last_model_path) if self._savers else self.best_model_path

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a ModelCheckpoint has
            """An attribute of the first ``ModelCheckpoint``: scripts read all ``trainer.checkpoint_callbacks``."""
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(self._savers[0] if self._savers else self.saver(), name)

    def load(self, path: object, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Read a checkpoint: the one that the run chose if this is a resume, otherwise the requested one, verified."""
        if self.job is not None:
            try:
                return self.job.load(Path(str(path)), self._hint, read)
            except UnbrokenError as refused:
                self._leave(refused)
                raise
        folder = Path(str(path)).resolve()
        folder = folder.parent if folder.name == FILE else folder
        if (folder / FILE).exists():
            _require_sound(folder)
            return read(folder / FILE)
        return read(Path(str(path)))

    # ---- the Trainer's events ----

    def setup(self, trainer: Any, pl_module: object, stage: str) -> None:  # noqa: ANN401
        """The ranks are there, and nothing is loaded yet."""
        self._sharded = _sharded(trainer.strategy, self)
        if stage == "fit":
            _require_plain(trainer.callbacks, self._inner(trainer))
        trainer.strategy.checkpoint_io = self.redirect(self._inner(trainer), self)
        if self._sharded is not None:
            self._sharded.install()
        # Last of all: what the others do at the edge of a step is then in the checkpoint of that step.
        trainer.callbacks = [self.observe(self), *self._others(trainer), self]
        self._savers = savers_of(trainer)
        if stage != "fit" or trainer.fast_dev_run:
            return
        for other in [each for each in _open if each is self or each._directory == self._directory]:
            other._abandon()
        hide = show_lines(is_wanted=self._settings.console, is_first=is_first_process())
        try:
            run = open_framework_run(self._directory, _settings_of(self._settings, self._savers), origin=ORIGIN)
        except BaseException:
            hide()
            raise
        self.job = LightningJob(run, trainer, self._options, hide)
        _open.add(self)

    def _others(self, trainer: Any) -> list[Any]:  # noqa: ANN401
        return [each for each in trainer.callbacks if each is not self and not isinstance(each, Observed)]

    def _inner(self, trainer: Any) -> Any:  # noqa: ANN401
        found = trainer.strategy.checkpoint_io
        return found.inner if isinstance(found, Redirected) else found

    def on_load_checkpoint(self, trainer: object, pl_module: object, checkpoint: dict[str, Any]) -> None:
        """The checkpoint is read, and the callbacks are about to get their states."""
        if self.job is not None:
            self.job.place_states(checkpoint)
            if self._sharded is not None:
                # Lightning gives each callback its state, this one as the last.
                checkpoint.setdefault("callbacks", {})[self.state_key] = {OURS: True}  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: object, pl_module: object) -> None:
        """Weights and callbacks are restored; with ``Sharded`` they are restored after this event."""
        if self._sharded is None:
            self._begin()
            self._look_before_restore(trainer)

    def _look_before_restore(self, trainer: Any) -> None:  # noqa: ANN401
        """Let the job see the optimizers as the script has constructed them: Lightning has no event there."""
        strategy, job = trainer.strategy, self.job
        if job is None:
            return
        load = strategy.load_optimizer_state_dict

        def load_optimizer_state_dict(checkpoint: Any) -> None:  # noqa: ANN401
            job.note_script()
            load(checkpoint)

        strategy.load_optimizer_state_dict = load_optimizer_state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """All other callbacks are restored."""
        self._begin()

    def _begin(self) -> None:
        if self.job is not None and not self.job.has_begun:
            self._leaving(lambda job: job.begin(self.version))

    def on_train_start(self, trainer: object, pl_module: object) -> None:
        """The loops are restored, and the first batch is about to be fetched."""
        self._begin()
        if self.job is not None:
            self._leaving(lambda job: job.begin_training(pl_module))

    def on_train_epoch_start(self, trainer: object, pl_module: object) -> None:
        """An epoch begins, and its first batch is about to be fetched."""
        if self.job is not None:
            self._leaving(lambda job: job.begin_epoch())

    def _leaving(self, action: Callable[[LightningJob], object]) -> None:
        try:
            if self.job is not None:
                action(self.job)
        except (UnbrokenError, ValueError) as refused:
            self._leave(refused)
            raise

    def on_save_checkpoint(self, trainer: object, pl_module: object, checkpoint: dict[str, Any]) -> None:
        """Lightning is about to write; called on every rank."""
        if self.job is not None:
            self.job.describe(checkpoint)

    def on_train_batch_end(
        self, trainer: object, pl_module: object, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """A batch is trained."""
        if self.job is not None:
            self._is_over = self.job.end_batch()

    def on_train_batch_start(self, trainer: object, pl_module: object, batch: object, batch_idx: int) -> None:
        """A batch is about to be trained; a stop waits until here, because Lightning logs a step after its end."""
        if self._is_over and self.job is not None and self.job.stop is not None:
            raise Stopped(self.job.stop)

    def on_validation_end(self, trainer: Any, pl_module: object) -> None:  # noqa: ANN401
        """A validation is over."""
        if self.job is not None and not trainer.sanity_checking:
            self.job.log_validation()
            self._is_over = self.job.end_pause() or self._is_over

    def on_train_epoch_end(self, trainer: object, pl_module: object) -> None:
        """An epoch is over."""
        if self.job is not None:
            self.job.end_epoch(pl_module)
            self._is_over = self.job.end_pause() or self._is_over

    def on_fit_end(self, trainer: object, pl_module: object) -> None:
        """The training has reached its end."""
        if self.job is not None:
            self.job.end_untrained(pl_module)
            self._leave(self.job.ending())

    def on_exception(self, trainer: object, pl_module: object, exception: BaseException) -> None:
        """The training is left by an exception, a stop of ours among them."""
        stop = self.job.stop if self.job is not None and isinstance(exception, Stopped) else None
        self._leave(stop or exception)

    def teardown(self, trainer: Any, pl_module: object, stage: str) -> None:  # noqa: ANN401
        """Restore the Trainer."""
        trainer.strategy.checkpoint_io = self._inner(trainer)
        vars(trainer.strategy).pop("load_optimizer_state_dict", None)
        if self._sharded is not None:
            self._sharded.remove()
        trainer.callbacks = [*self._others(trainer), self]

    # ---- ending ----

    def _leave(self, ending: StopReason | BaseException) -> None:
        job, self.job, self._is_over = self.job, None, False
        _open.discard(self)
        if job is not None:
            job.leave(ending)

    def _abandon(self) -> None:
        """End a job whose training ended without an event."""
        if self.job is not None:
            self._leave(what_left(self.job.step))


def _sharded(strategy: Any, events: Events) -> Sharded | None:  # noqa: ANN401
    """What saves with a strategy whose ranks write together; None for one that uses a CheckpointIO.

    Raises:
        ValueError: a strategy whose checkpoints could not be committed, or not be resumed.
    """
    if not getattr(strategy, "restore_checkpoint_after_setup", False):
        return None
    if not _is_a("DeepSpeedStrategy", strategy):
        raise ValueError(
            f"{type(strategy).__name__} writes its checkpoints itself and not through a CheckpointIO, so that the "
            "Callback could not commit them: use DDPStrategy or DeepSpeedStrategy, or a loop of your own with "
            "unbroken.Run (Fabric) or unbroken.frameworks.dcp"
        )
    if getattr(strategy, "load_full_weights", False):
        raise ValueError(
            "load_full_weights=True loads no optimizer states, so that no training could be resumed: leave it out"
        )
    return Sharded(strategy, events)


# ---- the newest checkpoint ----


def _settings_of(settings: Settings, savers: list[Any]) -> Settings:
    """The settings of the callback, with the metric of the first ``ModelCheckpoint`` that has one, for prune and ls."""
    best = next((f"{saver.monitor}:{saver.mode}" for saver in savers if saver.monitor), None)
    return Settings(**{**vars(settings), "keep_best": best})


def _newest_in(store: Store, settings: Settings | None) -> Path | None:
    names = newest_first(store, scan(store).committed) if store.root.is_dir() else []
    if names:
        return store.path(names[0])
    for text in settings.mirrors if settings is not None else ():
        # Chosen and fetched when the run is open; here it matters only whether there is anything to resume from.
        with contextlib.suppress(UnbrokenError):
            remote = store_at(open_client(home_of(parse_address(text), store), store.files))
            if scan(remote).committed:
                store.files.make_directory(store.root)
                return store.root
    return None


def _require_plain(callbacks: Iterable[object], checkpoint_io: object) -> None:
    """Refuse callbacks that train to find a value, and a plugin that writes in the background."""
    for name in ("LearningRateFinder", "BatchSizeFinder"):
        if any(_is_a(name, each) for each in callbacks):
            raise ValueError(
                f"{name} trains before the run begins, and again in every job: find the value with a Trainer of its "
                "own, without the unbroken Callback, and set it in the script"
            )
    if _is_a("AsyncCheckpointIO", checkpoint_io):
        raise ValueError(
            "AsyncCheckpointIO writes after the save has returned, so that the Callback could not commit what is "
            "written: leave it out of plugins"
        )


def _is_a(name: str, value: object) -> bool:
    """Whether it is of a class of Lightning, which this module does not import."""
    return any(kind.__name__ == name for kind in type(value).__mro__)


def _require_sound(folder: Path) -> None:
    store = Store(folder.parent)
    verdict = verify(store, folder.name, Level.FULL)
    if not verdict.is_sound:
        reasons = tuple((folder.name, str(finding)) for finding in verdict.findings)
        raise NoUsableCheckpoint(store=store.root, skipped=reasons)


_open: set[Events] = set()
before_exit(_open, Events._abandon)
