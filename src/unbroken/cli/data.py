"""``unbroken data``: the group of commands on tokenized data, one file per command."""

from typing import Final

from unbroken.cli.commands import Entry
from unbroken.cli.group import command_group

_HEADING: Final = "Commands"

TABLE: Final = {
    "inspect": Entry("unbroken.cli.data_inspect:command", "List buckets, shards, documents and tokens.", _HEADING),
    "stats": Entry("unbroken.cli.data_stats:command", "Show document lengths and packing.", _HEADING),
    "show": Entry("unbroken.cli.data_show:command", "Decode one training sample.", _HEADING),
    "verify": Entry("unbroken.cli.data_verify:command", "Verify the checksums of all shards.", _HEADING),
    "seal": Entry("unbroken.cli.data_seal:command", "Add checksums to shards of another tool.", _HEADING),
}

command = command_group("data", TABLE, "Inspect, verify and decode tokenized data.")
