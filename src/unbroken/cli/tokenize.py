"""``unbroken tokenize``: from a folder of text to shards."""

import os
import time
from contextlib import AbstractContextManager
from fractions import Fraction
from pathlib import Path

import click

from unbroken.cli.output import Advance, Output, as_command
from unbroken.data.ingest.tokenize import TokenizeReport, TokenizeRequest, tokenize
from unbroken.data.ingest.work_folder import TokenizeOptions
from unbroken.data.packing.windows import require_bakeable
from unbroken.errors import BadUsage
from unbroken.quoting import amounts

_COMMAND = "unbroken tokenize"
_DEFAULTS = TokenizeOptions()


@as_command("tokenize")
@click.option("--input-dir", required=True, metavar="DIR", type=click.Path(path_type=Path), help="The text.")
@click.option("--output-dir", required=True, metavar="DIR", type=click.Path(path_type=Path), help="The shards.")
@click.option(
    "--tokenizer-path",
    default="gpt2",
    show_default=True,
    metavar="TOKENIZER",
    help="A tokenizer.json, a folder that holds one, a name of the hub, or 'bytes'.",
)
@click.option("--num-workers", type=click.IntRange(1), metavar="N", help="Processes; as many as cores by default.")
@click.option(
    "--shard-tokens",
    type=click.IntRange(1, 1 << 40),
    default=_DEFAULTS.shard_tokens,
    show_default=True,
    metavar="N",
    help="The most tokens of a shard.",
)
@click.option("--text-field", default=_DEFAULTS.text_field, show_default=True, help="The field or column of the text.")
@click.option(
    "--min-text-length",
    type=click.IntRange(0),
    default=_DEFAULTS.min_text_length,
    show_default=True,
    metavar="N",
    help="Leave out documents of fewer characters.",
)
@click.option("--skip-bad", is_flag=True, help="Count documents that cannot be read instead of refusing them.")
@click.option("--val-fraction", metavar="F", help="The share of documents for val/, chosen by their text.")
@click.option("--bake-windows", is_flag=True, help="Cut documents into windows now, not when training.")
@click.option("--max-length", type=click.IntRange(2), metavar="N", help="Tokens of a baked window.")
@click.option("--overlap-size", type=click.IntRange(0), metavar="N", help="Tokens two baked windows share; at least 1.")
@click.option("--probabilistic-overlap", is_flag=True, help="Give that overlap to some documents only, by their text.")
@click.option("--overlap-probability", metavar="P", help="The share of documents that get it; 0.7 by default.")
@click.option("--eod-token", metavar="TOKEN", help="The token that ends a document, where it is not found by itself.")
@click.option("--add", is_flag=True, help="Tokenize files that came after the shards were finished.")
@click.option(
    "--accelerator",
    type=click.Choice(["auto", "off"]),
    default="auto",
    show_default=True,
    help="A faster engine, compared with the reference on samples of every shard.",
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
    """Tokenize text into shards; killed, the same command goes on.

    Reads .jsonl, .jsonl.gz, .jsonl.zst, .parquet and .txt (one document a file) and keeps the folders they lie in.
    Documents are kept whole: windows are made when training.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise BadUsage(command=_COMMAND, complaint=f"--output-dir is a file and not a folder: {output_dir}")
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
        workers=num_workers or len(os.sched_getaffinity(0)),
        accelerate=accelerator == "auto",
        skip_bad=skip_bad,
        add=add,
    )

    def progress(total_bytes: int) -> AbstractContextManager[Advance]:
        return output.progress("tokenize", total_bytes, is_bytes=True)

    started = time.monotonic()
    try:
        report = tokenize(request, progress=progress)
    except KeyboardInterrupt:
        output.note("interrupted; what was finished stays, and the same command goes on")
        raise
    took_s = time.monotonic() - started
    output.document("unbroken.tokenize/1", _facts(request, report, took_s), lambda: _text(request, report, took_s))


def _require_windows(*, bake_windows: bool, max_length: int | None, overlap_size: int | None) -> None:
    if bake_windows:
        if max_length is None:
            raise BadUsage(command=_COMMAND, complaint="--bake-windows needs --max-length")
        try:
            require_bakeable(max_length, overlap_size or 1)
        except ValueError as wrong:
            raise BadUsage(command=_COMMAND, complaint=str(wrong)) from wrong
    elif max_length is not None or overlap_size is not None:
        complaint = (
            "--max-length and --overlap-size are for --bake-windows; documents are kept whole, and windows are "
            "made when training, as data.max_length and data.overlap_size of the config say"
        )
        raise BadUsage(command=_COMMAND, complaint=complaint)


def _overlap_share(probability: str | None, is_asked: bool, bake_windows: bool) -> str | None:
    """The share of documents whose windows overlap; None: all of them."""
    if is_asked and not bake_windows:
        complaint = "--probabilistic-overlap is for --bake-windows; when training, all documents overlap alike"
        raise BadUsage(command=_COMMAND, complaint=complaint)
    if probability is not None and not is_asked:
        raise BadUsage(command=_COMMAND, complaint="--overlap-probability needs --probabilistic-overlap")
    return _fraction("--overlap-probability", probability or "0.7") if is_asked else None


def _fraction(option: str, text: str | None) -> str | None:
    """A share in one spelling, so that 0.1 and 0.10 are the same option."""
    if text is None:
        return None
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 < share < 1:
        raise BadUsage(command=_COMMAND, complaint=f"{option} is '{text}'; it lies between 0 and 1")
    return str(share)


def _facts(request: TokenizeRequest, report: TokenizeReport, took_s: float) -> dict[str, object]:
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
        "kept_units": report.kept_units,
        "seconds": round(took_s, 3),
    }


def _text(request: TokenizeRequest, report: TokenizeReport, took_s: float) -> str:
    totals = report.totals
    held = (
        f"{amounts.plural(totals.documents, 'document')}, {amounts.plural(totals.tokens, 'token')}, "
        f"{amounts.plural(totals.shards, 'shard')}"
    )
    if not report.is_new:
        return f"nothing to do  {request.output_dir}  {held}"
    lines = [f"tokenized  {request.output_dir}  {held}"]
    if totals.skipped:
        read = totals.documents + sum(totals.skipped.values())
        why = ", ".join(f"{amounts.count(n)} {why}" for why, n in totals.skipped.items())
        lines.append(f"skipped    {why} of {amounts.plural(read, 'document')}")
    if report.unknown:
        shown = ", ".join(report.unknown[:5]) + (" and more" if len(report.unknown) > 5 else "")
        lines.append(f"not read   {amounts.plural(len(report.unknown), 'file')} of other kinds: {shown}")
    if report.kept_units:
        lines.append(f"went on    {report.kept_units} of {report.kept_units + report.new_units} units were done before")
    speed = amounts.count(round(report.new_tokens / took_s)) if took_s > 0 else "-"
    lines.append(f"took       {amounts.duration(took_s)}, {speed} tokens/s")
    lines.append(f"engine     {report.engine}")
    return "\n".join(lines)
