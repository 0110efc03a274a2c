"""How the cost of every operation grows: over ranks, tensors, checkpoints, documents and steps.

    python -m bench.growth [AXIS ...] [--most N | --up-to N] [--collector off] [--directory DIR]

For each axis sizes that are ten times the one before, up to the largest that the design names. CPU seconds, not wall
time, so that a busy machine does not change them much; the most memory that the process held; and the exponent of each
decade, which for n log n is a little above 1. Writes ``bench/results/growth.json`` and ``docs/measured/growth.svg``;
axes that are not named keep the figures they have. With ``--collector off`` Python's garbage collector is off while it
measures; those figures are kept beside the others, and are not in the picture.
"""

import argparse
import gc
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import RESULTS, write_results
from bench.plan import peak_bytes
from bench.plot import Line, Panel, svg
from unbroken.report.style import Style
from unbroken.report.table import Column, table

PICTURE = Path(__file__).resolve().parent.parent / "docs/measured/growth.svg"
# Below this the clock and the first use of everything decide.
NOISE_S = 0.02
# What two measurements of the same on a busy machine differ by, as an exponent over a decade: a factor of 1.26.
TOLERANCE = 0.1


@dataclass(frozen=True)
class Growth:
    """CPU seconds of one operation by size."""

    axis: str
    operation: str
    cpu_s: Mapping[int, float]

    def exponents(self) -> dict[int, float]:
        """By the upper size of each decade: the slope in log-log; what takes no time has none."""
        sizes = sorted(self.cpu_s)
        return {
            n: math.log(max(self.cpu_s[n], NOISE_S) / max(self.cpu_s[before], NOISE_S)) / math.log(n / before)
            for before, n in itertools.pairwise(sizes)
        }

    @property
    def last(self) -> float:
        """The exponent of the last decade."""
        found = self.exponents()
        return found[max(found)] if found else 0.0

    @property
    def worse_at(self) -> list[int]:
        """The sizes at whose decade it grew faster than n log n."""
        sizes = sorted(self.cpu_s)
        found = self.exponents()
        return [n for before, n in itertools.pairwise(sizes) if found[n] > linearithmic(before, n) + TOLERANCE]


def linearithmic(before: int, n: int) -> float:
    """The exponent of n log n from one size to the next."""
    return 1 + math.log(math.log(n) / math.log(before)) / math.log(n / before)


def measure(axis: str, size: int, directory: str | None, collector: str = "on") -> dict[str, Any]:
    """One size in a process of its own."""
    command = [sys.executable, "-m", "bench.growth", axis, "--one", str(size), "--collector", collector]
    with tempfile.TemporaryDirectory(prefix="unbroken-growth-", dir=directory) as root:
        done = subprocess.run([*command, "--directory", root], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{axis} at {size:,} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def one(axis: str, size: int, root: Path) -> None:
    """What the process of one size does."""
    from bench.growth_axes import AXES

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seconds = AXES[axis][0](size, root)
    print(json.dumps({"cpu_s": seconds, "peak_bytes": peak_bytes()}))


def growths(axes: Mapping[str, Mapping[str, Any]]) -> list[Growth]:
    """The operations of all axes, in the order in which they were measured."""
    return [
        Growth(
            axis,
            operation,
            {int(n): each["cpu_s"][operation] for n, each in by_size.items() if operation in each["cpu_s"]},
        )
        for axis, by_size in axes.items()
        for operation in next(iter(by_size.values()))["cpu_s"]
    ]


def rows_of(axes: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The table: an operation a row, its seconds at each size, its exponents, and where it is worse than n log n."""
    rows = list[tuple[str, ...]]()
    for each in growths(axes):
        peak = max(found["peak_bytes"] for found in axes[each.axis].values())
        rows.append(
            (
                each.axis,
                f"{max(each.cpu_s):,}",
                each.operation,
                " / ".join(f"{each.cpu_s[n]:.3g}" for n in sorted(each.cpu_s)),
                f"{each.last:.2f}" if max(each.cpu_s.values()) > NOISE_S else "-",
                ", ".join(f"{n:,}" for n in each.worse_at) or "no",
                f"{peak / 1e9:.2f}",
            )
        )
    return rows


COLUMNS = (
    Column("axis"),
    Column("up to", True),
    Column("operation"),
    Column("CPU s, by decade"),
    Column("exponent", True),
    Column("worse than n log n at"),
    Column("peak GB", True),
)


def panels(axes: Mapping[str, Mapping[str, Any]]) -> list[Panel]:
    """One picture for each axis."""
    found = growths(axes)
    return [
        Panel(axis, [Line(each.operation, each.cpu_s) for each in found if each.axis == axis])
        for axis in dict.fromkeys(each.axis for each in found)
    ]


# The name of the figures in the file of results, by the garbage collector.
KEYS = {"on": "axes", "off": "axes_collector_off"}


def known(collector: str = "on") -> dict[str, Any]:
    """The figures that were kept."""
    path = RESULTS / "growth.json"
    return dict(json.loads(path.read_text()).get(KEYS[collector], {})) if path.exists() else {}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("axes", nargs="*", metavar="AXIS")
    parser.add_argument("--most", type=int, help="no size above this; nothing is kept")
    parser.add_argument("--up-to", type=int, help="no size above this; what is measured is kept")
    parser.add_argument("--collector", choices=KEYS, default="on", help="Python's garbage collector while it measures")
    parser.add_argument("--directory", help="where the files go while it measures")
    parser.add_argument("--show", action="store_true", help="table and picture of the figures that are kept")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        if options.collector == "off":
            gc.disable()
        one(options.axes[0], options.one, Path(options.directory))
        return
    from bench.growth_axes import AXES

    if unknown := [axis for axis in options.axes if axis not in AXES]:
        parser.error(f"unknown axis {unknown[0]!r}; there are {', '.join(AXES)}")
    axes: dict[str, Any] = {}
    for axis in () if options.show else options.axes or AXES:
        for size in AXES[axis][1]:
            if all(limit is None or size <= limit for limit in (options.most, options.up_to)):
                found = measure(axis, size, options.directory, options.collector)
                print(axis, f"{size:,}", json.dumps(found), flush=True)
                axes = {**axes, axis: {**axes.get(axis, {}), str(size): found}}
                if options.most is None:
                    # After every size: the largest takes many minutes, and what is measured is kept.
                    keep(axes, options.collector)
    shown = axes if options.most else known(options.collector)
    print(table(COLUMNS, rows_of(shown), style=Style(False)))
    if options.most is None and options.collector == "on":
        PICTURE.write_text(svg(panels(shown)))
        print(PICTURE)


def keep(measured: Mapping[str, Mapping[str, Any]], collector: str = "on") -> None:
    """Write what was measured beside what is known, size by size; another axis may be measured at the same time."""
    kept = {each: known(each) for each in KEYS}
    axes = kept[collector]
    for axis, by_size in measured.items():
        axes[axis] = dict(sorted({**axes.get(axis, {}), **by_size}.items(), key=lambda found: int(found[0])))
    write_results("growth", {**{KEYS[each]: found for each, found in kept.items()}, "noise_s": NOISE_S})


if __name__ == "__main__":
    main()
