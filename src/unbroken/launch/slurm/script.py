"""The text of a batch script, as a pure function of its options. At run time it execs ``unbroken slurm job``."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors import BadUsage
from unbroken.quoting.shell import for_shell, shell_line

COMMAND: Final = "unbroken slurm init"
# Marks the runs whose saves `submit` and `chain` learn the lead time from.
LEARNS_FROM: Final = "#UNBROKEN learns from "
MOST_LEAD_S: Final = 65_535
# Ranks of other nodes exit within the time of a save; one that hangs longer is killed.
_WAIT_FOR_NODES_S: Final = 600
_TIME: Final = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
_TIME_OPTION: Final = re.compile(r"#SBATCH\s+(?:--time[=\s]|-t)\s*\"?(?P<value>[^\s\"]+)")
_LEAD_OPTION: Final = re.compile(r"#SBATCH\s+--signal=B:USR1@(?P<value>\d+)")
_ARRAY_INDEX: Final = '"$SLURM_ARRAY_TASK_ID"'


@dataclass(frozen=True)
class Work:
    """What a job runs: ``unbroken train`` with configs, or ``unbroken run`` with one script.

    Attributes:
        runs: the run directories; several are the tasks of an array.
        configs: their configs, in the same order; empty for a script.
        words: overrides of the configs, or the script and its arguments.
    """

    runs: tuple[str, ...]
    configs: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScriptRequest:
    """The sbatch options of the script; ``further`` are passed on unchanged."""

    name: str
    folder: Path
    python: str
    lead_s: int
    learns_lead: bool = True
    time: str | None = None
    nodes: str = "1"
    ranks_per_node: str | None = None
    gpus_per_node: str | None = None
    cpus_per_task: int | None = None
    partition: str | None = None
    account: str | None = None
    output: str | None = None
    array: str | None = None
    master_address: str | None = None
    may_requeue: bool = True
    further: tuple[tuple[str, str], ...] = ()


def time_limit_s(text: str) -> float | None:
    """A time limit of sbatch (``90``, ``04:00:00``, ``1-12``) in seconds; None for ``UNLIMITED`` and for 0.

    Raises:
        BadUsage: it is not a time limit.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    found = _TIME.fullmatch(text)
    if found is None:
        complaint = (
            f"--time {text} is not a time limit of SLURM: minutes, minutes:seconds, hours:minutes:seconds or days-hours"
        )
        raise BadUsage(command=COMMAND, complaint=complaint)
    parts = [int(part) for part in found["rest"].split(":")]
    if found["days"] is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return ((int(found["days"]) * 24 + hours) * 60 + minutes) * 60.0 + seconds or None
    if len(parts) == 1:
        return parts[0] * 60.0 or None
    hours, minutes, seconds = (0, *parts)[-3:]
    return (hours * 60 + minutes) * 60.0 + seconds or None


def script_text(work: Work, request: ScriptRequest, path: Path) -> str:
    """The whole script, to be written to ``path``.

    Raises:
        BadUsage: a value cannot be written into a script.
    """
    _require_one_line(work, request)
    header = [f"#SBATCH --{name}={_directive(name, value)}" for name, value in _directives(work, request)]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Written by `{COMMAND}`. Submit it: unbroken slurm submit {for_shell(path.name)}",
            *header,
            *_signal_lines(work, request),
            "",
            f"cd {for_shell(request.folder)} || exit",
            *_surroundings(request),
            *_chosen_run(work),
            "",
            *_start_lines(work, request, path),
            "",
        ]
    )


def _directives(work: Work, request: ScriptRequest) -> list[tuple[str, str]]:
    is_array = len(work.runs) > 1 or request.array is not None
    log = request.output or f"slurm-{request.name}-{'%A_%a' if is_array else '%j'}.out"
    asked = [
        ("job-name", request.name),
        ("nodes", request.nodes),
        # One launcher per node starts the ranks of its node; SLURM need not know their number.
        ("ntasks-per-node", "1"),
        ("gpus-per-node", request.gpus_per_node),
        ("cpus-per-task", None if request.cpus_per_task is None else str(request.cpus_per_task)),
        ("time", request.time),
        ("partition", request.partition),
        ("account", request.account),
        ("array", request.array or (f"0-{len(work.runs) - 1}" if len(work.runs) > 1 else None)),
        ("chdir", str(request.folder)),
        ("output", log),
        # A requeued job has the same id: its output is appended.
        ("open-mode", "append"),
    ]
    given = {name for name, _ in request.further}
    return [*((name, value) for name, value in asked if value is not None and name not in given), *request.further]


def _require_one_line(work: Work, request: ScriptRequest) -> None:
    """Reject paths that would break out of a comment line: sbatch and `submit` read those unquoted."""
    source = "training.output_dir" if work.configs else "--run-dir"
    for name, value in (("the working directory", str(request.folder)), *((source, run) for run in work.runs)):
        if not value.isprintable():
            complaint = f"{name} {value!r} contains a line break or control character"
            raise BadUsage(command=COMMAND, complaint=complaint)


def _directive(name: str, value: str) -> str:
    if '"' in value or not value.isprintable():
        raise BadUsage(command=COMMAND, complaint=f"--{name} {value!r} cannot be written into a batch script")
    return f'"{value}"' if re.search(r"[\s#']", value) else value


