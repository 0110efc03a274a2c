"""The words of ``train`` and ``validate``: one config, overrides between the options, and what the data may lack."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from unbroken.errors import BadUsage

_Function = TypeVar("_Function", bound=Callable[..., Any])


def config_arguments(function: _Function) -> _Function:
    """Give a command its words, among them the config and overrides; or ``--config`` for the config."""
    for option in (
        click.option("--config", "named", metavar="FILE", help="The config, where it is not the first argument."),
        click.argument("arguments", metavar="CONFIG [OVERRIDE]...", nargs=-1, type=click.UNPROCESSED),
    ):
        function = option(function)
    return function


def allowance_options(function: _Function) -> _Function:
    """Give a command the two options that stand for fields of ``data``; it gets them as ``**allowed: bool``."""
    for name in ("budget-mismatch", "bucket-exhaustion"):
        help_text = f"As data.allow_{name.replace('-', '_')}=true."
        function = click.option(f"--allow-{name}", is_flag=True, help=help_text)(function)
    return function


def allowance_overrides(allowed: Mapping[str, bool]) -> list[str]:
    """The overrides that those options stand for."""
    return [f"data.{name}=true" for name in sorted(allowed) if allowed[name]]


def config_path(command: str, rest: Sequence[str], named: str | None, *, one: str) -> Path:
    """The config among the words that are no override; ``one`` says why there is only one.

    Raises:
        BadUsage: there is none, or more than one, or a word is an option that the command does not have.
    """
    for word in (each for each in rest if each.startswith("-") and each != "-"):
        # Unknown options come here, since any of them may be an override.
        close = difflib.get_close_matches(word.partition("=")[0], _options(), n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise BadUsage(command=command, complaint=f"there is no option '{word}'{meant}")
    paths = [*([named] if named is not None else []), *rest]
    if not paths:
        raise BadUsage(command=command, complaint="the argument CONFIG is missing")
    if len(paths) > 1:
        complaint = f"{one}; '{paths[1]}' is neither an option nor section.field=value"
        raise BadUsage(command=command, complaint=complaint)
    return Path(paths[0])


def _options() -> list[str]:
    """The long names of the options that the command at hand shows."""
    context = click.get_current_context()
    shown = [each for each in context.command.get_params(context) if isinstance(each, click.Option) and not each.hidden]
    return [name for each in shown for name in each.opts if name.startswith("--")]
