"""What ``run`` and ``train`` share: the options of a launch, its surroundings, and the one line that ends it."""

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from unbroken.cli.output import Output
from unbroken.errors import StorageFailed
from unbroken.files import LOCAL
from unbroken.launch import outcome_file
from unbroken.launch.command import THREADS_VARIABLE, Shape, sets_threads
from unbroken.launch.jobs import RESTART_DELAY_S, SHUTDOWN_TIMEOUT_S, Launched, Orders, Surroundings, launch

COUNTED_BY_TORCHRUN = ("gpu", "cpu", "auto")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _processes(ctx: click.Context, param: click.Parameter, text: str | None) -> int | str | None:
    if text is None or text in COUNTED_BY_TORCHRUN:
        return text
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    words = ", ".join(COUNTED_BY_TORCHRUN)
    raise click.BadParameter(f"{text!r} is neither a number of processes nor one of {words}", ctx, param)


LAUNCH_OPTIONS = (
    click.option(
        "--nproc-per-node",
        callback=_processes,
        metavar="N",
        help="Processes on this node, or gpu, cpu, auto. Not given: one plain process.",
    ),
    click.option("--nnodes", type=click.IntRange(1), default=1, metavar="N", help="Nodes that take part."),
    click.option("--node-rank", type=click.IntRange(0), metavar="R", help="Which of them this one is, from 0."),
    click.option("--master-addr", metavar="HOST", help="Where the nodes meet: the address of node 0."),
    click.option("--master-port", type=click.IntRange(1, 65535), metavar="PORT", help="The port they meet at."),
    click.option(
        "--max-restarts",
        type=click.IntRange(0),
        default=0,
        metavar="R",
        help="Start again after a crash, so many times at most, and not without progress.",
    ),
    click.option(
        "--restart-delay",
        type=click.FloatRange(0),
        default=RESTART_DELAY_S,
        metavar="S",
        help="Seconds before a restart; doubled each time the run got no further.",
    ),
    click.option(
        "--shutdown-timeout",
        type=click.IntRange(0),
        default=SHUTDOWN_TIMEOUT_S,
        show_default=True,
        metavar="S",
        help="Seconds the job has to save and end after a signal, before it is killed.",
    ),
    click.option(
        "--stopped-exit-code",
        type=click.IntRange(0, 255),
        default=0,
        metavar="CODE",
        help="Exit code of a clean stop, so that a requeue loop can tell it from done; 75 is usual.",
    ),
)


def launch_options(function: _Function) -> _Function:
    """Give a command the options of a launch, in the order above."""
    for option in reversed(LAUNCH_OPTIONS):
        function = option(function)
    return function


def launched(output: Output, program: str, schema: str, orders: Orders) -> int:
    """Launch, say how it ended, and return the exit code; ``program`` is who speaks."""
    with _place() as place:
        ended = launch(orders, _surroundings(output, program, orders.shape, place))
    _say_verdict(output, program, schema, ended)
    return ended.verdict.exit_code


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    place = outcome_file.make_place(Path(os.environ.get("TMPDIR") or "/tmp"), secrets.token_hex(16))  # noqa: S108
    try:
        yield place
    finally:
        # A temporary directory that stays behind is no reason for another exit code.
        with contextlib.suppress(StorageFailed):
            LOCAL.remove_tree(place)


def _surroundings(output: Output, program: str, shape: Shape, place: Path) -> Surroundings:
    def say(message: str) -> None:
        # The terminal or the reader of a pipe may be gone; the job is not to suffer, nor the exit code.
        with contextlib.suppress(StorageFailed, BrokenPipeError):
            output.note(f"{program}: {message}")

    if sets_threads(os.environ, shape):
        say(f"{THREADS_VARIABLE} is set to 1 for each process, since it was not set")
    # The job's own words go beside the one document that standard output is for.
    stdout = sys.stderr if output.json else None
    # `stop --force` must end the launcher too, or it would start the job again.
    environ = {**os.environ, outcome_file.LAUNCHER: str(os.getpid())}
    return Surroundings(environ, sys.executable, place, time.monotonic, time.time, say, stdout)


def _say_verdict(output: Output, program: str, schema: str, ended: Launched) -> None:
    verdict = ended.verdict
    if output.json:
        facts = {
            "exit_code": verdict.exit_code,
            "status": verdict.status,
            "class": verdict.outcome_class,
            "reason": verdict.line,
            "run": verdict.run,
            "jobs": ended.jobs,
        }
        output.document(schema, facts, str)
        return
    with contextlib.suppress(StorageFailed, BrokenPipeError):
        output.note(f"{program}: {verdict.line} (exit code {verdict.exit_code})")
