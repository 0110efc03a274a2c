"""``unbroken data inspect``: lists the content of a data directory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from unbroken.cli.arguments import DiskPath
from unbroken.cli.output import Output, as_command
from unbroken.data.corpus.catalogue import DEFAULT_BUCKET, Bucket, Check, Corpus, open_corpus
from unbroken.data.corpus.folders import walk
from unbroken.errors import DataDamaged, PathMissing
from unbroken.errors.tree import quoted
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.report.style import Style
from unbroken.report.table import Column, table


@as_command(
    "inspect",
    examples=(
        ("unbroken data inspect data", "check sizes and indexes"),
        ("unbroken data inspect data --full", "also verify all checksums"),
    ),
    exit_codes={0: "no problem found", 4: "shards are missing or damaged; all of them are listed"},
)
@click.argument("directory", metavar="DIR", type=DiskPath())
@click.option("--full", is_flag=True, help="Also verify all checksums.")
def command(output: Output, directory: Path, full: bool) -> None:
    """List buckets, shards, documents and tokens.

    DIR holds train/ and optionally val/; each directory in them is a bucket.
    """
    check: Check = "full" if full else "quick"
    corpora = open_splits(directory, check)
    output.document(
        "unbroken.data-inspect/1",
        {
            "path": str(directory),
            "check": check,
            "splits": [split_fields(each) for each in corpora],
        },
        lambda: _text(directory, corpora, is_full=full, style=output.style),
    )


def open_splits(directory: Path, check: Check) -> tuple[Corpus, ...]:
    """All splits of a data directory.

    Raises:
        PathMissing: the directory does not exist.
        DataDamaged: shards are damaged; lists the findings of all splits.
        DataError: there is no data, or it is incomplete.
    """
    if not directory.is_dir():
        raise PathMissing(path=directory, purpose="data directory")
    corpora, findings = [], []
    for split in _splits(directory):
        try:
            corpora.append(open_corpus(directory, split, check=check))
        except DataDamaged as damaged:
            findings += [f"{split}/{finding}" for finding in damaged.findings]
    if findings:
        raise DataDamaged(path=directory, findings=tuple(findings))
    return tuple(corpora)


def _splits(directory: Path) -> list[str]:
    """The directories that hold shards, and ``train`` in any case: its absence is an error."""
    others = sorted(
        path.name
        for path in directory.iterdir()
        if path.is_dir() and path.name != "train" and not path.name.startswith(".")
    )
    return ["train", *(name for name in others if walk(directory / name, follows_buckets=True).stems)]


def split_fields(corpus: Corpus) -> dict[str, Any]:
    """A split as JSON fields."""
    tokenizer = corpus.tokenizer
    return {
        "split": corpus.split,
        "digest": corpus.digest(),
        "tokenizer": tokenizer and vars(tokenizer),
        "buckets": [
            {
                "name": bucket.name,
                "documents": bucket.entries,
                "tokens": bucket.tokens,
                "size_bytes": _size(bucket),
                "shards": [
                    {
                        "name": shard.name,
                        "documents": shard.entries,
                        "tokens": shard.tokens,
                        "token_bytes": shard.token_bytes,
                        "index_digest": shard.index_digest,
                        "bin_digest": shard.bin_digest,
                    }
                    for shard in bucket.shards
                ],
            }
            for bucket in corpus.buckets
        ],
    }


def _size(bucket: Bucket) -> int:
    return sum(shard.bin_bytes for shard in bucket.shards)


def _text(directory: Path, corpora: Sequence[Corpus], *, is_full: bool, style: Style) -> str:
    columns = [
        Column("split"),
        Column("bucket"),
        *(Column(name, is_number=True) for name in ("shards", "documents", "tokens", "share", "size")),
    ]
    rows = [_row(corpus, bucket) for corpus in corpora for bucket in corpus.buckets]
    lines = [
        f"{style.good('ok')}         {printable(str(directory))}",
        f"tokenizer  {_tokenizers(corpora)}",
        "",
        table(columns, rows, style=style),
        "",
        style.dim(_checked(directory, corpora, is_full=is_full)),
    ]
    return "\n".join(lines)


def _row(corpus: Corpus, bucket: Bucket) -> tuple[str, ...]:
    total = sum(each.tokens for each in corpus.buckets)
    return (
        corpus.split,
        printable(bucket.name),
        amounts.count(len(bucket.shards)),
        amounts.count(bucket.entries),
        amounts.count(bucket.tokens),
        f"{100 * bucket.tokens / total:.1f} %",
        amounts.size(_size(bucket)),
    )


def _tokenizers(corpora: Sequence[Corpus]) -> str:
    found = {each.tokenizer for each in corpora if each.tokenizer}
    if not found:
        return "unknown"
    return "; ".join(
        f"{printable(each.name)}, {amounts.count(each.vocab_size)} tokens, end of document: {each.eod_id}"
        for each in sorted(found, key=lambda each: each.name)
    )


def _checked(directory: Path, corpora: Sequence[Corpus], *, is_full: bool) -> str:
    unproven = sum(shard.bin_digest is None for corpus in corpora for shard in corpus.shards)
    if is_full:
        return "all checksums verified"
    said = "sizes and indexes checked; --full verifies all checksums"
    if unproven:
        seal = f"unbroken data seal {quoted(_to_seal(directory, corpora))}"
        said += f"\n{amounts.plural(unproven, 'shard')} without checksums; add them: {seal}"
    return said


def _to_seal(directory: Path, corpora: Sequence[Corpus]) -> Path:
    """The argument of ``seal``: the whole directory, or the first bucket without checksums if others have them."""
    if all(shard.bin_digest is None for corpus in corpora for shard in corpus.shards):
        return directory
    return next(
        directory / corpus.split / ("" if bucket.name == DEFAULT_BUCKET else bucket.name)
        for corpus in corpora
        for bucket in corpus.buckets
        if any(shard.bin_digest is None for shard in bucket.shards)
    )
