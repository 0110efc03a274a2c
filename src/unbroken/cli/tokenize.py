"""``unbroken tokenize``: tokenizes a directory of text into shards."""

import os
import time
from contextlib import AbstractContextManager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unbroken.cli.arguments import DiskPath
from unbroken.cli.output import Advance, Output, as_command
from unbroken.data.ingest.request import TokenizeOptions, TokenizeRequest
from unbroken.errors import BadUsage
from unbroken.quoting import amounts

if TYPE_CHECKING:
    from unbroken.data.ingest.tokenize import TokenizeReport

_COMMAND = "unbroken tokenize"
_DEFAULTS = TokenizeOptions()


@as_command(
    "tokenize",
    examples=(
        ("unbroken tokenize --input-dir text --output-dir data", "GPT-2 tokenizer, all cores"),
        ("unbroken tokenize --input-dir text --output-dir data --val-fraction 0.01", "with a val/ split"),
        ("unbroken tokenize --input-dir text --output-dir data --add", "only files that are new"),
    ),
    exit_codes={0: "all shards are written", 4: "a document cannot be read; --skip-bad counts it instead"},
)
@click.option("--input-dir", required=True, metavar="DIR", type=DiskPath(), help="Directory of text files.")
@click.option("--output-dir", required=True, metavar="DIR", type=DiskPath(), help="Directory for the shards.")
@click.option(
    "--tokenizer-path",
    default="gpt2",
    metavar="TOKENIZER",
    help="A tokenizer.json, a directory with one, a Hugging Face Hub name, or 'bytes'.",
)
@click.option(
    "--num-workers", type=click.IntRange(1), metavar="N", help="Worker processes; default: number of CPU cores."
)
@click.option(
    "--shard-tokens",
    type=click.IntRange(1, 1 << 40),
    default=_DEFAULTS.shard_tokens,
    metavar="N",
    help="Maximum number of tokens per shard.",
)
@click.option(
    "--text-field", default=_DEFAULTS.text_field, metavar="NAME", help="JSON field or Parquet column with the text."
)
@click.option(
    "--min-text-length",
    type=click.IntRange(0),
    default=_DEFAULTS.min_text_length,
    metavar="N",
    help="Skip documents with fewer characters.",
)
@click.option("--skip-bad", is_flag=True, help="Skip and count unreadable documents instead of failing.")
@click.option("--val-fraction", metavar="F", help="Fraction of documents for val/, chosen by a hash of the text.")
@click.option("--bake-windows", is_flag=True, help="Cut documents into windows now instead of during training.")
@click.option("--max-length", type=click.IntRange(2), metavar="N", help="Tokens per window, with --bake-windows.")
@click.option(
    "--overlap-size",
    type=click.IntRange(0),
    metavar="N",
    help="Tokens shared by two windows, with --bake-windows; at least 1.",
)
@click.option(
    "--probabilistic-overlap", is_flag=True, help="Overlap only some documents, chosen by a hash of the text."
)
@click.option("--overlap-probability", metavar="P", help="Fraction of documents that overlap; default: 0.7.")
@click.option("--eod-token", metavar="TOKEN", help="End-of-document token; default: detected from the tokenizer.")
@click.option("--add", is_flag=True, help="Tokenize files added since the shards were finished.")
@click.option(
    "--accelerator",
    type=click.Choice(["auto", "off"]),
    default="auto",
    help="Use a faster tokenizer engine, checked against the reference on samples of each shard.",
)
def command(
    output: Output,
    input_dir: Path,
    output_dir: Path,
    tokenizer_path: str,
    num_workers: int | None,
    shard_tokens: int,
    text_field: str,
    min_text_length: int,
    skip_bad: bool,
    val_fraction: str | None,
    bake_windows: bool,
    max_length: int | None,
    overlap_size: int | None,
    probabilistic_overlap: bool,
    overlap_probability: str | None,
    eod_token: str | None,
    add: bool,
    accelerator: str,
) -> None:
    """Tokenize text into shards (resumable).

    Reads .jsonl, .jsonl.gz, .jsonl.zst, .parquet and .txt (one document per file). Subdirectories become buckets.
    Documents are stored whole; training cuts them into windows. If the command is killed, run it again to resume.
    Run it several times at once, on one or many nodes with a shared file system, to share the work.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise BadUsage(command=_COMMAND, complaint=f"--output-dir is a file, not a directory: {output_dir}")
    _require_windows(bake_windows=bake_windows, max_length=max_length, overlap_size=overlap_size)
    options = TokenizeOptions(
        text_field=text_field,
        min_text_length=min_text_length,
        shard_tokens=shard_tokens,
        val_fraction=_fraction("--val-fraction", val_fraction),
        max_length=max_length,
        overlap_size=overlap_size or 1 if bake_windows else None,  # 0 would leave first tokens untrained
        overlap_probability=_overlap_share(overlap_probability, probabilistic_overlap, bake_windows),
    )
    request = TokenizeRequest(
        input_dir=input_dir,
        output_dir=output_dir,
        tokenizer=tokenizer_path,
        options=options,
        eod_token=eod_token,
        num_workers=num_workers or len(os.sched_getaffinity(0)),
        accelerate=accelerator == "auto",
        skip_bad=skip_bad,
        add=add,
    )
    started = time.monotonic()
    report = _tokenized(output, request)
    took_s = time.monotonic() - started
    output.document("unbroken.tokenize/1", _fields(request, report, took_s), lambda: _text(request, report, took_s))


def _tokenized(output: Output, request: TokenizeRequest) -> "TokenizeReport":
    from unbroken.data.ingest.tokenize import tokenize

    def progress(total_bytes: int) -> AbstractContextManager[Advance]:
        return output.progress("tokenize", total_bytes, is_bytes=True)

    try:
        return tokenize(request, progress=progress, say=output.note)
    except KeyboardInterrupt:
        output.note("interrupted; run the same command again to resume")
        raise


def _require_windows(*, bake_windows: bool, max_length: int | None, overlap_size: int | None) -> None:
    from unbroken.data.packing.windows import require_bakeable

    if bake_windows:
        if max_length is None:
            raise BadUsage(command=_COMMAND, complaint="--bake-windows needs --max-length")
        try:
            require_bakeable(max_length, overlap_size or 1)
        except ValueError as wrong:
            raise BadUsage(command=_COMMAND, complaint=str(wrong)) from wrong
    elif max_length is not None or overlap_size is not None:
        complaint = (
            "--max-length and --overlap-size need --bake-windows; without it, training cuts windows by "
            "data.max_length and data.overlap_size of the config"
        )
        raise BadUsage(command=_COMMAND, complaint=complaint)


def _overlap_share(probability: str | None, is_asked: bool, bake_windows: bool) -> str | None:
    """The fraction of documents whose windows overlap; None for all."""
    if is_asked and not bake_windows:
        complaint = "--probabilistic-overlap needs --bake-windows; training overlaps all documents"
        raise BadUsage(command=_COMMAND, complaint=complaint)
    if probability is not None and not is_asked:
        raise BadUsage(command=_COMMAND, complaint="--overlap-probability needs --probabilistic-overlap")
    return _fraction("--overlap-probability", probability or "0.7") if is_asked else None


def _fraction(option: str, text: str | None) -> str | None:
    """A fraction in one spelling, so that 0.1 and 0.10 are the same option."""
    if text is None:
        return None
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 < share < 1:
        raise BadUsage(command=_COMMAND, complaint=f"{option} must be between 0 and 1, not '{text}'")
    return str(share)


def _fields(request: TokenizeRequest, report: "TokenizeReport", took_s: float) -> dict[str, object]:
    totals = report.totals
    return {
        "output_dir": request.output_dir,
        "documents": totals.documents,
        "tokens": totals.tokens,
        "shards": totals.shards,
        "skipped": dict(totals.skipped),
        "unknown_files": list(report.unknown),
        "engine": report.engine,
        "is_new": report.is_new,
        "new_tokens": report.new_tokens,
        "new_units": report.new_units,
        "other_units": report.other_units,
        "kept_units": report.kept_units,
        "seconds": round(took_s, 3),
    }


def _text(request: TokenizeRequest, report: "TokenizeReport", took_s: float) -> str:
    totals = report.totals
    held = (
        f"{amounts.plural(totals.documents, 'document')}, {amounts.plural(totals.tokens, 'token')}, "
        f"{amounts.plural(totals.shards, 'shard')}"
    )
    if not report.is_new:
        return f"up to date  {request.output_dir}  {held}"
    units = report.kept_units + report.new_units + report.other_units
    lines = [f"tokenized  {request.output_dir}  {held}"]
    if totals.skipped:
        read = totals.documents + sum(totals.skipped.values())
        why = ", ".join(f"{amounts.count(n)} {why}" for why, n in totals.skipped.items())
        lines.append(f"skipped    {why} of {amounts.plural(read, 'document')}")
    if report.unknown:
        shown = ", ".join(report.unknown[:5]) + (" and more" if len(report.unknown) > 5 else "")
        lines.append(f"ignored    {amounts.plural(len(report.unknown), 'file')} of other types: {shown}")
    if report.kept_units:
        lines.append(f"resumed    {report.kept_units} of {units} units were already done")
    if report.other_units:
        lines.append(f"shared     {report.other_units} of {units} units were done by other processes")
    speed = amounts.count(round(report.new_tokens / took_s)) if took_s > 0 else "-"
    lines.append(f"took       {amounts.duration(took_s)}, {speed} tokens/s")
    lines.append(f"engine     {report.engine}")
    return "\n".join(lines)
