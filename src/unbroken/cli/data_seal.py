"""``unbroken data seal``: adds checksums to the shards of another tool."""

from pathlib import Path

import click

from unbroken.cli.arguments import DiskPath
from unbroken.cli.output import Output, as_command
from unbroken.data.corpus.folders import walk
from unbroken.data.corpus.listing import LISTING
from unbroken.data.corpus.seal_shards import seal_shards
from unbroken.data.ingest.encoders import find_tokenizer, load_encoder
from unbroken.errors import PathMissing
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable


@as_command("seal", examples=(("unbroken data seal data --tokenizer gpt2", "also record the tokenizer"),))
@click.argument("directory", metavar="DIR", type=DiskPath())
@click.option("--tokenizer", metavar="NAME|PATH", help="Tokenizer of the shards; recorded, and checked from then on.")
def command(output: Output, directory: Path, tokenizer: str | None) -> None:
    """Add checksums to shards of another tool.

    DIR is a data directory with train/, or the directory of one split or bucket. Reads all shards and changes none;
    writes one file shards.json into each split, or into DIR itself.
    """
    if not directory.is_dir():
        raise PathMissing(path=directory, purpose="data directory")
    identity = load_encoder(find_tokenizer(tokenizer)).identity if tokenizer else None
    folders = _folders(directory)
    total = sum(path.stat().st_size for folder in folders for path in folder.rglob("*.bin"))
    with output.progress("seal", total, is_bytes=True) as advance:
        done = [(folder, seal_shards(folder, identity, progress=advance)) for folder in folders]
    fields = {
        "path": str(directory),
        "sealed": [
            {
                "list": str(folder / LISTING),
                "shards": len(listing.shards),
                "documents": sum(shard.entries for shard in listing.shards),
                "tokens": sum(shard.tokens for shard in listing.shards),
            }
            for folder, listing in done
        ],
    }

    def text() -> str:
        lines = []
        for folder, listing in done:
            shards = amounts.plural(len(listing.shards), "shard")
            tokens = amounts.plural(sum(shard.tokens for shard in listing.shards), "token")
            where = printable(str(folder / LISTING))
            lines.append(f"{output.style.good('sealed')}  {where}  ({shards}, {tokens})")
        return "\n".join(lines)

    output.document("unbroken.data-seal/1", fields, text)


def _folders(directory: Path) -> list[Path]:
    """The splits that hold shards, or the directory itself."""
    splits = [directory / name for name in ("train", "val") if (directory / name).is_dir()]
    with_shards = [folder for folder in splits if walk(folder, follows_buckets=False).stems]
    return with_shards or [directory]
