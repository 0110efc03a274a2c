"""``unbroken init``: a commented config to start from."""

from pathlib import Path

import click

from unbroken.cli.arguments import write_new
from unbroken.cli.output import Output, as_command
from unbroken.config import PRESETS, preset
from unbroken.config.commented import commented
from unbroken.errors import Help
from unbroken.errors.tree import quoted


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
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def command(output: Output, name: str, target: Path | None, force: bool) -> None:
    """Write a commented config to start from.

    Without -o the config goes to standard output. A file that exists is replaced only with --force.
    """
    text = commented(preset(name), f"A config for unbroken, preset {name}: {PRESETS[name]}.")
    fields = {"preset": name, "path": None if target is None else str(target), "text": text}
    if target is None or str(target) == "-":
        output.document("unbroken.init/1", fields, lambda: text)
        return
    remedy = Help(f"unbroken validate {quoted(target)}", "check the one that is there; --force replaces it")
    write_new("unbroken init", target, text, remedy, is_replacing=force)

    def said() -> str:
        return f"wrote {target}  (preset {name}: {PRESETS[name]})\nnext: unbroken validate {quoted(target)}"

    output.document("unbroken.init/1", fields, said)
