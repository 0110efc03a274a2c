"""``unbroken tokenizer``: tokenizers of one's own."""

from pathlib import Path
from typing import Final

import click

from unbroken.cli.commands import Entry
from unbroken.cli.group import command_group
from unbroken.cli.output import Output, as_command
from unbroken.data.ingest.train_tokenizer import LEAST_VOCABULARY, train_tokenizer
from unbroken.quoting import amounts


@as_command("train")
@click.argument("input_dir", metavar="INPUT_DIR", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "target",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The tokenizer.json to write.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(LEAST_VOCABULARY, 1 << 20),
    default=4096,
    show_default=True,
    metavar="N",
    help="How many ids it has at most.",
)
@click.option("--text-field", default="text", show_default=True, help="The field or column of the text.")
def train(output: Output, input_dir: Path, target: Path, vocab_size: int, text_field: str) -> None:
    """Learn a byte-level BPE from the documents of a folder.

    The same documents give the same file. The end of a document is <|endoftext|>.
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
            f"trained  {trained.path}  {amounts.count(trained.vocab_size)} ids, from "
            f"{amounts.plural(trained.documents, 'document')}, {amounts.size(trained.text_bytes)}"
        ),
    )


TABLE: Final = {
    "train": Entry(
        "unbroken.cli.tokenizer:train", "Learn a byte-level BPE from the documents of a folder.", "Commands"
    ),
}

command = command_group("tokenizer", TABLE, "Make a tokenizer of your own text.")
