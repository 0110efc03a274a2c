"""How a job opens its trackers: loaded before the run is taken, started when it is known where the job resumes."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from unbroken.loop.recorder import SilentRecorder
from unbroken.loop.settings import Settings
from unbroken.quoting.log import logger
from unbroken.records.layout import Layout
from unbroken.records.stop import StopSources
from unbroken.records.tracker_marks import known_ids
from unbroken.state.rng import capture_rng, restore_rng, rng_devices
from unbroken.trackers.following import RunTrackers
from unbroken.trackers.named import load_tracker, parse_tracker
from unbroken.trackers.tracker import Tracker

_log = logger(__name__)
# In a checkpoint's metadata: a run that lost its records, or left them on another disk, still finds its trackers.
TRACKERS: Final = "trackers"
# The end of a job waits so long for trackers.
WAIT_S: Final = 30.0
# Before the walltime ends, for what comes after them.
_LAST_SECONDS: Final = 5.0


def load_trackers(settings: Settings) -> tuple[Tracker, ...]:
    """The trackers of the settings, their libraries imported.

    Raises:
        TrackerMissing: a library is not installed.
    """
    if not settings.trackers:
        return ()
    # Some of these libraries draw random numbers when they are imported.
    before, devices = capture_rng(rng_devices()), rng_devices()
    try:
        return tuple(load_tracker(parse_tracker(each)) if isinstance(each, str) else each for each in settings.trackers)
    finally:
        restore_rng(before, devices)


def warn_of_doubled(settings: Settings, others: Iterable[object], option: str) -> None:
    """Warn of trackers that a framework shows the same metrics in by its own means, as ``option`` of it asks."""
    ours = {parse_tracker(each).kind for each in settings.trackers if isinstance(each, str)}
    for name in sorted(ours & {str(getattr(each, "value", each)) for each in others}):
        _log.warning("%s is in %s, too, which shows steps twice after a kill: leave it out there", name, option)


def start_trackers(
    trackers: tuple[Tracker, ...],
    settings: Settings,
    layout: Layout,
    job: int,
    recorder: SilentRecorder,
    *,
    step: int,
    is_other_start: bool,
    metadata: Mapping[str, object],
    longest_s: Callable[[], float],
) -> None:
    """Let the trackers follow the metrics of this job; only rank 0 has any.

    ``is_other_start`` says that the run starts at step 0 and computes something else than a job before it;
    ``metadata`` is that of the checkpoint of this run which the job resumes from.
    """
    if not trackers:
        return
    events = recorder.history().events
    saved = metadata.get(TRACKERS)
    # The journal is the truth where there is one.
    ids = known_ids(events) if any(event.kind == "tracker" for event in events) else _as_ids(saved)
    recorder.follow(
        RunTrackers(
            trackers,
            layout,
            job,
            step=step,
            ids={} if is_other_start else ids,
            mode=settings.tracker_mode,
            config=settings.tracker_config or {},
            run_name=settings.tracker_run_name or layout.run.name,
            event=recorder.event,
            longest_s=longest_s,
        )
    )


def _as_ids(saved: object) -> dict[str, str]:
    found = saved if isinstance(saved, Mapping) else {}
    return {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, str)}


def time_left(stops: StopSources) -> float:
    """How long the end of a job may wait for its trackers."""
    if stops.deadline_s is None:
        return WAIT_S
    return min(max(stops.deadline_s - time.time() - _LAST_SECONDS, 0.0), WAIT_S)
