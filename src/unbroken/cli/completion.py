"""``unbroken completion``: the script that teaches a shell to complete our commands."""

import click
from click.shell_completion import get_completion_class

from unbroken.cli.group import PROGRAM, ROOT
from unbroken.cli.main import COMPLETE_VARIABLE
from unbroken.cli.output import Output, as_command

EPILOG = """\b
bash: add to ~/.bashrc     eval "$(unbroken completion bash)"
zsh:  add to ~/.zshrc      eval "$(unbroken completion zsh)"
fish: run once             unbroken completion fish > ~/.config/fish/completions/unbroken.fish"""


@as_command("completion", epilog=EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(output: Output, shell: str) -> None:
    """Print a completion script for your shell."""
    shell_class = get_completion_class(shell)
    if shell_class is None:  # pragma: no cover -- the three shells are built in
        raise click.BadParameter(f"no completion for {shell}")
    script = shell_class(ROOT, {}, PROGRAM, COMPLETE_VARIABLE).source()
    output.document("unbroken.completion/1", {"shell": shell, "script": script}, lambda: script)
