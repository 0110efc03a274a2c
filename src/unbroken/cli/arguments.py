"""What several commands take: runs, numbers, durations, a config with overrides, a file to write."""

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from unbroken.errors import BadUsage, Help, PathMissing, WouldOverwrite
from unbroken.files import LOCAL
from unbroken.records.layout import Layout, require_reachable, run_of
from unbroken.records.references import is_run
from unbroken.store.directory import Store
from unbroken.store.names import scratch
from unbroken.store.references import find_store

# ---- numbers and durations ----

_CLOCK = re.compile(r"(?:(\d+)-)?(\d{1,2}):(\d{2}):(\d{2})")
_UNITS = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_SECONDS = (86_400, 3_600, 60, 1)


class FiniteRange(click.FloatRange):
    """A range that ``nan`` and ``inf`` are not in; click's own lets ``nan`` pass, which no bound refuses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 -- click's own signature
        """The number that a word means."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"must be a finite number, is {value}", param, ctx)
        return found


def seconds_in(text: str) -> float | None:
    """The seconds that a duration has: ``90``, ``4h``, ``1h30m``, ``04:00:00``, ``1-12:00:00``; None if it is none."""
    text = text.strip()
    try:
        return float(text)
    except ValueError:
        pass
    found = _CLOCK.fullmatch(text) or (_UNITS.fullmatch(text.replace(" ", "").lower()) if text else None)
    if found is None:
        return None
    return sum(float(number) * unit for number, unit in zip(found.groups(), _SECONDS, strict=True) if number)


class Duration(click.types.FloatParamType):
    """A duration in seconds, or as people and schedulers write it."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 -- click's own signature
        """The seconds that a word means."""
        found = value if isinstance(value, float) else seconds_in(str(value))
        if found is None:
            self.fail(f"{value!r} is no duration: give seconds, 4h, 90m, 1h30m, HH:MM:SS or D-HH:MM:SS", param, ctx)
        return found


# ---- runs ----


def run_path(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """The directory of a run, or where it is to be, as click's callback for it.

    Raises:
        BadRunPath: it is a path at which no run can be; an empty one is not taken for the working directory.
    """
    del ctx, param
    if value is None:
        return None
    require_reachable(value)
    return Path(value)


def named_store(command: str, run: str | None, output_dir: str | None) -> Store:
    """The store of the run that was named; a run that has not saved yet has an empty one.

    Raises:
        BadUsage: none was named, or two different ones.
        BadRunPath: it is a path at which no run can be.
        PathMissing: there is nothing at the path.
        NotAStore: there is, and it is no run.
        StorageFailed: the system refused to look.
    """
    if run is not None and output_dir is not None and run != output_dir:
        raise BadUsage(command=f"unbroken {command}", complaint=f"two runs are named: {run} and {output_dir}")
    named = output_dir if run is None else run
    if named is None:
        raise BadUsage(command=f"unbroken {command}", complaint="the argument RUN is missing")
    require_reachable(named)
    layout = Layout(Path(named))
    return Store(layout.checkpoints) if is_run(layout) else find_store(layout.run)


def named_run(command: str, run: str | None, output_dir: str | None) -> Layout:
    """The run that was named.

    Raises:
        BadUsage: none was named, or two different ones.
        PathMissing: there is nothing at the path.
        NotAStore: there is, and it is no run.
    """
    return run_of(named_store(command, run, output_dir))


# ---- a config and its overrides ----

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


# ---- files that a command makes ----


def write_new(command: str, target: Path, text: str, remedy: Help, *, is_replacing: bool) -> None:
    """Write a file that is not there yet, or in the place of one; ``remedy`` is what helps if it may not be replaced.

    Raises:
        BadUsage: the path is a directory.
        PathMissing: there is no directory for it.
        WouldOverwrite: it is there, and is not to be replaced.
        StorageFailed: the system refused.
    """
    if target.is_dir():
        raise BadUsage(command=command, complaint=f"-o takes a file's name; '{target}' is a directory")
    if not target.parent.is_dir():
        raise PathMissing(path=target.parent, purpose="directory")
    # The process id keeps two commands beside each other from sharing a scratch file.
    beside = scratch(f"new_{os.getpid()}", target.name)
    if is_replacing:
        LOCAL.replace(target, text.encode(), scratch=beside)
    elif not LOCAL.create_once(target, text.encode(), scratch=beside):
        raise WouldOverwrite(path=target, remedy=remedy)
