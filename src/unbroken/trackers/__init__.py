"""Trackers: wandb, trackio, TensorBoard and MLflow show the metrics of a run as one run, however many jobs it takes.

A tracker follows the run's own metrics, which are on disk: nothing waits in memory, a slow tracker falls behind without
holding up the training, and what a killed job had not sent the next one sends. ``named`` reads their names, ``tracker``
says what one has to do, ``sender`` is the thread that does it, ``apart`` the process that most libraries get, because
they draw random numbers. The tracker libraries are imported only where they are used.
"""

from unbroken.trackers.tracker import Ending, TrackedRun, Tracker

__all__ = ["Ending", "TrackedRun", "Tracker"]
