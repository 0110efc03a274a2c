"""``unbroken train``: start a run of the GPT trainer, or go on with it; the same command does both.

The parent of the job: it checks the config, and what the run was started with, before any process exists, and needs
neither torch nor numpy for it.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from unbroken.cli.arguments import allowance_options, allowance_overrides, config_arguments, config_path
from unbroken.cli.launching import Asked, launch_options, launched
from unbroken.cli.output import Output, as_command
from unbroken.config import Config
from unbroken.config.decode import decode
from unbroken.config.overrides import take_apart
from unbroken.config.source import read
from unbroken.errors import BadUsage, DataMissing, TooManyRanks, TorchMissing, UnbrokenError
from unbroken.launch.command import Shape, Target
from unbroken.launch.jobs import Orders
from unbroken.launch.started import settle
from unbroken.quoting.log import is_quiet_by_environment
from unbroken.records.layout import require_directory
from unbroken.store.rewind import SCRATCH, without_tag

PROGRAM: Final = "unbroken train"
MODULE: Final = "unbroken.gpt"
SCHEMA: Final = "unbroken.train/1"


@as_command("train", context_settings={"ignore_unknown_options": True})
@config_arguments
@click.option("--accept", multiple=True, metavar="NAME", help="Accept a change to the run by name; repeatable.")
@click.option("--resume", metavar="WHAT", help="auto, scratch, or a checkpoint to go back to, once.")
@click.option("--force", is_flag=True, help="With --resume scratch: set the checkpoints that are there aside.")
@allowance_options
@click.option("--skip-runtime-probe", is_flag=True, hidden=True, help="Nothing: there is no probe to skip.")
@click.option("--until-done", is_flag=True, help="Job after job until the target is reached, as unbroken launch.")
@launch_options(PROGRAM)
def command(
    output: Output,
    arguments: tuple[str, ...],
    named: str | None,
    accept: tuple[str, ...],
    resume: str | None,
    force: bool,
    skip_runtime_probe: bool,
    until_done: bool,
    asked: Asked,
    **allowed: bool,
) -> int:
    """Start a run, or go on with it: the same command does both.

    CONFIG is a YAML or JSON file. OVERRIDE is --section.field value, --section.field=value or section.field=value.
    Problems of the config are all told before anything is started. Exit codes: unbroken explain exit-codes.
    With --json standard output carries one JSON object per line (start, step, evaluation, checkpoint, end).
    """
    if is_quiet_by_environment() and not output.verbose:
        output = replace(output, quiet=True)
    words = [*arguments, *allowance_overrides(allowed), *([] if resume is None else [f"training.resume={resume}"])]
    try:
        orders = _orders(output, words, named, accept, asked, force=force, until_done=until_done)
        return launched(output, PROGRAM, SCHEMA, orders, speaks_json=output.json)
    except UnbrokenError as refused:
        if not output.json:
            raise
        output.error(refused, is_event=True)
        return refused.exit_code


def _orders(
    output: Output,
    written: Sequence[str],
    named: str | None,
    accept: Sequence[str],
    asked: Asked,
    *,
    force: bool,
    until_done: bool,
) -> Orders:
    """What is to be launched, after everything that can be refused without a process was looked at."""
    taken = take_apart(written)
    path = config_path(PROGRAM, taken.rest, named, one="a run has one config")
    config = decode(read(path), taken.overrides, source=str(path)).config
    if force and without_tag(config.training.resume) != SCRATCH:
        complaint = "--force is for --resume scratch: it sets the checkpoints that are there aside"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    if (asked.max_restarts or until_done) and without_tag(config.training.resume) == SCRATCH and not force:
        option = "--max-restarts" if asked.max_restarts else "--until-done"
        complaint = f"with {option} a restart would ask for 'scratch' again and be refused; add --force to start once"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    require_directory(Path(config.training.output_dir))
    _require_startable(config, asked.shape, accept, force=force)
    words = (str(path), *taken.written)
    words += tuple(word for name in accept for word in ("--accept", name)) + (("--force",) if force else ())
    words += tuple(f"--{name}" for name in ("json", "quiet", "verbose") if getattr(output, name))
    target = Target(MODULE, words, is_module=True)
    return asked.orders(target, run=Path(config.training.output_dir), until_done=until_done)


def _require_startable(config: Config, shape: Shape, accept: Sequence[str], *, force: bool) -> None:
    """Refuse what every process would refuse, once and before there is any."""
    if importlib.util.find_spec("torch") is None:
        raise TorchMissing(purpose="training")
    if not Path(config.data.path).is_dir():
        raise DataMissing(path=Path(config.data.path), lacks="the folder that data.path names does not exist")
    # Processes that torchrun counts are not known here; the job looks again.
    ranks = shape.nodes.least * (shape.processes if isinstance(shape.processes, int) else 1)
    settled = settle(config, ranks, accept=accept, force=force).config
    lanes = settled.global_batch_size(ranks) // settled.training.per_device_batch_size
    if ranks > lanes:
        raise TooManyRanks(ranks=ranks, lanes=lanes)
