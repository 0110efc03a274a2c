"""The root command and the groups below it: a command is imported only when it is called.

Also turns what click's parser complains about into ``BadUsage``, so that all errors look the same.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from unbroken.cli.commands import COMMANDS, Entry
from unbroken.cli.output import Output, OutputFlags, output_options, write_examples
from unbroken.errors import BadUsage, UnknownCommand
from unbroken.version import VERSION

PROGRAM = "unbroken"
EXIT_USAGE = 2
CLOSE = 0.6
NEARLY_AS_CLOSE = 0.1


class LazyGroup(click.Group):
    """A group over a static table; nothing but ``get_command`` imports a command's module."""

    def __init__(
        self,
        table: dict[str, Entry],
        *,
        examples: Sequence[tuple[str, str]] = (),
        **settings: Any,  # noqa: ANN401 -- click's own settings
    ) -> None:
        super().__init__(subcommand_metavar="COMMAND [ARGS]...", **settings)
        self.table, self.examples = table, examples

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None if the table has no such name."""
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that was called.

        Raises:
            UnknownCommand: there is no such command; similar names are suggested.
        """
        name = as_dashed(args[0])
        if name not in self.table and not name.startswith("-"):
            near = nearest(name, self.list_commands(ctx))
            raise UnknownCommand(name=args[0], nearest=near, group=ctx.command_path)
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Commands first, then options: whoever opens the help of a group looks for a command."""
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples, then what click prints last."""
        write_examples(formatter, self.examples)
        super().format_epilog(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands by heading, from the table alone."""
        widest = max(map(len, self.table), default=0)
        for heading in dict.fromkeys(entry.heading for entry in self.table.values()):
            with formatter.section(heading):
                formatter.write_dl(
                    [(f"{name:<{widest}}", e.help) for name, e in self.table.items() if e.heading == heading]
                )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names and options that start with ``incomplete``; imports no command."""
        named = [CompletionItem(n, help=e.help) for n, e in self.table.items() if n.startswith(incomplete)]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]


def as_dashed(token: str) -> str:
    """``--output_dir`` as ``--output-dir``: both spellings are accepted."""
    return token.replace("_", "-")


# What other tools call a command.
_OTHER_NAMES: Final = {
    "resume": "train",
    "continue": "train",
    "list": "ls",
    "delete": "prune",
    "rm": "prune",
    "kill": "stop",
    "cancel": "stop",
    "upload": "mirror",
    "download": "fetch",
    "convert": "import",
    "watch": "status",
    "eval": "evaluate",
}


def nearest(name: str, known: list[str]) -> tuple[str, ...]:
    """Known names that a typo could have meant, most similar first; much less similar ones are left out."""
    if _OTHER_NAMES.get(name) in known:
        return (_OTHER_NAMES[name],)
    # Imported here: only a typo needs it.
    import difflib

    likeness = {each: difflib.SequenceMatcher(None, name, each).ratio() for each in known}
    likeness |= {each: 1.0 for each in known if len(name) > 1 and each.startswith(name)}
    bar = max(CLOSE, max(likeness.values(), default=0.0) - NEARLY_AS_CLOSE)
    near = [each for each in known if likeness[each] >= bar]
    return tuple(sorted(near, key=lambda each: -likeness[each])[:3])


def _root(json: bool, quiet: bool, verbose: bool, version: bool) -> int | None:
    """Fault-tolerant training: kill a run at any time, resume it bit for bit."""
    ctx = click.get_current_context()
    ctx.obj = OutputFlags().joined(json=json, quiet=quiet, verbose=verbose)
    if version:
        output = Output(json=json, quiet=quiet, stdout=sys.stdout, stderr=sys.stderr, environ=os.environ)
        output.document("unbroken.version/1", {"version": VERSION}, lambda: version_line(VERSION))
        ctx.exit(0)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(EXIT_USAGE)
    return None


def command_group(
    name: str,
    table: dict[str, Entry],
    help: str,  # noqa: A002 -- click's word
    *,
    examples: Sequence[tuple[str, str]] = (),
) -> LazyGroup:
    """A command that is a group of commands, with a table of its own."""
    settings: dict[str, Any] = {"invoke_without_command": True, "params": output_options()}
    return LazyGroup(table, name=name, callback=_remember, help=help, examples=examples, **settings)


def _remember(json: bool, quiet: bool, verbose: bool) -> None:
    """Pass the options before the subcommand's name on to the subcommand."""
    ctx = click.get_current_context()
    asked = ctx.obj if isinstance(ctx.obj, OutputFlags) else OutputFlags()
    ctx.obj = asked.joined(json=json, quiet=quiet, verbose=verbose)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(EXIT_USAGE)


def version_line(version: str) -> str:
    """What ``--version`` prints."""
    return f"{PROGRAM} {version}"


EPILOG = """\b
RUN is the run directory (training.output_dir). CHECKPOINT is RUN@STEP,
RUN@latest, RUN for the newest one, or the directory of the checkpoint.

\b
unbroken COMMAND --help       arguments, examples and exit codes of a command
unbroken explain exit-codes   what each exit code means
unbroken explain ERROR        what an error means and how to fix it"""

ROOT = LazyGroup(
    COMMANDS,
    name=PROGRAM,
    callback=_root,
    help=_root.__doc__,
    invoke_without_command=True,
    params=[
        *output_options(),
        click.Option(["--version"], is_flag=True, help="Print the version."),
    ],
    examples=(
        ("unbroken init -o config.yaml", "write a config"),
        ("unbroken train config.yaml", "start the run; repeat to resume it"),
        ("unbroken status runs/a", "see how far it is"),
        ("unbroken stop runs/a", "save and stop"),
    ),
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": as_dashed, "show_default": True},
)


# ---- errors of the parser ----


def as_bad_usage(complaint: click.ClickException) -> BadUsage:
    """An error of click's parser as ``BadUsage``."""
    ctx = getattr(complaint, "ctx", None)
    command = ctx.command_path if isinstance(ctx, click.Context) else "unbroken"
    return BadUsage(command=command, complaint=_worded(complaint))


def _worded(complaint: click.ClickException) -> str:
    if isinstance(complaint, click.NoSuchOption):
        meant = f"; did you mean {' or '.join(complaint.possibilities)}?" if complaint.possibilities else ""
        return f"no such option: {complaint.option_name}{meant}"
    if isinstance(complaint, click.MissingParameter) and complaint.param is not None:
        if isinstance(complaint.param, click.Argument):
            return f"missing argument {complaint.param.human_readable_name}"
        return f"missing option {complaint.param.opts[0]}"
    message = " ".join(complaint.format_message().split()).removesuffix(".")
    # click names the type of a bounded number "integer range".
    message = message.replace("is not a valid integer range", "is not an integer")
    message = message.replace("is not a valid float range", "is not a number")
    return message[:1].lower() + message[1:]
