"""The tool as click sees it: one group whose commands are loaded only when they are called."""

import importlib
import os
import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

from unbroken.cli.commands import COMMANDS, Entry
from unbroken.cli.output import Flags, Output, output_options
from unbroken.errors import BadUsage, UnknownCommand
from unbroken.version import VERSION

PROGRAM = "unbroken"
EXIT_USAGE = 2
CLOSE = 0.6
NEARLY_AS_CLOSE = 0.1


class LazyGroup(click.Group):
    """A group over a static table; nothing but ``get_command`` imports a command's module."""

    def __init__(self, table: dict[str, Entry], **settings: Any) -> None:  # noqa: ANN401 -- click's, handed through
        super().__init__(**settings)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command's name, in the table's order."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one command; None if the table has no such name."""
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.place.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that was called.

        Raises:
            UnknownCommand: there is none of that name; the nearest ones are named.
        """
        name = as_dashed(args[0])
        if name not in self.table and not name.startswith("-"):
            near = nearest(name, self.list_commands(ctx))
            raise UnknownCommand(name=args[0], nearest=near, group=ctx.command_path)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The help's list of commands under their headings, from the table alone."""
        widest = max(map(len, self.table), default=0)
        for heading in dict.fromkeys(entry.heading for entry in self.table.values()):
            with formatter.section(heading):
                formatter.write_dl(
                    [(f"{name:<{widest}}", e.help) for name, e in self.table.items() if e.heading == heading]
                )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names and options that begin as typed; no command is loaded for it."""
        named = [CompletionItem(n, help=e.help) for n, e in self.table.items() if n.startswith(incomplete)]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]


def as_dashed(token: str) -> str:
    """``--output_dir`` is ``--output-dir``: both spellings of a name are the same name."""
    return token.replace("_", "-")


def nearest(name: str, known: list[str]) -> tuple[str, ...]:
    """Known names that a slip of the finger could have meant, the likeliest first; far likelier ones stand alone."""
    # Imported here: only a slip of the finger needs it.
    import difflib

    likeness = {each: difflib.SequenceMatcher(None, name, each).ratio() for each in known}
    likeness |= {each: 1.0 for each in known if len(name) > 1 and each.startswith(name)}
    bar = max(CLOSE, max(likeness.values(), default=0.0) - NEARLY_AS_CLOSE)
    near = [each for each in known if likeness[each] >= bar]
    return tuple(sorted(near, key=lambda each: -likeness[each])[:3])


def _root(json: bool, quiet: bool, verbose: bool, version: bool) -> int | None:
    """Training runs that survive any kill, bit for bit."""
    ctx = click.get_current_context()
    ctx.obj = Flags().joined(json=json, quiet=quiet, verbose=verbose)
    if version:
        output = Output(json=json, quiet=quiet, stdout=sys.stdout, stderr=sys.stderr, environ=os.environ)
        output.document("unbroken.version/1", {"version": VERSION}, lambda: version_line(VERSION))
        ctx.exit(0)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(EXIT_USAGE)
    return None


def command_group(name: str, table: dict[str, Entry], help: str) -> LazyGroup:  # noqa: A002 -- click's word
    """A command that is a group of commands, with a table of its own."""
    settings: dict[str, Any] = {"invoke_without_command": True, "params": output_options()}
    return LazyGroup(table, name=name, callback=_remember, help=help, **settings)


def _remember(json: bool, quiet: bool, verbose: bool) -> None:
    """Hand what was asked for before the command's name on to the command."""
    ctx = click.get_current_context()
    asked = ctx.obj if isinstance(ctx.obj, Flags) else Flags()
    ctx.obj = asked.joined(json=json, quiet=quiet, verbose=verbose)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(EXIT_USAGE)


def version_line(version: str) -> str:
    """The answer to ``--version``."""
    return f"{PROGRAM} {version}"


EPILOG = """\b
unbroken COMMAND --help       what a command takes
unbroken explain exit-codes   what each exit code means"""

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
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": as_dashed},
)


# ---- complaints of the parser ----


def as_bad_usage(complaint: click.ClickException) -> BadUsage:
    """What click says about a command line, as an error of ours."""
    ctx = getattr(complaint, "ctx", None)
    command = ctx.command_path if isinstance(ctx, click.Context) else "unbroken"
    return BadUsage(command=command, complaint=_worded(complaint))


def _worded(complaint: click.ClickException) -> str:
    if isinstance(complaint, click.NoSuchOption):
        meant = f"; did you mean {' or '.join(complaint.possibilities)}?" if complaint.possibilities else ""
        return f"there is no option '{complaint.option_name}'{meant}"
    if isinstance(complaint, click.MissingParameter) and complaint.param is not None:
        if isinstance(complaint.param, click.Argument):
            return f"the argument {complaint.param.human_readable_name} is missing"
        return f"the option {complaint.param.opts[0]} is missing"
    message = " ".join(complaint.format_message().split()).removesuffix(".")
    # A number's type is named by its bounds, which is no word that a person would use.
    message = message.replace("is not a valid integer range", "is no whole number")
    message = message.replace("is not a valid float range", "is no number")
    return message[:1].lower() + message[1:]
