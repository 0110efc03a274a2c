"""What every benchmark here shares: interleaved repeats, medians with their spread, one JSON file of results."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from unbroken.version import VERSION

# Another folder for a trial whose figures are not to be kept.
RESULTS = Path(os.environ.get("BENCH_RESULTS") or Path(__file__).resolve().parent / "results")


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one thing."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> str:
        """Lowest to highest."""
        return f"{min(self.values):.3g} to {max(self.values):.3g}"


def interleaved(objects: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, Samples]:
    """Measure each thing in turn, over and over, so that a slow minute hits all alike; the first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in objects}
    for round_number in range(repeats + 1):
        for name, thing in objects.items():
            value = thing()
            if round_number:
                found[name].append(value)
    return {name: Samples(tuple(values)) for name, values in found.items()}


def read_results(name: str) -> dict[str, object]:
    """The figures that were kept last, without what they were taken with; empty before the first time."""
    path = RESULTS / f"{name}.json"
    kept: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
    kept.pop("taken_with", None)
    return kept


def write_results(name: str, facts: Mapping[str, object]) -> Path:
    """Keep the figures beside the benchmark, with what they were taken with."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    taken_with = {"unbroken": VERSION, "python": platform.python_version(), "machine": platform.machine()}
    path.write_text(json.dumps({"taken_with": taken_with, **facts}, indent=2, sort_keys=True) + "\n")
    return path
