"""``unbroken data verify``: is every byte of the data what was written?"""

from pathlib import Path

import click

from unbroken.cli.data_inspect import open_splits
from unbroken.cli.output import Output, as_command
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable


@as_command("verify")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def command(output: Output, directory: Path) -> None:
    """Read every byte and hold it to its digest.

    Nothing is changed. Exit code 0: sound; 4: something is missing or damaged, and all of it is named. Shards without a
    shards.json have no digest to be held to: of those the structure is checked, and whether each id is in the
    vocabulary.
    """
    # What is listed is seen in the quick check; a second look reads the bytes.
    listed = {
        (each.split, shard.bucket, shard.name)
        for each in open_splits(directory, "quick")
        for shard in each.shards
        if shard.bin_digest is not None
    }
    corpora = open_splits(directory, "full")
    shards = [(corpus.split, shard) for corpus in corpora for shard in corpus.shards]
    unproven = [
        f"{split}/{shard.bucket}/{shard.name}"
        for split, shard in shards
        if (split, shard.bucket, shard.name) not in listed
    ]
    read_bytes = sum(shard.bin_bytes for _, shard in shards)
    fields = {
        "path": str(directory),
        "is_sound": True,
        "shards": len(shards),
        "read_bytes": read_bytes,
        "unproven": unproven,
    }

    def text() -> str:
        proof = "every digest right" if not unproven else f"{amounts.plural(len(unproven), 'shard')} without a digest"
        counts = f"{amounts.plural(len(shards), 'shard')}, {amounts.size(read_bytes)} read, {proof}"
        return f"{output.style.good('sound')}  {printable(str(directory))}  ({counts})"

    output.document("unbroken.data-verify/1", fields, text)
