"""``unbroken data show``: decodes one sample and shows which documents it is made of."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from unbroken.cli.arguments import DiskPath
from unbroken.cli.data_input import DataArguments, Decode, Input, decoder_of, window_options
from unbroken.cli.output import Output, as_command
from unbroken.data.corpus.shards import ShardIndex
from unbroken.data.stream import Stream
from unbroken.errors import BadUsage, TokenizerUnknown
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.report.style import Style

# ---- where a sample comes from ----


@dataclass(frozen=True)
class DescribedWindow:
    """One window of a sample: tokens ``first`` to ``last`` of a document; the first ``masked`` of them are masked."""

    shard: str
    document: int
    document_tokens: int
    first: int
    last: int
    masked: int


@dataclass(frozen=True)
class Described:
    """One sample: its position in the bucket, its windows, and their tokens without padding."""

    sample: int
    bucket: str
    phase: int
    ordinal: int
    epoch: int
    windows: tuple[DescribedWindow, ...]
    tokens: tuple[int, ...]


def describe(stream: Stream, sample: int) -> Described:
    """Describe one sample.

    Raises:
        IndexError: it is negative or beyond the end.
        ShardDamaged: a shard is damaged.
        StorageFailed: a shard could not be read.
    """
    asked = np.array([sample], np.int64)
    number, ordinal = (int(each[0]) for each in stream.schedule.locate(asked))
    bucket = stream.buckets[number]
    group, sequence = bucket.order.locate(np.array([ordinal], np.int64))
    _, _, slots = next(iter(bucket.windows(group, sequence)))
    rows = (each.tolist() for each in (slots.shard, slots.offset, slots.length, slots.masked))
    windows = tuple(_window(stream, *row) for row in zip(*rows, strict=True))
    used = sum(window.last - window.first for window in windows)
    return Described(
        sample=sample,
        bucket=bucket.name,
        phase=stream.schedule.phase_at(sample),
        ordinal=ordinal,
        epoch=int(bucket.order.epoch_of(np.array([ordinal], np.int64))[0]),
        windows=windows,
        tokens=tuple(stream.read(asked).tokens[0, :used].tolist()),
    )


def _window(stream: Stream, number: int, offset: int, length: int, masked: int) -> DescribedWindow:
    shard = stream.shards[number]
    index = shard.index
    entry = _entry_at(index, offset)
    start, end = index.offsets(entry, entry + 1).tolist()
    return DescribedWindow(shard.name, entry, end - start, offset - start, offset - start + length, masked)


def _entry_at(index: ShardIndex, offset: int) -> int:
    """The document of a token, by bisection in the file: an index may be larger than memory."""
    low, high = 0, index.entries - 1
    while low < high:
        middle = (low + high + 1) // 2
        if int(index.offsets(middle, middle)[0]) <= offset:
            low = middle
        else:
            high = middle - 1
    return low


# ---- the command ----

_COMMAND: Final = "unbroken data show"
# With the indentation of five, a line fills a terminal of 80 columns.
_WIDTH: Final = 75
_LINES: Final = 4


@as_command(
    "show",
    examples=(
        ("unbroken data show 0 data", "the first sample of a data directory"),
        ("unbroken data show 4096 --config config.yaml", "a sample of a run"),
    ),
)
@click.argument("sample", metavar="K", type=click.IntRange(0))
@click.argument("directory", metavar="[DIR]", required=False, type=DiskPath())
@click.option("--tokenizer", metavar="NAME|PATH", help="Tokenizer, if the data does not name it.")
@click.option("--whole", is_flag=True, help="Print whole windows, not only the first lines.")
@window_options
def command(
    output: Output,
    sample: int,
    directory: Path | None,
    tokenizer: str | None,
    whole: bool,
    **options: Any,  # noqa: ANN401 -- see DataArguments
) -> None:
    """Decode one training sample.

    K is the index of the sample, from 0: step S of a run with global batch size B starts with sample S x B. Give DIR,
    or --config for the order of that run. Fails if the data changed after training read it.
    """
    asked = DataArguments(_COMMAND, directory, **options).open()
    stream = asked.stream(output)
    if stream.end is not None and sample >= stream.end:
        complaint = f"no sample {amounts.count(sample)}; the last one is {amounts.count(stream.end - 1)}"
        raise BadUsage(command=_COMMAND, complaint=complaint)
    decode = _decoder(output, asked, tokenizer)
    stream.verify_known(sample)
    described = describe(stream, sample)
    output.document(
        "unbroken.data-show/1",
        _fields(described, stream, decode),
        lambda: _text(described, asked, stream, decode, is_whole=whole, style=output.style),
    )


def _decoder(output: Output, asked: Input, tokenizer: str | None) -> Decode | None:
    if tokenizer is not None or not asked.is_config:
        decode = decoder_of(asked.corpus, tokenizer)
        if decode is None:
            output.note(_without_text(asked))
        return decode
    try:
        return decoder_of(asked.corpus, asked.config.data.tokenizer)
    except TokenizerUnknown as unknown:
        output.note(f"{unknown}: showing token ids")
        return None


def _without_text(asked: Input) -> str:
    made_by = asked.corpus.tokenizer
    if made_by is None:
        return "showing token ids: the tokenizer of this data is unknown; name it with --tokenizer NAME|PATH"
    return f"showing token ids: pass --tokenizer with the name or path of '{printable(made_by.name)}' to decode them"


def _pieces(described: Described) -> list[tuple[DescribedWindow, list[int]]]:
    pieces, at = [], 0
    for window in described.windows:
        length = window.last - window.first
        pieces.append((window, list(described.tokens[at : at + length])))
        at += length
    return pieces


def _fields(described: Described, stream: Stream, decode: Decode | None) -> dict[str, Any]:
    return {
        "sample": described.sample,
        "bucket": described.bucket,
        "phase": described.phase,
        "ordinal": described.ordinal,
        "epoch": described.epoch,
        "max_length": stream.max_length,
        "padding": stream.max_length - len(described.tokens),
        "windows": [
            {**vars(window), "tokens": ids, "text": decode(ids) if decode else None}
            for window, ids in _pieces(described)
        ],
    }


def _text(
    described: Described, asked: Input, stream: Stream, decode: Decode | None, *, is_whole: bool, style: Style
) -> str:
    bucket = next(each for each in stream.buckets if each.name == described.bucket)
    in_phase = f", phase {described.phase + 1}" if asked.config.data.curriculum else ""
    used = len(described.tokens)
    lines = [
        f"{style.bold(f'sample {amounts.count(described.sample)}')}  of {printable(str(asked.corpus.root))}",
        (
            f"bucket   {printable(described.bucket)}{in_phase}, draw {amounts.count(described.ordinal)}, "
            f"epoch {described.epoch + 1} of {amounts.plural(bucket.sequences, 'sequence')}"
        ),
        (
            f"tokens   {amounts.count(used)} of {amounts.count(stream.max_length)} used "
            f"({100 * used / stream.max_length:.1f} %), {amounts.plural(len(described.windows), 'window')}"
        ),
    ]
    for number, (window, ids) in enumerate(_pieces(described), start=1):
        lines += ["", _heading(number, window, style), *_body(ids, decode, is_whole=is_whole, style=style)]
    return "\n".join(lines)


def _heading(number: int, window: DescribedWindow, style: Style) -> str:
    length = window.last - window.first
    if length == window.document_tokens:
        part = f"all {amounts.plural(length, 'token')}"
    else:
        part = (
            f"tokens {amounts.count(window.first)} to {amounts.count(window.last - 1)} "
            f"of {amounts.count(window.document_tokens)}"
        )
    masked = f", the first {amounts.count(window.masked)} masked" if window.masked else ""
    where = f"{printable(window.shard)}, document {amounts.count(window.document)}"
    return f"{style.good(f'{number:>3}')}  {where}  {style.dim(f'{part}{masked}')}"


def _body(ids: list[int], decode: Decode | None, *, is_whole: bool, style: Style) -> list[str]:
    text = decode(ids) if decode else " ".join(map(str, ids))
    # Line breaks of the document are shown as a symbol, so that one line here is one line of the terminal.
    letters = printable(text.replace("\n", "⏎"))
    cut = [letters[at : at + _WIDTH] for at in range(0, len(letters), _WIDTH)] or [""]
    if len(cut) > _LINES and not is_whole:
        hidden = len(letters) - _LINES * _WIDTH
        cut = [*cut[:_LINES], style.dim(f"… {amounts.plural(hidden, 'character')} more")]
    return [f"     {line}" for line in cut]
