"""``unbroken data verify``: verifies the checksums of all shards."""

from pathlib import Path

import click

from unbroken.cli.arguments import DiskPath
from unbroken.cli.data_inspect import open_splits
from unbroken.cli.output import Output, as_command
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable


@as_command(
    "verify",
    examples=(("unbroken data verify data", "read and verify all shards"),),
    exit_codes={0: "all checksums are right", 4: "shards are missing or damaged; all of them are listed"},
)
@click.argument("directory", metavar="DIR", type=DiskPath())
def command(output: Output, directory: Path) -> None:
    """Verify the checksums of all shards.

    Changes nothing. Shards without a shards.json have no checksums; of those, structure and token ids are checked.
    """
    # The quick check finds which shards have checksums, the full one verifies them.
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
        proof = (
            "all checksums verified" if not unproven else f"{amounts.plural(len(unproven), 'shard')} without checksums"
        )
        counts = f"{amounts.plural(len(shards), 'shard')}, {amounts.size(read_bytes)} read, {proof}"
        return f"{output.style.good('ok')}  {printable(str(directory))}  ({counts})"

    output.document("unbroken.data-verify/1", fields, text)
