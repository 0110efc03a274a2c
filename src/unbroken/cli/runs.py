"""How a run is named on the command line: as the argument, or by the option that older tools have."""

from pathlib import Path

import click

from unbroken.errors import BadUsage
from unbroken.run.layout import Layout, require_reachable, run_of
from unbroken.run.refer import is_run
from unbroken.store.place import Store
from unbroken.store.refer import find_store


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
