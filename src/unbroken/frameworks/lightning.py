"""The ``Trainer`` of the package ``lightning`` as a run: one callback.

    callbacks = [ModelCheckpoint("runs/a/models", save_last=True), unbroken_pl.Callback("runs/a")]
    Trainer(callbacks=callbacks, ...).fit(model, loader, ckpt_path="last")

``unbroken.frameworks.pytorch_lightning`` has the same for scripts that import ``pytorch_lightning``.
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

    What is saved, and how many are kept as the best, is what ``ModelCheckpoint`` callbacks say.

    Args:
        directory: The run; its checkpoints are ``DIRECTORY/checkpoint-N``.
        save_steps: Save every so many steps besides; needed where there is no ``ModelCheckpoint``.
        keep_last_k: Newest steps whose checkpoints are kept besides those that a ``ModelCheckpoint`` keeps.
        options: how it is mirrored, stopped and shown: ``RunOptions``.
    """

    version = version("lightning")
    redirect = RunCheckpointIO
    observe = First
    saver = callbacks.ModelCheckpoint
