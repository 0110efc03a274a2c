"""What ``validate`` says about the data of a config.

The forecast needs numpy, which this half of the house does not: it is loaded by name, when there is data to look at.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from unbroken import amounts
from unbroken.cli.output import Output
from unbroken.config import Config
from unbroken.errors import DataMissing
from unbroken.quoting.terminal import printable
from unbroken.report.style import Style
from unbroken.report.table import Column, table

NEEDED: Final = "numpy"
_FORECAST: Final = "unbroken.data.forecast"


def data_facts(config: Config, world: int, output: Output, *, is_strict: bool) -> dict[str, Any] | None:
    """The forecast as plain facts; None where nothing here can look at data.

    Raises:
        DataMissing: there is no folder at ``data.path``.
        DataUnfit: data and config do not go together; every problem is in it.
        DataError: the data is damaged or unfinished.
    """
    path = Path(config.data.path)
    if not path.is_dir():
        raise DataMissing(path=path, lacks="the folder that data.path names does not exist")
    try:
        importlib.import_module(NEEDED)
    except ModuleNotFoundError:
        return None
    with output.progress("plan", _documents(config)) as advance:
        found = importlib.import_module(_FORECAST).forecast(config, world, progress=advance)
    if found.problems:
        for warning in found.warnings:
            output.note(f"warning: {warning}")
    found.require_fit(strict=is_strict)
    return {
        "path": str(found.path),
        "world_size": world,
        "sequences_per_step": found.global_batch,
        "steps_asked": found.steps,
        "steps_available": found.steps_available,
        "vocabulary": found.vocabulary,
        "warnings": list(found.warnings),
        "buckets": [
            {
                "name": each.name,
                "shards": each.shards,
                "documents": each.documents,
                "tokens": each.tokens,
                "sequences": each.sequences,
                "fill": float(each.fill),
                "drawn": each.drawn,
                "passes": float(each.passes),
                "dry_step": each.dry_step,
            }
            for each in found.buckets
        ],
    }


def _documents(config: Config) -> int:
    """How many documents a plan has to look at, by the size of the indexes: 10 bytes each."""
    return sum(path.stat().st_size for path in Path(config.data.path, "train").rglob("*.idx")) // 10


def data_text(facts: Mapping[str, Any], style: Style) -> str:
    """The same for a person."""
    buckets: Sequence[Mapping[str, Any]] = facts["buckets"]
    sequences, tokens = (sum(each[name] for each in buckets) for name in ("sequences", "tokens"))
    counts = f"{amounts.plural(len(buckets), 'bucket')}, {amounts.plural(tokens, 'token')}"
    lines = [
        f"data     {printable(facts['path'])}  ({counts} in {amounts.plural(sequences, 'sequence')})",
        f"reach    {_reach(facts)}",
        *(f"{style.warn('warning')}  {printable(warning)}" for warning in facts["warnings"]),
        "",
        _table(buckets, style),
    ]
    return "\n".join(lines)


def _reach(facts: Mapping[str, Any]) -> str:
    asked, available = facts["steps_asked"], facts["steps_available"]
    if available is None:
        return f"without end; {amounts.plural(asked, 'step')} are asked for"
    return f"{amounts.plural(available, 'step')}; {amounts.count(asked)} are asked for"


def _table(buckets: Sequence[Mapping[str, Any]], style: Style) -> str:
    names = ("documents", "tokens", "sequences", "fill", "drawn", "passes", "dry at step")
    columns = [Column("bucket"), *(Column(name, is_number=True) for name in names)]
    rows = [
        (
            printable(each["name"]),
            *(amounts.count(each[name]) for name in ("documents", "tokens", "sequences")),
            f"{100 * each['fill']:.2f} %",
            amounts.count(each["drawn"]),
            f"{each['passes']:.2f}",
            "-" if each["dry_step"] is None else amounts.count(each["dry_step"]),
        )
        for each in buckets
    ]
    return table(columns, rows, style=style)
