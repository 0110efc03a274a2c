"""The command line and the environment of one job, as pure functions of the launch options."""

import importlib.machinery
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from unbroken.errors import BadUsage, ModuleMissing, PathMissing
from unbroken.launch import agent, job_files, torchrun
from unbroken.launch.torchrun import OWN_STORE, Nodes, Rendezvous

THREADS_VARIABLE: Final = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Target:
    """The training program: a script or a module, its own arguments, and variables set for it."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Shape:
    """Processes and nodes; ``processes`` is None for one process without torchrun, or ``gpu``, ``cpu``, ``auto``.

    Nodes either have ranks and the address of node 0, or no ranks and a rendezvous endpoint (elastic).
    """

    processes: int | str | None = None
    nodes: Nodes = Nodes()
    node_rank: int | None = None
    master_address: str | None = None
    master_port: int | None = None
    rendezvous: Rendezvous | None = None

    @property
    def needs_torchrun(self) -> bool:
        """Whether there is more than one process, here or on other nodes."""
        names_other_nodes = self.nodes.most > 1 or self.node_rank is not None or self.master_address is not None
        return self.processes not in (None, 1) or names_other_nodes or self.rendezvous is not None


def target_of(program: str, module: str | None, words: Sequence[str]) -> Target:
    """The script or module of a command line: ``script.py ARGS``, ``-m module ARGS``; ``program`` is the command.

    Raises:
        BadUsage: neither is given.
    """
    if module is not None:
        return Target(module, tuple(words), is_module=True)
    if words[:1] == ["-m"] or words[:1] == ("-m",):
        if len(words) == 1:
            raise BadUsage(command=program, complaint="-m needs a module name")
        return Target(words[1], tuple(words[2:]), is_module=True)
    if not words:
        raise BadUsage(command=program, complaint=f"missing SCRIPT; it comes last: {program} -- train.py")
    return Target(words[0], tuple(words[1:]))


def require_target(program: str, target: Target, folder: Path) -> None:
    """Pass if the script or module exists; ``folder`` is the working directory of the job.

    Raises:
        PathMissing: the script does not exist.
        ModuleMissing: the module does not exist.
        BadUsage: the script is a directory without a ``__main__.py``.
    """
    if target.is_module:
        if not _module_exists(target.name, folder):
            raise ModuleMissing(module=target.name, folder=folder)
        return
    script = folder / target.name
    if not script.exists():
        raise PathMissing(path=Path(target.name), purpose="script")
    if script.is_dir() and not (script / "__main__.py").exists():
        raise BadUsage(command=program, complaint=f"{target.name} is a directory without a __main__.py, not a script")


def _module_exists(name: str, folder: Path) -> bool:
    # Only the top-level name goes through the import system: looking up a submodule imports its package, and a training
    # package imports torch.
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
    """Pass if the options on nodes are consistent.

    Raises:
        BadUsage: one is missing, out of range, or contradicts another.
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
        return f"{' and '.join(numbered)} cannot be used with {torchrun.ENDPOINT}"
    return None


def _numbers_complaint(shape: Shape) -> str | None:
    nodes = shape.nodes
    if nodes.least != nodes.most:
        return f"--nnodes {nodes} needs {torchrun.ENDPOINT} HOST:PORT, the same on all nodes"
    if nodes.most == 1 and shape.node_rank in (None, 0):
        return None
    lacking = [
        option
        for option, value in (("--node-rank", shape.node_rank), ("--master-addr", shape.master_address))
        if value is None
    ]
    if lacking:
        return f"--nnodes {nodes} needs {' and '.join(lacking)} on every node, or {torchrun.ENDPOINT} HOST:PORT"
    if shape.node_rank is not None and shape.node_rank >= nodes.most:
        return f"--node-rank {shape.node_rank} is out of range: --nnodes {nodes} has ranks 0 to {nodes.most - 1}"
    return None


def command_of(
    target: Target, shape: Shape, *, python: str, torchrun_options: Sequence[str], torchrun_restarts: int = 0
) -> list[str]:
    """The command line of one job.

    The launcher restarts the whole job itself, so that no rank finds keys of an earlier rendezvous store. Only with a
    rendezvous endpoint torchrun restarts by itself, ``torchrun_restarts`` times.
    """
    program = [*(["-m"] if target.is_module else []), target.name, *target.arguments]
    if not shape.needs_torchrun:
        # Unbuffered, as torchrun starts its workers: output before a kill is not lost.
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
    """The environment of one job: the launcher's own, and the path of the outcome file.

    With ``--nproc-per-node 1`` the variables of torchrun are set, so that a script written for torchrun runs unchanged;
    without the option the process is as plain as ``python script.py``.
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
    """Whether to set one thread per process: there are several, and the user has not set a number."""
    return isinstance(shape.processes, int) and shape.processes > 1 and THREADS_VARIABLE not in before
