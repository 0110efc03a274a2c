"""The metrics that a loop logs, read from the device as rarely as possible.

A logged tensor stays where it is until it is needed: reading each loss at once would make every step wait for the
device. Values that are read are exact, bit for bit, as Python floats.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

Number = int | float
# Checked here, where the loop calls, and not when the record is written many steps later.
_RESERVED = frozenset({"step", "bits"})


@dataclass
class LoggedMetrics:
    """The metrics of the steps that were not read yet, the last values that were, and the steps those belong to."""

    latest: dict[str, Number] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    _last: tuple[int, dict[str, Number]] | None = None
    _open: dict[str, Number | torch.Tensor] = field(default_factory=dict)
    _waiting: list[tuple[int, dict[str, Number | torch.Tensor]]] = field(default_factory=list)

    def log(self, values: Mapping[str, object]) -> None:
        """Record metrics of the step that is being computed; a name that is logged twice has the last value.

        Raises:
            TypeError: a value is neither a number nor a tensor of one real element.
            ValueError: a name is reserved, or a number is larger than a float can hold.
        """
        for name, value in values.items():
            if name in _RESERVED:
                raise ValueError(f"a metric cannot be called {name!r}: the name is reserved")
            self._open[name] = value if type(value) is float else _kept(name, value)

    def close_step(self, step: int) -> None:
        """The step is complete; its metrics belong to this number."""
        if self._open:
            self._waiting.append((step, self._open))
            self._open = {}

    def drop_step(self) -> None:
        """The step was abandoned: its metrics belong to no step."""
        self._open = {}

    def read(self) -> list[tuple[int, dict[str, Number]]]:
        """The metrics of all steps since the last reading, in order; waits for the device once."""
        waiting, self._waiting = self._waiting, []
        # Filled in where the tensors are: these dicts are nobody else's.
        places = [(values, name) for _, values in waiting for name, v in values.items() if isinstance(v, torch.Tensor)]
        tensors = cast("list[torch.Tensor]", [values[name] for values, name in places])
        for (values, name), number in zip(places, _numbers(tensors), strict=True):
            values[name] = number
        rows = cast("list[tuple[int, dict[str, Number]]]", waiting)
        for step, read in rows:
            self.latest.update(read)
            for name in read:
                self.steps[name] = step
        if rows:
            self._last = rows[-1]
        return rows

    def number(self, name: str) -> float | None:
        """The last value of a metric that was read; None if there is none."""
        value = self.latest.get(name)
        return None if value is None else float(value)

    def of_step(self, step: int) -> dict[str, Number]:
        """What was logged for one step, the last that was read; a value of an earlier step is not one of this."""
        return dict(self._last[1]) if self._last is not None and self._last[0] == step else {}


@dataclass(frozen=True)
class NonFinite:
    """A metric of a step that is NaN or infinite."""

    step: int
    metric: str
    value: float


def first_non_finite(rows: list[tuple[int, dict[str, Number]]], metrics: Sequence[str]) -> NonFinite | None:
    """The first step at which one of these metrics is NaN or infinite."""
    for step, values in rows:
        for metric in metrics:
            value = values.get(metric)
            if value is not None and not math.isfinite(value):
                return NonFinite(step, metric, value)
    return None


def _kept(name: str, value: object) -> Number | torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.ndim > 0 and value.numel() != 1:
            raise TypeError(f"metric {name!r} is a tensor of {value.numel()} elements; log one number")
        if value.is_complex():
            raise TypeError(f"metric {name!r} is complex; log its real and imaginary part, or its absolute value")
        if value.is_cpu and type(value) is torch.Tensor:
            # There is no device to wait for, and to read it costs less than a copy.
            return value.item()
        # A copy: a loop may add to its loss in place before we read it.
        copy = value.detach().clone()
        return copy if copy.ndim == 0 else copy.reshape(())
    if isinstance(value, bool | float):
        return value
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError as wrong:
        raise ValueError(f"metric {name!r} is larger than a float can hold (about 1.8e308)") from wrong
    except (TypeError, ValueError) as wrong:
        raise TypeError(f"metric {name!r} is a {type(value).__name__}, not a number") from wrong
    return value if isinstance(value, int) else number


def _numbers(tensors: list[torch.Tensor]) -> list[Number]:
    """The values of many small tensors, with one transfer for all of one type and device."""
    found: list[Number] = [0.0] * len(tensors)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.is_cpu:
            found[i] = tensor.item()
        else:
            groups.setdefault((tensor.dtype, tensor.device), []).append(i)
    for places in groups.values():
        values = torch.stack([tensors[i] for i in places]).tolist()
        for i, value in zip(places, values, strict=True):
            found[i] = value
    return found
