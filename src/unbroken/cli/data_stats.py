"""``unbroken data stats``: document lengths and packing efficiency."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from numpy.typing import NDArray

from unbroken.cli.arguments import DiskPath
from unbroken.cli.data_input import DataArguments, Input, window_options
from unbroken.cli.output import Output, as_command
from unbroken.data.corpus.catalogue import Corpus
from unbroken.data.order.bucket_draws import BucketDraws
from unbroken.data.stream import Stream
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.report.style import Style
from unbroken.report.table import Column, table

_STRETCH: Final = 1 << 20
_BITS: Final = 63
_BAR: Final = 40
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


@as_command(
    "stats",
    examples=(
        ("unbroken data stats data --max-length 1024", "how a data directory packs"),
        ("unbroken data stats --config config.yaml", "with the lengths of a run"),
    ),
)
@click.argument("directory", metavar="[DIR]", required=False, type=DiskPath())
@window_options
def command(output: Output, directory: Path | None, **options: Any) -> None:  # noqa: ANN401 -- see DataArguments
    """Show document lengths and packing.

    Give DIR, or the config of a run. Packing plans are cached; a run with the same lengths reuses them.
    """
    asked = DataArguments("unbroken data stats", directory, **options).open()
    stream = asked.stream(output)
    lengths = document_lengths(asked.corpus)
    output.document(
        "unbroken.data-stats/1", _fields(asked, stream, lengths), lambda: _text(asked, stream, lengths, output.style)
    )


def document_lengths(corpus: Corpus) -> NDArray[np.int64]:
    """The number of documents with 1, 2-3, 4-7, 8-15 ... tokens; reads in blocks of bounded size."""
    edges = 2 ** np.arange(_BITS, dtype=np.int64)
    found = np.zeros(_BITS + 1, np.int64)
    for shard in corpus.shards:
        for first in range(0, shard.entries, _STRETCH):
            lengths = np.diff(shard.index.offsets(first, min(first + _STRETCH, shard.entries)))
            found += np.bincount(np.searchsorted(edges, lengths, "right"), minlength=_BITS + 1)
    return found[1:]


def _bucket_fields(bucket: BucketDraws, stream: Stream) -> dict[str, Any]:
    plans = [each.plan for each in bucket.planned]
    source = next(each for each in stream.corpus.buckets if each.name == bucket.name)
    fresh, masked = sum(each.fresh_tokens for each in plans), sum(each.masked_tokens for each in plans)
    room = bucket.sequences * stream.max_length
    return {
        "name": bucket.name,
        "documents": source.entries,
        "tokens": source.tokens,
        "windows": sum(each.windows for each in plans),
        "dropped_documents": sum(each.dropped_entries for each in plans),
        "sequences": bucket.sequences,
        "fresh_tokens": fresh,
        "masked_tokens": masked,
        "fill": (fresh + masked) / room if room else 1.0,
    }


def _fields(asked: Input, stream: Stream, lengths: NDArray[np.int64]) -> dict[str, Any]:
    data = asked.config.data
    return {
        "path": str(asked.corpus.root),
        "split": asked.corpus.split,
        "max_length": data.max_length,
        "overlap_size": data.overlap_size,
        "packing": data.packing,
        "buckets": [_bucket_fields(bucket, stream) for bucket in stream.buckets],
        "document_lengths": [
            {"from": 2**bit, "to": 2 ** (bit + 1) - 1, "documents": count}
            for bit, count in enumerate(lengths.tolist())
            if count
        ],
    }


def _text(asked: Input, stream: Stream, lengths: NDArray[np.int64], style: Style) -> str:
    data = asked.config.data
    how = "packed" if data.packing else "one document per sequence"
    names = ("documents", "tokens", "windows", "masked", "sequences", "fill")
    columns = [Column("bucket"), *(Column(name, is_number=True) for name in names)]
    rows = [_row(_bucket_fields(bucket, stream)) for bucket in stream.buckets]
    return "\n".join(
        [
            f"{style.bold('data')}       {printable(str(asked.corpus.root / asked.corpus.split))}",
            (
                f"sequences  {amounts.count(data.max_length)} tokens, {how}, windows overlap by "
                f"{amounts.plural(data.overlap_size, 'token')}"
            ),
            "",
            table(columns, rows, style=style),
            "",
            *_histogram(lengths.tolist(), style),
        ]
    )


def _row(fields: dict[str, Any]) -> tuple[str, ...]:
    inside = fields["fresh_tokens"] + fields["masked_tokens"]
    return (
        printable(fields["name"]),
        *(amounts.count(fields[name]) for name in ("documents", "tokens", "windows")),
        f"{100 * fields['masked_tokens'] / inside:.1f} %" if inside else "-",
        amounts.count(fields["sequences"]),
        f"{100 * fields['fill']:.2f} %",
    )


def _histogram(counts: Sequence[int], style: Style) -> list[str]:
    used = [bit for bit, count in enumerate(counts) if count]
    shown = range(used[0], used[-1] + 1) if used else range(0)
    total, most = sum(counts), max(counts, default=0)
    rows = [
        (_span(bit), amounts.count(count), f"{100 * count / total:.1f} %", _bar(count, most))
        for bit in shown
        for count in [counts[bit]]
    ]
    columns = [
        Column("tokens per document", is_number=True),
        Column("documents", is_number=True),
        Column("share", is_number=True),
        Column("", paint=style.dim),
    ]
    return table(columns, rows, style=style).splitlines()


def _span(bit: int) -> str:
    first, last = 2**bit, 2 ** (bit + 1) - 1
    return amounts.count(first) if first == last else f"{amounts.count(first)} to {amounts.count(last)}"


def _bar(count: int, most: int) -> str:
    """A bar in eighths of a character; a count above zero is always visible."""
    eighths = max(count * _BAR * 8 // most, 1) if count else 0
    whole, rest = divmod(eighths, 8)
    return (_EIGHTHS[8] * whole + _EIGHTHS[rest]).rstrip()
