"""``unbroken init``: writes a commented config."""

from pathlib import Path

import click

from unbroken.cli.arguments import DiskPath, write_new
from unbroken.cli.output import Output, as_command
from unbroken.config import PRESETS, preset
from unbroken.config.commented import commented
from unbroken.errors import Help
from unbroken.errors.tree import quoted


@as_command(
    "init",
    examples=(
        ("unbroken init -o config.yaml", "about 125 million parameters"),
        ("unbroken init --preset tiny -o tiny.yaml", "trains on a laptop CPU"),
    ),
)
@click.option(
    "--preset",
    "name",
    type=click.Choice(list(PRESETS)),
    default="small",
    help="Model size.",
)
@click.option("-o", "--output", "target", type=DiskPath(), help="File to write; default: standard output.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def command(output: Output, name: str, target: Path | None, force: bool) -> None:
    """Write a commented config file.

    Every field is listed with its default and what it does. Edit data.path and training.output_dir, then run
    `unbroken validate`.
    """
    text = commented(preset(name), f"A config for unbroken, preset {name}: {PRESETS[name]}.")
    fields = {"preset": name, "path": None if target is None else str(target), "text": text}
    if target is None or str(target) == "-":
        output.document("unbroken.init/1", fields, lambda: text, is_verbatim=True)
        return
    remedy = Help(f"unbroken validate {quoted(target)}", "check the existing file; --force overwrites it")
    write_new("unbroken init", target, text, remedy, is_replacing=force)

    def written() -> str:
        return f"wrote {target}  (preset {name}: {PRESETS[name]})\nnext: unbroken validate {quoted(target)}"

    output.document("unbroken.init/1", fields, written)
