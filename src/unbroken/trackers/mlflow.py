"""MLflow: one run, which every job finds by a tag. MLflow's own variables set the server."""

import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from unbroken.records.metrics import Row
from unbroken.trackers.tracker import Ending, TrackedRun

_Some = TypeVar("_Some")
TAG: Final = "unbroken.id"
_DEFAULT_EXPERIMENT: Final = "Default"
# Of one request, by MLflow's own rules.
_MOST_METRICS: Final = 1000
_MOST_PARAMETERS: Final = 100
_LONGEST_PARAMETER: Final = 6000
_STATUS: Final[Mapping[Ending, str]] = {"completed": "FINISHED", "stopped": "SCHEDULED", "failed": "FAILED"}
_LONGEST_NAME: Final = 250
_UNSAFE: Final = re.compile(r"[^\w\-./ :]")


class MlflowTracker:
    """Shows a run in an experiment of MLflow."""

    def __init__(self, experiment: str) -> None:
        self._experiment = experiment
        self._client: MlflowClient | None = None
        self._run_id = ""

    @property
    def name(self) -> str:
        """The experiment is part of it."""
        return f"mlflow:{self._experiment}" if self._experiment else "mlflow"

    @property
    def _server(self) -> MlflowClient:
        if self._client is None:
            self._client = MlflowClient()
        return self._client

    def start(self, run: TrackedRun) -> None:
        """Find the run by its tag, or make it; so a job killed right after making it leaves no second run behind."""
        wanted = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or _DEFAULT_EXPERIMENT
        experiment = self._server.get_experiment_by_name(wanted)
        place = experiment.experiment_id if experiment is not None else self._server.create_experiment(wanted)
        found = self._server.search_runs([place], f"tags.`{TAG}` = '{run.id}'")
        if found:
            self._run_id = found[0].info.run_id
            self._server.update_run(self._run_id, status="RUNNING")
            return
        made = self._server.create_run(place, run_name=run.name, tags={TAG: run.id})
        self._run_id = made.info.run_id
        for some in _chunks([*_flat(run.config)], _MOST_PARAMETERS):
            self._server.log_batch(self._run_id, params=some)

    def last_step(self) -> int | None:
        """The last step that the server has."""
        metrics = self._server.get_run(self._run_id).data.to_proto().metrics
        return max((int(metric.step) for metric in metrics), default=-1)

    def log(self, rows: Sequence[Row]) -> None:
        """Store the steps; a request contains whole steps, so that none is stored in part."""
        some: list[Metric] = []
        for row in rows:
            now_ms = int(time.time() * 1000)
            named = zip(_names(row.values), row.values.values(), strict=True)
            of_step = [Metric(name, value, now_ms, row.step) for name, value in named]
            if some and len(some) + len(of_step) > _MOST_METRICS:
                self._server.log_batch(self._run_id, metrics=some)
                some = []
            some += of_step
        for rest in _chunks(some, _MOST_METRICS):
            self._server.log_batch(self._run_id, metrics=rest)

    def finish(self, ending: Ending) -> None:
        """Set the state of the run: finished, failed, or scheduled if another job resumes it."""
        self._server.set_tag(self._run_id, "unbroken.ending", ending)
        self._server.update_run(self._run_id, status=_STATUS[ending])


def make(target: str) -> MlflowTracker:
    """The tracker of an experiment; empty for MLflow's default."""
    return MlflowTracker(target)


def _flat(values: Mapping[str, object], above: str = "") -> Iterator[Param]:
    for name, value in zip(_names(f"{above}{key}" for key in values), values.values(), strict=True):
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield Param(name, str(value)[:_LONGEST_PARAMETER])


def _names(keys: Iterable[str]) -> list[str]:
    """Names that MLflow accepts, as close to the given ones as possible, and all different.

    It takes few signs, no long names, and none that as a path would mean another one; a metric that it refuses would
    keep back every step from there on.
    """
    names: dict[str, None] = {}
    for key in keys:
        parts = _UNSAFE.sub("_", key).split("/")
        name = "/".join(part if part.strip(".") else "_" * max(len(part), 1) for part in parts)
        if len(name) > _LONGEST_NAME:
            told_apart = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:8]
            name = f"{name[: _LONGEST_NAME - 20]}-{told_apart}"
        while name in names:
            name += "_"
        names[name] = None
    return [*names]


def _chunks(values: Sequence[_Some], most: int) -> Iterator[Sequence[_Some]]:
    for at in range(0, len(values), most):
        yield values[at : at + most]
