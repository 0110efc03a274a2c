"""``unbroken data stats``: how long the documents are, and how they pack."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from numpy.typing import NDArray

from unbroken.cli.data_input import Asked, Input, window_options
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


@as_command("stats")
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@window_options
def command(output: Output, directory: Path | None, **options: Any) -> None:  # noqa: ANN401 -- see Asked
    """Show document lengths and how they pack.

    Give DIR, or a run's config. Plans are kept in the cache, where a run of the same lengths finds them.
    """
    asked = Asked("unbroken data stats", directory, **options).open()
    stream = asked.stream(output)
    lengths = document_lengths(asked.corpus)
    output.document(
        "unbroken.data-stats/1", _facts(asked, stream, lengths), lambda: _text(asked, stream, lengths, output.style)
    )


def document_lengths(corpus: Corpus) -> NDArray[np.int64]:
    """How many documents have 1, 2 to 3, 4 to 7, 8 to 15 ... tokens; what is read is bounded at any time."""
    edges = 2 ** np.arange(_BITS, dtype=np.int64)
    found = np.zeros(_BITS + 1, np.int64)
    for shard in corpus.shards:
        for first in range(0, shard.entries, _STRETCH):
            lengths = np.diff(shard.index.offsets(first, min(first + _STRETCH, shard.entries)))
            found += np.bincount(np.searchsorted(edges, lengths, "right"), minlength=_BITS + 1)
    return found[1:]


def _bucket_facts(bucket: BucketDraws, stream: Stream) -> dict[str, Any]:
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


def _facts(asked: Input, stream: Stream, lengths: NDArray[np.int64]) -> dict[str, Any]:
    data = asked.config.data
    return {
        "path": str(asked.corpus.root),
        "split": asked.corpus.split,
        "max_length": data.max_length,
        "overlap_size": data.overlap_size,
        "packing": data.packing,
        "buckets": [_bucket_facts(bucket, stream) for bucket in stream.buckets],
        "document_lengths": [
            {"from": 2**bit, "to": 2 ** (bit + 1) - 1, "documents": count}
            for bit, count in enumerate(lengths.tolist())
            if count
        ],
    }


def _text(asked: Input, stream: Stream, lengths: NDArray[np.int64], style: Style) -> str:
    data = asked.config.data
    how = "packed" if data.packing else "one document each"
    names = ("documents", "tokens", "windows", "masked", "sequences", "fill")
    columns = [Column("bucket"), *(Column(name, is_number=True) for name in names)]
    rows = [_row(_bucket_facts(bucket, stream)) for bucket in stream.buckets]
    return "\n".join(
        [
            f"{style.bold('data')}       {printable(str(asked.corpus.root / asked.corpus.split))}",
            (
                f"sequences  {amounts.count(data.max_length)} tokens, {how}; windows of a document share "
                f"{amounts.plural(data.overlap_size, 'token')}"
            ),
            "",
            table(columns, rows, style=style),
            "",
            *_histogram(lengths.tolist(), style),
        ]
    )


def _row(facts: dict[str, Any]) -> tuple[str, ...]:
    inside = facts["fresh_tokens"] + facts["masked_tokens"]
    return (
        printable(facts["name"]),
        *(amounts.count(facts[name]) for name in ("documents", "tokens", "windows")),
        f"{100 * facts['masked_tokens'] / inside:.1f} %" if inside else "-",
        amounts.count(facts["sequences"]),
        f"{100 * facts['fill']:.2f} %",
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
        Column("tokens of a document", is_number=True),
        Column("documents", is_number=True),
        Column("share", is_number=True),
        Column("", paint=style.dim),
    ]
    return table(columns, rows, style=style).splitlines()


def _span(bit: int) -> str:
    first, last = 2**bit, 2 ** (bit + 1) - 1
    return amounts.count(first) if first == last else f"{amounts.count(first)} to {amounts.count(last)}"


def _bar(count: int, most: int) -> str:
    """A bar in eighths of a letter; whoever is there at all is seen."""
    eighths = max(count * _BAR * 8 // most, 1) if count else 0
    whole, rest = divmod(eighths, 8)
    return (_EIGHTHS[8] * whole + _EIGHTHS[rest]).rstrip()
