"""``unbroken init``: a commented config to start from."""

import os
from pathlib import Path

import click

from unbroken.cli.output import Output, as_command
from unbroken.config import PRESETS, preset
from unbroken.config.commented import commented
from unbroken.errors import BadUsage, Help, PathMissing, WouldOverwrite
from unbroken.errors.tree import quoted
from unbroken.files import LOCAL


@as_command("init")
@click.option(
    "--preset",
    "name",
    type=click.Choice(list(PRESETS)),
    default="small",
    show_default=True,
    help="The size to start from.",
)
@click.option(
    "-o", "--output", "target", type=click.Path(path_type=Path), help="Write this file instead of standard output."
)
def command(output: Output, name: str, target: Path | None) -> None:
    """Write a commented config to start from.

    Without -o the config goes to standard output. A file that exists is never replaced.
    """
    text = commented(preset(name), f"A config for unbroken, preset {name}: {PRESETS[name]}.")
    facts = {"preset": name, "path": None if target is None else str(target), "text": text}
    if target is None or str(target) == "-":
        output.document("unbroken.init/1", facts, lambda: text)
        return
    _write(target, text)

    def said() -> str:
        return f"wrote {target}  (preset {name}: {PRESETS[name]})\nnext: unbroken validate {quoted(target)}"

    output.document("unbroken.init/1", facts, said)


def _write(target: Path, text: str) -> None:
    if target.is_dir():
        raise BadUsage(command="unbroken init", complaint=f"-o takes a file's name; '{target}' is a directory")
    if not target.parent.is_dir():
        raise PathMissing(path=target.parent, purpose="directory")
    # The process id keeps two inits beside each other from sharing a scratch file.
    if not LOCAL.create_once(target, text.encode(), scratch=f".{target.name}.{os.getpid()}.tmp"):
        remedy = Help(f"unbroken validate {quoted(target)}", "check the one that is there")
        raise WouldOverwrite(path=target, remedy=remedy)
