"""``unbroken tokenizer``: trains tokenizers."""

from pathlib import Path
from typing import Final

import click

from unbroken.cli.arguments import DiskPath
from unbroken.cli.commands import Entry
from unbroken.cli.group import command_group
from unbroken.cli.output import Output, as_command
from unbroken.data.ingest.train_tokenizer import LEAST_VOCABULARY, train_tokenizer
from unbroken.quoting import amounts


@as_command("train", examples=(("unbroken tokenizer train text -o tokenizer.json", "4,096 tokens"),))
@click.argument("input_dir", metavar="INPUT_DIR", type=DiskPath())
@click.option(
    "-o",
    "--output",
    "target",
    required=True,
    metavar="FILE",
    type=DiskPath(),
    help="tokenizer.json to write.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(LEAST_VOCABULARY, 1 << 20),
    default=4096,
    metavar="N",
    help="Maximum vocabulary size.",
)
@click.option("--text-field", default="text", metavar="NAME", help="JSON field or Parquet column with the text.")
def train(output: Output, input_dir: Path, target: Path, vocab_size: int, text_field: str) -> None:
    """Train a byte-level BPE tokenizer.

    INPUT_DIR holds the same file types as for `unbroken tokenize`. The same documents always give the same file. The
    end-of-document token is <|endoftext|>.
    """
    trained = train_tokenizer(input_dir, target, vocab_size=vocab_size, text_field=text_field)
    fields = {
        "path": trained.path,
        "vocab_size": trained.vocab_size,
        "documents": trained.documents,
        "text_bytes": trained.text_bytes,
    }
    output.document(
        "unbroken.tokenizer.train/1",
        fields,
        lambda: (
            f"trained  {trained.path}  {amounts.count(trained.vocab_size)} tokens, from "
            f"{amounts.plural(trained.documents, 'document')}, {amounts.size(trained.text_bytes)}"
        ),
    )


TABLE: Final = {
    "train": Entry("unbroken.cli.tokenizer:train", "Train a byte-level BPE tokenizer.", "Commands"),
}

command = command_group("tokenizer", TABLE, "Train a tokenizer on your own text.")
