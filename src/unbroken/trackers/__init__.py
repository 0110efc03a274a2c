"""Trackers: wandb, trackio, TensorBoard and MLflow show the metrics of a run as one run, however many jobs it takes.

A tracker is sent the run's own metrics, which are on disk. So nothing is queued in memory, a slow tracker falls behind
without delaying the training, and the next job sends what a killed job had not sent. ``named`` parses the names of
trackers, ``tracker`` is their protocol, ``sender`` is the thread that calls them, ``following`` has the trackers of one
job. ``apart`` runs a library in a process of its own, because most of them draw random numbers. The libraries are
imported only where they are used.
"""

from unbroken.trackers.tracker import Ending, TrackedRun, Tracker

__all__ = ["Ending", "TrackedRun", "Tracker"]
