"""The metrics that a Lightning ``Trainer`` holds in the middle of an epoch.

Lightning does not save them. After a resume, the mean of the epoch would be that of its last batches, and
``callback_metrics`` would be empty; ``ModelCheckpoint``, ``EarlyStopping`` and ``ReduceLROnPlateau`` use it. Two names
used here are private, ``_results`` and ``_logger_connector``. Without them, the mean of an interrupted epoch is the one
that Lightning computes.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

# What is shown and decided by: dicts of tensors and numbers.
_SHOWN: Final = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_SUMS: Final = "epoch_sums"
_OBJECTS: Final = "epoch_metrics"
_PARTS: Final = ("value", "cumulated_batch_size")
_COUNT: Final = "_update_count"


def metrics_of(trainer: Any) -> dict[str, Any]:  # noqa: ANN401 - a Trainer of one package or the other
    """What this rank has accumulated and shows, by name: tensors, numbers and lists of tensors alone."""
    found: dict[str, Any] = {name: _moved(dict(getattr(trainer, name)), torch.device("cpu")) for name in _SHOWN}
    sums: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for key, metric in _accumulated(trainer).items():
        if metric.has_reset or not metric.meta.on_epoch:
            continue
        if metric.is_tensor:
            sums[key] = {part: getattr(metric, part).cpu() for part in _PARTS if hasattr(metric, part)}
        elif metric.meta.metric_attribute:
            objects[metric.meta.metric_attribute] = _state_of(metric.value)
    return {**found, _SUMS: sums, _OBJECTS: objects}


def resume_metrics(trainer: Any, module: Any, saved: Mapping[str, Any], *, is_inside: bool) -> None:  # noqa: ANN401
    """Give back what was shown, and inside an epoch what its batches had accumulated."""
    for name in _SHOWN:
        # The dict of the Trainer itself: a metric that is logged later replaces its value.
        getattr(trainer, name).update(_moved(saved.get(name, {}), trainer.strategy.root_device))
    results = _accumulated(trainer)
    connector = getattr(trainer, "_logger_connector", None)
    if not is_inside or connector is None or not isinstance(results, dict):
        return
    trainer.fit_loop.epoch_loop._results = _resumed(results, saved.get(_SUMS, {}))
    # The first batch of this job is not the first of its epoch, at which Lightning resets what was accumulated.
    connector._first_loop_iter = True
    objects = dict(module.named_modules())
    for name, state in saved.get(_OBJECTS, {}).items():
        if name in objects:
            _give_state(objects[name], state)


def _accumulated(trainer: Any) -> Any:  # noqa: ANN401 - Lightning's collection, or nothing
    return getattr(trainer.fit_loop.epoch_loop, "_results", {})


def _state_of(metric: Any) -> dict[str, Any]:  # noqa: ANN401 - a torchmetrics.Metric
    return {**_moved(metric.metric_state, torch.device("cpu")), _COUNT: getattr(metric, _COUNT, 1)}


def _give_state(metric: Any, state: Mapping[str, Any]) -> None:  # noqa: ANN401 - a torchmetrics.Metric
    for name, value in _moved(state, getattr(metric, "device", torch.device("cpu"))).items():
        setattr(metric, name, value)


def _moved(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: _at(value, device) for name, value in values.items()}


def _at(value: Any, device: torch.device) -> Any:  # noqa: ANN401 - a tensor, a list of them, or a number
    if isinstance(value, list):
        return [_at(each, device) for each in value]
    return value.detach().to(device) if isinstance(value, torch.Tensor) else value


def _resumed(results: Any, sums: Mapping[str, Any]) -> Any:  # noqa: ANN401 - Lightning's collection
    """Lightning's collection of results, in which a metric that is logged again begins with what was accumulated."""
    kind: Any = type(results)
    waiting = {key: dict(parts) for key, parts in sums.items()}

    class Resumed(kind):  # type: ignore[misc]
        """``kind``, with ``waiting`` given to the metrics of these names once."""

        def __setitem__(self, key: str, metric: Any) -> None:  # noqa: ANN401 - Lightning's metric
            for part, value in waiting.pop(key, {}).items():
                setattr(metric, part, value)
            super().__setitem__(key, metric)

        def reset(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as Lightning calls it
            # The epoch is over: what was not logged again is not of the next one.
            waiting.clear()
            super().reset(*args, **kwargs)

    resumed = Resumed(training=results.training)
    resumed.update(results)
    return resumed
