"""``unbroken completion``: prints a shell completion script."""

import click
from click.shell_completion import get_completion_class

from unbroken.cli.group import PROGRAM, ROOT
from unbroken.cli.main import COMPLETE_VARIABLE
from unbroken.cli.output import Output, as_command

EXAMPLES = (
    ('eval "$(unbroken completion bash)"', "bash: add this line to ~/.bashrc"),
    ('eval "$(unbroken completion zsh)"', "zsh: add this line to ~/.zshrc"),
    ("unbroken completion fish > ~/.config/fish/completions/unbroken.fish", "fish: run this once"),
)


@as_command("completion", examples=EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(output: Output, shell: str) -> None:
    """Print a shell completion script."""
    shell_class = get_completion_class(shell)
    if shell_class is None:  # pragma: no cover -- the three shells are built in
        raise click.BadParameter(f"no completion for {shell}")
    script = shell_class(ROOT, {}, PROGRAM, COMPLETE_VARIABLE).source()
    output.document("unbroken.completion/1", {"shell": shell, "script": script}, lambda: script, is_verbatim=True)
