"""``unbroken train``: starts or resumes a run of the GPT trainer.

This is the parent process of the job: it checks the config against the run before it starts a process, and imports
neither torch nor numpy.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from unbroken.cli.arguments import allowance_options, allowance_overrides, config_arguments, config_path
from unbroken.cli.launch_options import LaunchArguments, launch_options, launched
from unbroken.cli.output import Output, as_command
from unbroken.config import Config
from unbroken.config.decode import decode
from unbroken.config.overrides import take_apart
from unbroken.config.source import read
from unbroken.errors import BadUsage, DataMissing, TooManyRanks, TorchMissing, UnbrokenError
from unbroken.launch.command import Shape, Target
from unbroken.launch.launcher import LaunchOptions
from unbroken.launch.run_config import passed_on, resolve_run_config
from unbroken.quoting.log import is_quiet_by_environment
from unbroken.records.layout import require_directory
from unbroken.store.rewind import SCRATCH, without_tag

PROGRAM: Final = "unbroken train"
MODULE: Final = "unbroken.gpt"
SCHEMA: Final = "unbroken.train/1"


@as_command(
    "train",
    examples=(
        ("unbroken train config.yaml", "start, or resume where the last job ended"),
        ("unbroken train config.yaml --nproc-per-node 8", "on 8 GPUs of this node"),
        ("unbroken train config.yaml training.max_steps=2000", "with an override"),
        ("unbroken train config.yaml --accept optimizer.learning_rate", "resume with a change"),
    ),
    exit_codes={
        0: "target reached, or stopped cleanly (see --stopped-exit-code)",
        2: "the command or the config is wrong",
        4: "the data is missing, changed or exhausted",
        6: "the resume would not be exact",
        7: "another job holds the run",
        8: "the loss is NaN or infinite",
        74: "storage failed; the last checkpoint is intact",
    },
    context_settings={"ignore_unknown_options": True},
)
@config_arguments
@click.option(
    "--accept", multiple=True, metavar="NAME", help="Accept a change since the run started, by name; repeatable."
)
@click.option("--resume", metavar="WHAT", help="auto, scratch, or a checkpoint to rewind to (once).")
@click.option("--force", is_flag=True, help="With --resume scratch: move existing checkpoints to abandoned/.")
@allowance_options
@click.option("--skip-runtime-probe", is_flag=True, hidden=True, help="No effect; accepted for compatibility.")
@click.option("--until-done", is_flag=True, help="Restart until the target is reached, as unbroken launch does.")
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
    asked: LaunchArguments,
    **allowed: bool,
) -> int:
    """Start or resume a GPT training run.

    CONFIG is a YAML or JSON file. OVERRIDE is section.field=value, --section.field=value or --section.field value.

    The same command starts a run and resumes it from its newest usable checkpoint. All problems of the config are
    reported before a process is started. With --json, standard output carries one JSON object per line (start, step,
    evaluation, checkpoint, end).
    """
    if is_quiet_by_environment() and not output.verbose:
        output = replace(output, quiet=True)
    words = [*arguments, *allowance_overrides(allowed), *([] if resume is None else [f"training.resume={resume}"])]
    try:
        options = _launch_options(output, words, named, accept, asked, force=force, until_done=until_done)
        return launched(output, PROGRAM, SCHEMA, options, speaks_json=output.json)
    except UnbrokenError as error:
        if not output.json:
            raise
        output.error(error, is_event=True)
        return error.exit_code


def _launch_options(
    output: Output,
    written: Sequence[str],
    named: str | None,
    accept: Sequence[str],
    asked: LaunchArguments,
    *,
    force: bool,
    until_done: bool,
) -> LaunchOptions:
    """What to launch, after all checks that need no process."""
    taken = take_apart(written)
    path = config_path(PROGRAM, taken.rest, named, one="a run has one config")
    config = decode(read(path), taken.overrides, source=str(path)).config
    if force and without_tag(config.training.resume) != SCRATCH:
        complaint = "--force needs --resume scratch: it moves existing checkpoints to abandoned/"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    if (asked.max_restarts or until_done) and without_tag(config.training.resume) == SCRATCH and not force:
        option = "--max-restarts" if asked.max_restarts else "--until-done"
        complaint = f"{option} with --resume scratch needs --force: without it the first restart would fail"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    require_directory(Path(config.training.output_dir))
    _require_startable(config, asked.shape, accept, force=force)
    # File and overrides are for whoever reads the list of processes: the ranks take the config from their environment.
    words = ("--launched", str(path), *taken.written)
    words += tuple(word for name in accept for word in ("--accept", name)) + (("--force",) if force else ())
    words += tuple(f"--{name}" for name in ("json", "quiet", "verbose") if getattr(output, name))
    target = Target(MODULE, words, is_module=True, environment=passed_on(config, PROGRAM))
    return asked.options(target, run=Path(config.training.output_dir), until_done=until_done)


def _require_startable(config: Config, shape: Shape, accept: Sequence[str], *, force: bool) -> None:
    """Raise the errors that every rank would raise, once and before any of them is started."""
    if importlib.util.find_spec("torch") is None:
        raise TorchMissing(purpose="training")
    if not Path(config.data.path).is_dir():
        raise DataMissing(path=Path(config.data.path), lacks="the directory of data.path does not exist")
    # With gpu, cpu or auto the number is not known here; the job checks again.
    ranks = shape.nodes.least * (shape.processes if isinstance(shape.processes, int) else 1)
    settled = resolve_run_config(config, ranks, accept=accept, force=force).config
    lanes = settled.lanes(ranks)
    if ranks > lanes:
        raise TooManyRanks(ranks=ranks, lanes=lanes)
