"""``unbroken run``: a parent for a training script or torchrun that passes signals on and owns the exit code."""

from pathlib import Path

import click

from unbroken.cli.launching import launch_options, launched
from unbroken.cli.output import Output, as_command
from unbroken.launch.command import PROGRAM, Shape, require_shape, require_target, target_of
from unbroken.launch.jobs import Orders
from unbroken.run.layout import require_directory


@as_command("run", context_settings={"allow_interspersed_args": False})
@launch_options
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="The run, whose records are read; needed on nodes without rank 0, told by the job otherwise.",
)
@click.option("-m", "--module", metavar="MODULE", help="Run a module instead of a script.")
@click.argument("words", metavar="-- SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    output: Output,
    nproc_per_node: int | str | None,
    nnodes: int,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    max_restarts: int,
    restart_delay: float,
    shutdown_timeout: int,
    stopped_exit_code: int,
    run_dir: Path | None,
    module: str | None,
    words: tuple[str, ...],
) -> int:
    """Start a training script, pass signals on, own its exit code."""
    shape = Shape(nproc_per_node, nnodes, node_rank, master_addr, master_port)
    target = target_of(module, words)
    require_shape(shape)
    require_target(target, Path.cwd())
    if run_dir is not None:
        require_directory(run_dir)
    orders = Orders(target, shape, shutdown_timeout, stopped_exit_code, max_restarts, restart_delay, run_dir)
    return launched(output, PROGRAM, "unbroken.run/1", orders)
