"""``unbroken data``: look at tokenized data, one file per command."""

from typing import Final

from unbroken.cli.commands import Entry
from unbroken.cli.group import command_group

_HEADING: Final = "Commands"

TABLE: Final = {
    "inspect": Entry(
        "unbroken.cli.data_inspect:command", "List buckets, shards, documents and tokens of a folder.", _HEADING
    ),
    "stats": Entry("unbroken.cli.data_stats:command", "Show document lengths and how they pack.", _HEADING),
    "show": Entry("unbroken.cli.data_show:command", "Decode one sample of a run.", _HEADING),
    "verify": Entry("unbroken.cli.data_verify:command", "Read every byte and hold it to its digest.", _HEADING),
    "seal": Entry("unbroken.cli.data_seal:command", "List the shards of another tool with digests.", _HEADING),
}

command = command_group("data", TABLE, "Look at tokenized data: what it holds, sample by sample.")
