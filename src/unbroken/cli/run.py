"""``unbroken run``: a parent for a training script or torchrun that passes signals on and owns the exit code."""

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from unbroken.cli.output import Output, as_command
from unbroken.errors import StorageFailed
from unbroken.files import LOCAL
from unbroken.launch import outcome_file
from unbroken.launch.command import THREADS_VARIABLE, Shape, require_shape, require_target, sets_threads, target_of
from unbroken.launch.jobs import RESTART_DELAY_S, SHUTDOWN_TIMEOUT_S, Launched, Orders, Surroundings, launch
from unbroken.run.layout import require_directory

COUNTED_BY_TORCHRUN = ("gpu", "cpu", "auto")


def _processes(ctx: click.Context, param: click.Parameter, text: str | None) -> int | str | None:
    if text is None or text in COUNTED_BY_TORCHRUN:
        return text
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    words = ", ".join(COUNTED_BY_TORCHRUN)
    raise click.BadParameter(f"{text!r} is neither a number of processes nor one of {words}", ctx, param)


@as_command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "--nproc-per-node",
    callback=_processes,
    metavar="N",
    help="Processes on this node, or gpu, cpu, auto. Not given: one plain process, as python SCRIPT starts it.",
)
@click.option("--nnodes", type=click.IntRange(1), default=1, metavar="N", help="Nodes that take part.")
@click.option("--node-rank", type=click.IntRange(0), metavar="R", help="Which of them this one is, from 0.")
@click.option("--master-addr", metavar="HOST", help="Where the nodes meet: the address of node 0.")
@click.option("--master-port", type=click.IntRange(1, 65535), metavar="PORT", help="The port they meet at.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    metavar="R",
    help="Start again after a crash, so many times at most, and not without progress.",
)
@click.option(
    "--restart-delay",
    type=click.FloatRange(0),
    default=RESTART_DELAY_S,
    metavar="S",
    help="Seconds before a restart; doubled each time the run got no further.",
)
@click.option(
    "--shutdown-timeout",
    type=click.IntRange(0),
    default=SHUTDOWN_TIMEOUT_S,
    show_default=True,
    metavar="S",
    help="Seconds the job has to save and end after a signal, before it is killed.",
)
@click.option(
    "--stopped-exit-code",
    type=click.IntRange(0, 255),
    default=0,
    metavar="CODE",
    help="Exit code of a clean stop, so that a requeue loop can tell it from done; 75 is usual.",
)
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
    with _place() as place:
        launched = launch(orders, _surroundings(output, shape, place))
    _say_verdict(output, launched)
    return launched.verdict.exit_code


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    place = outcome_file.make_place(Path(os.environ.get("TMPDIR") or "/tmp"), secrets.token_hex(16))  # noqa: S108
    try:
        yield place
    finally:
        # A temporary directory that stays behind is no reason for another exit code.
        with contextlib.suppress(StorageFailed):
            LOCAL.remove_tree(place)


def _surroundings(output: Output, shape: Shape, place: Path) -> Surroundings:
    def say(message: str) -> None:
        # The terminal or the reader of a pipe may be gone; the job is not to suffer, nor the exit code.
        with contextlib.suppress(StorageFailed, BrokenPipeError):
            output.note(f"unbroken run: {message}")

    if sets_threads(os.environ, shape):
        say(f"{THREADS_VARIABLE} is set to 1 for each process, since it was not set")
    # The job's own words go beside the one document that standard output is for.
    stdout = sys.stderr if output.json else None
    # `stop --force` must end the launcher too, or it would start the job again.
    environ = {**os.environ, outcome_file.LAUNCHER: str(os.getpid())}
    return Surroundings(environ, sys.executable, place, time.monotonic, time.time, say, stdout)


def _say_verdict(output: Output, launched: Launched) -> None:
    verdict = launched.verdict
    if output.json:
        facts = {
            "exit_code": verdict.exit_code,
            "status": verdict.status,
            "class": verdict.outcome_class,
            "reason": verdict.line,
            "run": verdict.run,
            "jobs": launched.jobs,
        }
        output.document("unbroken.run/1", facts, str)
        return
    with contextlib.suppress(StorageFailed, BrokenPipeError):
        output.note(f"unbroken run: {verdict.line} (exit code {verdict.exit_code})")
