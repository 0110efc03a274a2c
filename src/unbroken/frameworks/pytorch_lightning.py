"""The ``Trainer`` of the package ``pytorch_lightning`` as a run: one callback.

    callbacks = [ModelCheckpoint("runs/a/models", save_last=True), unbroken_pl.Callback("runs/a")]
    Trainer(callbacks=callbacks, ...).fit(model, loader, ckpt_path="last")

The same as ``unbroken.frameworks.lightning``, for scripts that import ``pytorch_lightning``.
"""

from importlib.metadata import version

from lightning_fabric.plugins import CheckpointIO
from pytorch_lightning import callbacks

from unbroken.frameworks.lightning_events import Events, Observed, Redirected, Stopped

__all__ = ["Callback", "Stopped"]


class RunCheckpointIO(Redirected, CheckpointIO):
    """Commits what a ``ModelCheckpoint`` saves to the run; the callback puts it around the Trainer's own."""


class First(Observed, callbacks.Callback):
    """Stands before all other callbacks."""


class Callback(Events, callbacks.OnExceptionCheckpoint):  # type: ignore[misc] # ``ckpt_path`` may be None here
    """Makes the training of a ``Trainer`` a run; the arguments are those of ``lightning.Callback``."""

    version = version("pytorch-lightning")
    redirect = RunCheckpointIO
    observe = First
    saver = callbacks.ModelCheckpoint
