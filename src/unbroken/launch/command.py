"""What is started: the command line and the environment of one job, as pure functions of what was asked for."""

import importlib.machinery
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors import BadUsage, ModuleMissing, PathMissing
from unbroken.launch import agent, job_files, torchrun
from unbroken.launch.torchrun import OWN_STORE, Nodes, Rendezvous

THREADS_VARIABLE: Final = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Target:
    """The training program: a script or a module, and its own arguments."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


@dataclass(frozen=True)
class Shape:
    """How many processes, and where; ``processes`` is None for one plain process, or a word torchrun counts by.

    Nodes either have numbers and meet at the first of them, or have none, meet at an endpoint and may come and go.
    """

    processes: int | str | None = None
    nodes: Nodes = Nodes()
    node_rank: int | None = None
    master_address: str | None = None
    master_port: int | None = None
    rendezvous: Rendezvous | None = None

    @property
    def needs_torchrun(self) -> bool:
        """Whether more than one process takes part, here or on other nodes."""
        names_other_nodes = self.nodes.most > 1 or self.node_rank is not None or self.master_address is not None
        return self.processes not in (None, 1) or names_other_nodes or self.rendezvous is not None


def target_of(program: str, module: str | None, words: Sequence[str]) -> Target:
    """What the words of a command line name: ``script.py ARGS``, ``-m module ARGS``; ``program`` is who was called.

    Raises:
        BadUsage: nothing is named.
    """
    if module is not None:
        return Target(module, tuple(words), is_module=True)
    if words[:1] == ["-m"] or words[:1] == ("-m",):
        if len(words) == 1:
            raise BadUsage(command=program, complaint="-m needs the name of a module")
        return Target(words[1], tuple(words[2:]), is_module=True)
    if not words:
        raise BadUsage(command=program, complaint=f"the script is missing; it stands last: {program} -- train.py")
    return Target(words[0], tuple(words[1:]))


def require_target(program: str, target: Target, folder: Path) -> None:
    """Pass if the program exists; ``folder`` is where the job will be started.

    Raises:
        PathMissing: there is no such script.
        ModuleMissing: there is no such module.
        BadUsage: the script is a folder without a ``__main__.py``.
    """
    if target.is_module:
        if not _module_exists(target.name, folder):
            raise ModuleMissing(module=target.name, folder=folder)
        return
    script = folder / target.name
    if not script.exists():
        raise PathMissing(path=Path(target.name), purpose="script")
    if script.is_dir() and not (script / "__main__.py").exists():
        raise BadUsage(command=program, complaint=f"{target.name} is a folder without a __main__.py, not a script")


def _module_exists(name: str, folder: Path) -> bool:
    # Only the first name is asked of the import system: looking for a module inside a package imports the package,
    # and a training package imports torch.
    first, *rest = name.split(".")
    found = importlib.machinery.PathFinder.find_spec(first, [str(folder)])
    try:
        found = found or importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return False
    path = first
    for each in rest:
        if found is None or found.submodule_search_locations is None:
            return False
        path = f"{path}.{each}"
        found = importlib.machinery.PathFinder.find_spec(path, list(found.submodule_search_locations))
    return found is not None


def require_shape(program: str, shape: Shape) -> None:
    """Pass if the options about nodes fit together.

    Raises:
        BadUsage: one of them is missing or leads nowhere.
    """
    complaint = _endpoint_complaint(shape) if shape.rendezvous is not None else _numbers_complaint(shape)
    if complaint is not None:
        raise BadUsage(command=program, complaint=complaint)


def _endpoint_complaint(shape: Shape) -> str | None:
    numbered = [
        option
        for option, value in (
            ("--node-rank", shape.node_rank),
            ("--master-addr", shape.master_address),
            ("--master-port", shape.master_port),
        )
        if value is not None
    ]
    if numbered:
        return f"nodes that meet at {torchrun.ENDPOINT} have no numbers: {' and '.join(numbered)} cannot be given"
    return None


def _numbers_complaint(shape: Shape) -> str | None:
    nodes = shape.nodes
    if nodes.least != nodes.most:
        return f"--nnodes {nodes} needs {torchrun.ENDPOINT} HOST:PORT, the same on each node"
    if nodes.most == 1 and shape.node_rank in (None, 0):
        return None
    lacking = [
        option
        for option, value in (("--node-rank", shape.node_rank), ("--master-addr", shape.master_address))
        if value is None
    ]
    if lacking:
        return f"--nnodes {nodes} needs {' and '.join(lacking)} on each node, or {torchrun.ENDPOINT} HOST:PORT"
    if shape.node_rank is not None and shape.node_rank >= nodes.most:
        return f"--node-rank {shape.node_rank} is not among 0 to {nodes.most - 1} of --nnodes {nodes}"
    return None


def command_of(
    target: Target, shape: Shape, *, python: str, torchrun_options: Sequence[str], torchrun_restarts: int = 0
) -> list[str]:
    """The command line of one job.

    Restarts are the launcher's own: it starts everything anew, so no rank can meet a key of the store before. Only
    agents that meet again after a loss do it by themselves, ``torchrun_restarts`` times.
    """
    program = [*(["-m"] if target.is_module else []), target.name, *target.arguments]
    if not shape.needs_torchrun:
        # Unbuffered, as torchrun starts its workers: what was printed before a kill has been seen.
        return [python, "-u", *program]
    restarts = torchrun_restarts if shape.rendezvous is not None else 0
    options = ["--nproc-per-node", str(shape.processes or 1), "--max-restarts", str(restarts), *torchrun_options]
    return [python, "-m", agent.MODULE, *options, *_rendezvous_options(shape), *program]


def _rendezvous_options(shape: Shape) -> list[str]:
    if shape.rendezvous is not None:
        return shape.rendezvous.options(shape.nodes)
    if shape.nodes.most == 1 and shape.master_address is None and shape.master_port is None:
        return ["--standalone"]
    options = ["--nnodes", str(shape.nodes), "--node-rank", str(shape.node_rank or 0)]
    if shape.master_address is not None:
        options += ["--master-addr", shape.master_address]
    if shape.master_port is not None:
        options += ["--master-port", str(shape.master_port)]
    return options


def environment_of(
    before: Mapping[str, str], shape: Shape, *, outcome_path: Path, shutdown_timeout_s: int, free_port: int
) -> dict[str, str]:
    """The environment of one job: the launcher's own, and where to tell the outcome.

    A single process that was asked for by number finds the variables torchrun sets, so that a script written for
    torchrun runs unchanged; one that was not asked for by number is as plain as ``python script.py``.
    """
    environment = {**before, job_files.ENVIRONMENT: str(outcome_path)}
    if shape.needs_torchrun:
        environment[torchrun.SHUTDOWN_VARIABLE] = str(shutdown_timeout_s)
        if sets_threads(before, shape):
            environment[THREADS_VARIABLE] = "1"
        if shape.rendezvous is not None:
            environment[OWN_STORE] = "1"
    elif shape.processes == 1:
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0")
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1")
        port = shape.master_port if shape.master_port is not None else free_port
        environment |= {**ranks, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return environment


def sets_threads(before: Mapping[str, str], shape: Shape) -> bool:
    """Whether each of several processes gets one thread, since nobody said how many."""
    return isinstance(shape.processes, int) and shape.processes > 1 and THREADS_VARIABLE not in before
