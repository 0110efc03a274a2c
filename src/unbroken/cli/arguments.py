"""Arguments that several commands share: numbers and durations, a run, a config with overrides, an output file."""

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
from unbroken.mirror.address import is_url
from unbroken.records.layout import Layout, require_reachable, run_of
from unbroken.records.run_references import is_run
from unbroken.store.directory import Store
from unbroken.store.names import scratch
from unbroken.store.references import find_store

# ---- numbers and durations ----

_CLOCK = re.compile(r"(?:(\d+)-)?(\d{1,2}):(\d{2}):(\d{2})")
_UNITS = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_SECONDS = (86_400, 3_600, 60, 1)


class FiniteRange(click.FloatRange):
    """A number in a range, neither ``nan`` nor ``inf``; click's own range accepts ``nan``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 -- click's own signature
        """Parse the number."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found


def seconds_in(text: str) -> float | None:
    """A duration in seconds: ``90``, ``4h``, ``1h30m``, ``04:00:00``, ``1-12:00:00``; None if it cannot be parsed."""
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
    """A duration in seconds, with units, or as SLURM writes it."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 -- click's own signature
        """Parse the duration into seconds."""
        found = value if isinstance(value, float) else seconds_in(str(value))
        if found is None:
            self.fail(f"{value!r} is not a duration: use seconds, 4h, 90m, 1h30m, HH:MM:SS or D-HH:MM:SS", param, ctx)
        return found


# ---- runs ----


def run_path(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """A run directory, existing or not, as click's callback.

    Raises:
        BadRunPath: no run can be at this path; an empty one is not taken for the working directory.
    """
    del ctx, param
    if value is None:
        return None
    require_reachable(value)
    return Path(value)


def named_store(command: str, run: str | None, output_dir: str | None) -> Store:
    """The checkpoint store of RUN or ``--output-dir``; empty for a run that has not saved yet.

    Raises:
        BadUsage: neither is given, or both and they differ, or it is the address of a mirror.
        BadRunPath: no run can be at this path.
        PathMissing: the path does not exist.
        NotAStore: it exists and is not a run.
        StorageFailed: the path could not be read.
    """
    if run is not None and output_dir is not None and run != output_dir:
        raise BadUsage(
            command=f"unbroken {command}", complaint=f"RUN {run} and --output-dir {output_dir} differ; give one of them"
        )
    named = output_dir if run is None else run
    if named is None:
        raise BadUsage(command=f"unbroken {command}", complaint="missing argument RUN")
    if is_url(named):
        complaint = f"{named} is an address, and this command needs a run directory; ls, show and verify take addresses"
        raise BadUsage(command=f"unbroken {command}", complaint=complaint)
    require_reachable(named)
    layout = Layout(Path(named))
    return Store(layout.checkpoints) if is_run(layout) else find_store(layout.run)


def named_run(command: str, run: str | None, output_dir: str | None) -> Layout:
    """The run named by RUN or ``--output-dir``.

    Raises:
        BadUsage: neither is given, or both and they differ.
        PathMissing: the path does not exist.
        NotAStore: it exists and is not a run.
    """
    return run_of(named_store(command, run, output_dir))


# ---- paths on a disk ----


class DiskPath(click.Path):
    """A path on a disk, refused if it is an address: a ``Path`` of one names a local directory called ``s3:``."""

    def __init__(self, *, file_okay: bool = True) -> None:
        super().__init__(file_okay=file_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:  # noqa: ANN401 -- click's own signature
        """Parse the path.

        Raises:
            BadUsage: it is an address.
        """
        if isinstance(value, str) and is_url(value):
            what = "this" if param is None else param.opts[0] if isinstance(param, click.Option) else param.metavar
            complaint = f"{value} is an address, and {what} is a path on a disk"
            raise BadUsage(command="unbroken" if ctx is None else ctx.command_path, complaint=complaint)
        return Path(os.fsdecode(super().convert(value, param, ctx)))


# ---- a config and its overrides ----

_Function = TypeVar("_Function", bound=Callable[..., Any])


def config_arguments(function: _Function) -> _Function:
    """Give a command CONFIG and overrides; ``--config`` is another way to name the config."""
    for option in (
        click.option("--config", "named", metavar="FILE", help="Config file, instead of CONFIG."),
        click.argument("arguments", metavar="CONFIG [OVERRIDE]...", nargs=-1, type=click.UNPROCESSED),
    ):
        function = option(function)
    return function


def allowance_options(function: _Function) -> _Function:
    """Give a command the two options that set fields of ``data``; its function gets them as ``**allowed: bool``."""
    for name in ("budget-mismatch", "bucket-exhaustion"):
        help_text = f"Same as data.allow_{name.replace('-', '_')}=true."
        function = click.option(f"--allow-{name}", is_flag=True, help=help_text)(function)
    return function


def allowance_overrides(allowed: Mapping[str, bool]) -> list[str]:
    """Those options as overrides."""
    return [f"data.{name}=true" for name in sorted(allowed) if allowed[name]]


def config_path(command: str, rest: Sequence[str], named: str | None, *, one: str) -> Path:
    """The config file among the arguments that are not overrides; ``one`` is the error if there are several.

    Raises:
        BadUsage: there is none or more than one, or an option is unknown.
    """
    for word in (each for each in rest if each.startswith("-") and each != "-"):
        # click lets unknown options pass, since any of them may be an override.
        close = difflib.get_close_matches(word.partition("=")[0], _options(), n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise BadUsage(command=command, complaint=f"no such option: {word}{meant}")
    paths = [*([named] if named is not None else []), *rest]
    if not paths:
        raise BadUsage(command=command, complaint="missing argument CONFIG")
    if len(paths) > 1:
        complaint = f"{one}; '{paths[1]}' is neither an option nor section.field=value"
        raise BadUsage(command=command, complaint=complaint)
    return Path(paths[0])


def _options() -> list[str]:
    """The long names of the visible options of the current command."""
    context = click.get_current_context()
    shown = [each for each in context.command.get_params(context) if isinstance(each, click.Option) and not each.hidden]
    return [name for each in shown for name in each.opts if name.startswith("--")]


# ---- output files ----


def write_new(command: str, target: Path, text: str, remedy: Help, *, is_replacing: bool) -> None:
    """Write a new file, or replace one; ``remedy`` is the help of the error if it exists and may not be replaced.

    Raises:
        BadUsage: the path is a directory.
        PathMissing: its directory does not exist.
        WouldOverwrite: it exists and ``is_replacing`` is not set.
        StorageFailed: it could not be written.
    """
    if target.is_dir():
        raise BadUsage(command=command, complaint=f"-o needs a file; {target} is a directory")
    if not target.parent.is_dir():
        raise PathMissing(path=target.parent, purpose="directory")
    # With the process id, so that two commands at the same time do not share a scratch file.
    beside = scratch(f"new_{os.getpid()}", target.name)
    if is_replacing:
        LOCAL.replace(target, text.encode(), scratch=beside)
    elif not LOCAL.create_once(target, text.encode(), scratch=beside):
        raise WouldOverwrite(path=target, remedy=remedy)