def _signal_lines(work: Work, request: ScriptRequest) -> list[str]:
    learns = request.learns_lead and request.array is None
    learned = [f"{LEARNS_FROM}{request.folder / run}" for run in work.runs if learns]
    return [
        f"#SBATCH --{'requeue' if request.may_requeue else 'no-requeue'}",
        "# The signal goes to this script only (B:), which requests a save through the run directory.",
        "# Sent to the steps, it would kill every process without a handler for SIGUSR1, such as data workers.",
        f"#SBATCH --signal=B:USR1@{request.lead_s}",
        *learned,
    ]


def _surroundings(request: ScriptRequest) -> list[str]:
    lines = [
        "# srun does not inherit this from sbatch.",
        'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"',
    ]
    if not _is_one_node(request):
        address = (
            for_shell(request.master_address)
            if request.master_address
            else '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        )
        lines += [
            "# Rendezvous: the first node, at a port that no other job uses at the same time.",
            f"export MASTER_ADDR={address}",
            "export MASTER_PORT=$((20000 + (SLURM_JOB_ID + ${SLURM_RESTART_COUNT:-0}) % 12000))",
        ]
    return lines


def _is_one_node(request: ScriptRequest) -> bool:
    return request.nodes == "1"


def _chosen_run(work: Work) -> list[str]:
    if len(work.runs) == 1:
        return [f"run={_with_index(work.runs[0])}"]
    return [
        f"runs=({shell_line(work.runs)})",
        f"configs=({shell_line(work.configs)})",
        "run=${runs[SLURM_ARRAY_TASK_ID]}",
        "config=${configs[SLURM_ARRAY_TASK_ID]}",
    ]


def _start_lines(work: Work, request: ScriptRequest, path: Path) -> list[str]:
    unbroken = f"{for_shell(request.python)} -m unbroken"
    # Explicit: a requeued job with fewer nodes inherits the old number of tasks. With --kill-on-bad-exit=0 the
    # first rank that fails does not kill the one that writes the outcome.
    step = 'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"'
    step += f" --kill-on-bad-exit=0 --wait={_WAIT_FOR_NODES_S}"
    verb, words = _program(work)
    ranks = [] if request.ranks_per_node is None else ["--nproc-per-node", request.ranks_per_node]
    options = f"{shell_line(ranks)} {words}".strip()
    start = f"{unbroken} {verb} {options}"
    if not _is_one_node(request):
        meeting = '--nnodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID"'
        meeting += ' --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"'
        # The rank of a node is known only inside its task.
        start = f"""bash -c 'exec "$0" -m unbroken {verb} {meeting} "$@"' {for_shell(request.python)} {options}"""
    return [
        "# Runs the step, forwards the signal, and requeues this job if `unbroken outcome` says again, never after",
        "# done, look or held. With --link nothing is started if the run is done, held or needs attention.",
        f'exec {unbroken} slurm job "$run" --script {for_shell(path)} "$@" -- \\',
        f"    {step} \\",
        f"    {start}",
    ]


def _program(work: Work) -> tuple[str, str]:
    if not work.configs:
        words = " ".join(map(_with_index, work.words))
        return "run", f'--run-dir "$run" -- {words}'
    config = '"$config"' if len(work.configs) > 1 else for_shell(work.configs[0])
    return "train", f"{config} {shell_line(work.words)}".rstrip()


def _with_index(word: str) -> str:
    """A word quoted for bash, with ``%a`` replaced by the task id of the array."""
    pieces = [for_shell(piece) if piece else "" for piece in word.split("%a")]
    return _ARRAY_INDEX.join(pieces) or "''"


def learned_runs(text: str) -> list[Path]:
    """The runs from which the lead time is learned; none if --walltime-reserve was given."""
    return [Path(line.removeprefix(LEARNS_FROM)) for line in text.splitlines() if line.startswith(LEARNS_FROM)]


def script_time(text: str) -> str | None:
    """The time limit in a script, as written; None if there is none."""
    return _last_value(text, _TIME_OPTION)


def script_lead_s(text: str) -> int | None:
    """The lead time of the signal in a script; None if there is none."""
    found = _last_value(text, _LEAD_OPTION)
    return None if found is None else int(found)


def _last_value(text: str, pattern: re.Pattern[str]) -> str | None:
    """The last match: sbatch reads up to the first command, and a later line overrides an earlier one."""
    head = itertools.takewhile(lambda line: line.startswith("#") or not line.strip(), text.splitlines())
    return next((found["value"] for line in reversed([*head]) if (found := pattern.match(line))), None)


def whole_lead(seconds: float, least_s: int) -> int:
    """A lead time as an integer in the range of sbatch."""
    return min(MOST_LEAD_S, max(least_s, math.ceil(seconds)))


def further_options(words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse ``KEY=VALUE`` options for sbatch, with or without leading dashes.

    Raises:
        BadUsage: one of them is not ``KEY=VALUE``.
    """
    pairs = []
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lstrip("-")
        if not equals or not re.fullmatch(r"[a-z][a-z-]*", key):
            complaint = f"--sbatch needs KEY=VALUE, such as qos=long, not '{word}'"
            raise BadUsage(command=COMMAND, complaint=complaint)
        if key == "signal":
            complaint = "--sbatch signal would replace the signal that makes the job save; use --walltime-reserve"
            raise BadUsage(command=COMMAND, complaint=complaint)
        pairs.append((key, value))
    return tuple(pairs)
