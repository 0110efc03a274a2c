"""The launch options of ``run``, ``launch`` and ``train``, the launch itself and the line printed at its end."""

import contextlib
import functools
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from unbroken.cli.arguments import FiniteRange, run_path
from unbroken.cli.output import Output
from unbroken.errors import BadUsage, StorageFailed
from unbroken.files import LOCAL
from unbroken.launch import job_files
from unbroken.launch.command import THREADS_VARIABLE, Shape, Target, require_shape, sets_threads
from unbroken.launch.launcher import (
    RESTART_DELAY_S,
    SHUTDOWN_TIMEOUT_S,
    LaunchContext,
    LaunchOptions,
    LaunchResult,
    launch,
)
from unbroken.launch.torchrun import DEFAULT_ID, Nodes, Rendezvous, is_endpoint, parse_nodes

COUNTED_BY_TORCHRUN = ("gpu", "cpu", "auto")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _processes(ctx: click.Context, param: click.Parameter, text: str | None) -> int | str | None:
    if text is None or text in COUNTED_BY_TORCHRUN:
        return text
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    words = ", ".join(COUNTED_BY_TORCHRUN)
    raise click.BadParameter(f"{text!r} is not a number of processes, nor one of {words}", ctx, param)


def _nodes(ctx: click.Context, param: click.Parameter, text: str) -> Nodes:
    found = parse_nodes(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a number of nodes, nor MIN:MAX", ctx, param)
    return found


def _endpoint(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    if text is not None and not is_endpoint(text):
        raise click.BadParameter(f"{text!r} is not HOST:PORT", ctx, param)
    return text


LAUNCH_OPTIONS = (
    click.option(
        "--nproc-per-node",
        callback=_processes,
        metavar="N",
        help="Processes per node, or gpu, cpu, auto; default: one process without torchrun.",
    ),
    click.option(
        "--nnodes",
        callback=_nodes,
        default="1",
        metavar="N|MIN:MAX",
        help="Number of nodes; MIN:MAX (elastic) with --rdzv-endpoint.",
    ),
    click.option("--node-rank", type=click.IntRange(0), metavar="R", help="Rank of this node, from 0."),
    click.option("--master-addr", metavar="HOST", help="Address of node 0."),
    click.option("--master-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port on node 0."),
    click.option(
        "--rdzv-endpoint",
        callback=_endpoint,
        metavar="HOST:PORT",
        help="Rendezvous endpoint, the same on all nodes; survives the loss of a node.",
    ),
    click.option("--rdzv-id", metavar="NAME", help=f"Rendezvous id, the same on all nodes; default: {DEFAULT_ID}."),
    click.option("--rdzv-conf", metavar="KEY=VALUE,...", help="More rendezvous settings for torchrun."),
    click.option(
        "--max-restarts",
        type=click.IntRange(0),
        metavar="R",
        help="Restart at most R times after a crash; stops after 3 without progress.",
    ),
    click.option(
        "--restart-delay",
        type=FiniteRange(0),
        default=RESTART_DELAY_S,
        metavar="S",
        help="Seconds before a restart, doubled after each restart without progress.",
    ),
    click.option(
        "--shutdown-timeout",
        type=click.IntRange(0),
        default=SHUTDOWN_TIMEOUT_S,
        metavar="S",
        help="Seconds to save and exit after a signal, before the job is killed.",
    ),
    click.option(
        "--stopped-exit-code",
        type=click.IntRange(0, 255),
        default=0,
        metavar="CODE",
        help="Exit code of a clean stop before the target; 75 lets a requeue loop tell it from done.",
    ),
)


def script_arguments(function: _Function) -> _Function:
    """Give a command the training script: ``-- SCRIPT ARGS``, ``-m MODULE``, and its run directory."""
    for option in (
        click.argument("words", metavar="-- SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED),
        click.option("-m", "--module", metavar="MODULE", help="Run a module instead of a script."),
        click.option(
            "--run-dir",
            callback=run_path,
            metavar="RUN",
            help="Run directory; needed on nodes other than node 0.",
        ),
    ):
        function = option(function)
    return function


@dataclass(frozen=True)
class LaunchArguments:
    """The launch options of a command line; ``max_restarts`` is None if the option is not given."""

    shape: Shape
    max_restarts: int | None
    restart_delay_s: float
    shutdown_timeout_s: int
    stopped_exit_code: int

    def options(self, target: Target, *, run: Path | None, until_done: bool = False) -> LaunchOptions:
        """What to launch; with ``until_done`` restarts are unlimited unless ``--max-restarts`` is given."""
        return LaunchOptions(
            target,
            self.shape,
            self.shutdown_timeout_s,
            self.stopped_exit_code,
            self.max_restarts if self.max_restarts is not None or until_done else 0,
            self.restart_delay_s,
            run,
            until_done,
        )


def launch_options(program: str) -> Callable[[_Function], _Function]:
    """Give a command the launch options; its function gets them as ``asked: LaunchArguments``."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def called(**options: Any) -> Any:  # noqa: ANN401 -- click's own values
            return function(asked=_asked(program, options), **options)

        decorated: Any = called
        for option in reversed(LAUNCH_OPTIONS):
            decorated = option(decorated)
        result: _Function = decorated
        return result

    return decorate


def _asked(program: str, options: dict[str, Any]) -> LaunchArguments:
    """Take the launch options out of all options.

    Raises:
        BadUsage: they contradict each other.
    """
    endpoint, name, conf = (options.pop(f"rdzv_{each}") for each in ("endpoint", "id", "conf"))
    if endpoint is None and (name, conf) != (None, None):
        complaint = f"{'--rdzv-id' if name is not None else '--rdzv-conf'} needs --rdzv-endpoint HOST:PORT"
        raise BadUsage(command=program, complaint=complaint)
    shape = Shape(
        options.pop("nproc_per_node"),
        options.pop("nnodes"),
        options.pop("node_rank"),
        options.pop("master_addr"),
        options.pop("master_port"),
        Rendezvous(endpoint, name or DEFAULT_ID, conf) if endpoint is not None else None,
    )
    require_shape(program, shape)
    return LaunchArguments(
        shape,
        options.pop("max_restarts"),
        options.pop("restart_delay"),
        options.pop("shutdown_timeout"),
        options.pop("stopped_exit_code"),
    )


def launched(output: Output, program: str, schema: str, options: LaunchOptions, *, speaks_json: bool = False) -> int:
    """Launch, print how it ended and return the exit code; ``program`` is the prefix of what is printed.

    With ``speaks_json`` the job itself writes lines of JSON to standard output, and the last line tells how it ended.
    """
    with _temporary_directory() as directory:
        result = launch(options, _context(output, program, options.shape, directory, speaks_json=speaks_json))
    _print_report(output, program, schema, result, is_line=speaks_json)
    return result.report.exit_code


@contextlib.contextmanager
def _temporary_directory() -> Iterator[Path]:
    directory = job_files.make_outcome_path(Path(os.environ.get("TMPDIR") or "/tmp"), secrets.token_hex(16))  # noqa: S108
    try:
        yield directory
    finally:
        # A temporary directory that cannot be removed must not change the exit code.
        with contextlib.suppress(StorageFailed):
            LOCAL.remove_tree(directory)


def _context(output: Output, program: str, shape: Shape, directory: Path, *, speaks_json: bool) -> LaunchContext:
    def say(message: str) -> None:
        # The terminal or the reader of a pipe may be gone; that must not affect the job or the exit code.
        with contextlib.suppress(StorageFailed, BrokenPipeError):
            output.note(f"{program}: {message}")

    if sets_threads(os.environ, shape):
        say(f"setting {THREADS_VARIABLE}=1 for each process (it was not set)")
    # With --json standard output is for our one document; the job prints on standard error.
    stdout = sys.stderr if output.json and not speaks_json else None
    # `stop --force` must kill the launcher too, or it would restart the job.
    environ = {**os.environ, job_files.LAUNCHER: str(os.getpid())}
    return LaunchContext(environ, sys.executable, directory, time.monotonic, time.time, say, stdout)


def _print_report(output: Output, program: str, schema: str, result: LaunchResult, *, is_line: bool) -> None:
    report = result.report
    if output.json:
        fields = {
            "exit_code": report.exit_code,
            "status": report.status,
            "class": report.outcome_class,
            "reason": report.line,
            "run": report.run,
            "jobs": result.jobs,
        }
        if is_line:
            output.line(schema, {"event": "end", **fields})
        else:
            output.document(schema, fields, str)
        return
    with contextlib.suppress(StorageFailed, BrokenPipeError):
        output.note(f"{program}: {report.line} (exit code {report.exit_code})")
