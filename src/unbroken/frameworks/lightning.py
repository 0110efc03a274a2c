"""One callback makes the training of a ``Trainer`` of the package ``lightning`` a run.

    callbacks = [ModelCheckpoint("runs/a/models", save_last=True), unbroken_pl.Callback("runs/a")]
    Trainer(callbacks=callbacks, ...).fit(model, loader, ckpt_path="last")

Scripts that import ``pytorch_lightning`` use ``unbroken.frameworks.pytorch_lightning``.
"""

from importlib.metadata import version

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import callbacks

from unbroken.frameworks.lightning_events import Events, Observed, Redirected, Stopped

__all__ = ["Callback", "Stopped"]


class RunCheckpointIO(Redirected, CheckpointIO):
    """Commits what a ``ModelCheckpoint`` saves to the run; the callback puts it around the Trainer's own."""


class First(Observed, callbacks.Callback):
    """Stands before all other callbacks."""


class Callback(Events, callbacks.OnExceptionCheckpoint):  # type: ignore[misc] # ``ckpt_path`` may be None here
    """Makes the training of a ``Trainer`` a run.

    The ``ModelCheckpoint`` callbacks decide what is saved and how many of the best are kept.

    Args:
        directory: The directory of the run; its checkpoints are ``DIRECTORY/checkpoint-N``.
        save_steps: Also save every so many steps; required without a ``ModelCheckpoint``.
        keep_last_k: Keep this many of the newest checkpoints beside those that a ``ModelCheckpoint`` keeps.
        options: Mirrors, stops and trackers: ``RunOptions``.
    """

    version = version("lightning")
    redirect = RunCheckpointIO
    observe = First
    saver = callbacks.ModelCheckpoint
