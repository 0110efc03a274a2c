"""``unbroken slurm init``: writes a batch script for a config, several configs as an array, or a training script."""

import math
import sys
from pathlib import Path
from typing import Any, Final

import click

from unbroken.cli.arguments import DiskPath, Duration, write_new
from unbroken.cli.output import Output, as_command
from unbroken.config.decode import decode
from unbroken.config.overrides import take_apart
from unbroken.config.source import read
from unbroken.errors import BadUsage, Help
from unbroken.errors.tree import quoted
from unbroken.launch.command import require_target, target_of
from unbroken.launch.slurm.script import (
    COMMAND,
    MOST_LEAD_S,
    ScriptRequest,
    Work,
    further_options,
    script_text,
    time_limit_s,
)
from unbroken.launch.slurm.submit import lead_s, require_lead
from unbroken.quoting import amounts

# Script and log are named after the job, and a file name has at most 255 bytes.
_MOST_NAME: Final = 200
_RANKS: Final = ("gpu", "cpu", "auto")


@as_command(
    "init",
    examples=(
        ("unbroken slurm init config.yaml --time 04:00:00 --gpus-per-node 8", "a config"),
        ("unbroken slurm init --run-dir runs/a --time 4:00:00 -- train.py", "a script"),
        ("unbroken slurm init a.yaml b.yaml --time 12:00:00", "an array of two runs"),
    ),
    context_settings={"ignore_unknown_options": True},
)
@click.argument("words", metavar="CONFIG... | -- SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-o",
    "--script",
    "target",
    type=DiskPath(),
    metavar="FILE",
    help="File to write; default: NAME.sbatch.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--run-dir", metavar="RUN", help="Run directory of SCRIPT.")
@click.option("--resume", metavar="WHAT", help="With CONFIG, as for unbroken train: auto, scratch or a checkpoint.")
@click.option("--time", metavar="LIMIT", help="Walltime limit of a job, as for sbatch: 04:00:00, 1-12.")
@click.option("--nodes", default="1", metavar="N", help="Number of nodes, or a range: 1-4.")
@click.option("--nproc-per-node", metavar="N", help="Ranks per node; default: --gpus-per-node.")
@click.option("--gpus-per-node", metavar="N", help="GPUs per node.")
@click.option("--cpus-per-task", type=click.IntRange(1), metavar="N", help="CPU cores per node.")
@click.option("--partition", metavar="NAME", help="Partition.")
@click.option("--account", metavar="NAME", help="Account to charge.")
@click.option("--output", "log", metavar="FILE", help="Log file of the job; %j is the job id.")
@click.option("--name", metavar="NAME", help="Job name; default: the last part of the run directory.")
@click.option("--array", metavar="RANGE", help="With --run-dir: an array of runs; %a is the task id.")
@click.option(
    "--walltime-reserve",
    type=Duration(),
    metavar="DURATION",
    help="Save this long before the walltime limit; default: from measured saves.",
)
@click.option("--master-addr", metavar="HOST", help="Address of node 0; default: the first host of the job.")
@click.option("--no-requeue", is_flag=True, help="For sites without requeue: submit a new job instead.")
@click.option("--sbatch", "options", multiple=True, metavar="KEY=VALUE", help="More options for sbatch; repeatable.")
def command(
    output: Output,
    words: tuple[str, ...],
    target: Path | None,
    force: bool,
    run_dir: str | None,
    resume: str | None,
    array: str | None,
    name: str | None,
    **asked: Any,  # noqa: ANN401 -- click's values, each checked where it is used
) -> None:
    """Write a batch script.

    Its job saves before the walltime limit and requeues itself until the run is done. CONFIG is a config of `unbroken
    train`; several configs become a job array. SCRIPT is run by `unbroken run` and needs --run-dir. The script is not
    submitted: use `unbroken slurm submit`.
    """
    if run_dir is not None and resume is not None:
        raise BadUsage(command=COMMAND, complaint="--resume needs CONFIG; a script has its own resume setting")
    overrides = () if resume is None else (f"training.resume={resume}",)
    work = _script_work(words, run_dir, array) if run_dir is not None else _config_work((*words, *overrides), array)
    called = name or _name(work)
    _require_sound(called, {"run_dir": run_dir, "array": array, "name": name, **asked})
    path = (target or Path(f"{called}.sbatch")).absolute()
    request = _request(work, called, array, asked)
    text = script_text(work, request, path)
    remedy = Help(f"unbroken slurm submit {quoted(path)}", "submit the existing script; --force overwrites it")
    write_new(COMMAND, path, text, remedy, is_replacing=force)
    fields = {"path": str(path), "runs": list(work.runs), "lead_s": request.lead_s, "text": text}
    output.document("unbroken.slurm-init/1", fields, lambda: _text(path, request))


def _config_work(words: tuple[str, ...], array: str | None) -> Work:
    if array is not None:
        raise BadUsage(command=COMMAND, complaint="--array needs --run-dir; several configs are an array without it")
    taken = take_apart(words)
    for option in (word for word in taken.rest if word.startswith("-")):
        raise BadUsage(command=COMMAND, complaint=f"no such option: {option}")
    if not taken.rest:
        raise BadUsage(command=COMMAND, complaint="missing argument CONFIG; for a script: --run-dir RUN -- SCRIPT")
    for path in (word for word in taken.rest if word.endswith(".py")):
        complaint = f"{path} is a script, not a config; use --run-dir RUN -- {path}"
        raise BadUsage(command=COMMAND, complaint=complaint)
    decoded = [decode(read(Path(path)), taken.overrides, source=path).config for path in taken.rest]
    runs = tuple(config.training.output_dir for config in decoded)
    if twice := sorted({run for run in runs if runs.count(run) > 1}):
        complaint = f"two configs have the same training.output_dir: {twice[0]}"
        raise BadUsage(command=COMMAND, complaint=complaint)
    return Work(runs, taken.rest, taken.written)


def _script_work(words: tuple[str, ...], run_dir: str, array: str | None) -> Work:
    target = target_of(COMMAND, None, words)
    # In an array the name may contain the task id, which is not known yet.
    if "%a" not in target.name:
        require_target(COMMAND, target, Path.cwd())
    if array is not None and "%a" not in run_dir:
        complaint = f"--array needs %a in --run-dir {run_dir}: each task needs its own run"
        raise BadUsage(command=COMMAND, complaint=complaint)
    if array is None and any("%a" in word for word in (run_dir, *words)):
        complaint = "%a is the task id of an array; add --array, for example --array 0-4"
        raise BadUsage(command=COMMAND, complaint=complaint)
    return Work((run_dir,), (), words)


def _name(work: Work) -> str:
    return Path(work.runs[0].replace("%a", "")).name.strip("-_.") or "run"


def _require_sound(name: str, asked: dict[str, Any]) -> None:
    """Reject what SLURM would reject at submission, or what would make the job fail at its start."""
    empty = ["output" if key == "log" else key.replace("_", "-") for key, value in asked.items() if value == ""]
    complaints = [f"--{option} is empty" for option in empty]
    least, _, most = asked["nodes"].partition("-")
    if asked["nodes"] and not all(part.isdecimal() and int(part) > 0 for part in (least, most or least)):
        complaints.append(f"--nodes {asked['nodes']} is neither a number of nodes nor a range such as 1-4")
    elif most and int(least) > int(most):
        complaints.append(f"--nodes {asked['nodes']} is an empty range; use {most}-{least}")
    # %j and the like are filled in by SLURM, so the directory is not known here.
    folder = Path(dict(further_options(asked["options"])).get("chdir", "."), log := asked["log"] or ".").parent
    if log != "." and "%" not in str(folder) and not folder.is_dir():
        complaints.append(f"--output {log}: the directory {folder} does not exist, and SLURM does not create it")
    if "/" in name:
        complaints.append(f"the job name '{name}' contains a slash")
    if len(name) > _MOST_NAME:
        complaints.append(
            f"the job name has {len(name)} characters, more than {_MOST_NAME}; set a shorter one with --name"
        )
    if complaints:
        raise BadUsage(command=COMMAND, complaint="; ".join(complaints))


def _request(work: Work, name: str, array: str | None, asked: dict[str, Any]) -> ScriptRequest:
    ranks = asked["nproc_per_node"] or asked["gpus_per_node"]
    if ranks is not None and ranks not in _RANKS and not (ranks.isdecimal() and int(ranks) > 0):
        option = "--nproc-per-node" if asked["nproc_per_node"] else "--gpus-per-node"
        complaint = f"{option} {ranks} is neither a number of ranks nor one of {', '.join(_RANKS)}"
        raise BadUsage(command=COMMAND, complaint=complaint)
    further = further_options(asked["options"])
    # --sbatch options replace ours in the script.
    time = dict(further).get("time", asked["time"])
    limit_s = time_limit_s(time) if time else None
    reserve_s = asked["walltime_reserve"]
    if reserve_s is not None and not 1 <= reserve_s <= MOST_LEAD_S:
        complaint = f"--walltime-reserve must be from 1 to {MOST_LEAD_S} seconds, not {reserve_s:g}"
        raise BadUsage(command=COMMAND, complaint=complaint)
    lead = lead_s([Path(run) for run in work.runs], limit_s) if reserve_s is None else math.ceil(reserve_s)
    require_lead(lead, limit_s, command=COMMAND)
    return ScriptRequest(
        name=name,
        folder=Path.cwd(),
        python=sys.executable,
        lead_s=lead,
        learns_lead=reserve_s is None,
        time=asked["time"],
        nodes=asked["nodes"],
        ranks_per_node=ranks,
        gpus_per_node=asked["gpus_per_node"],
        cpus_per_task=asked["cpus_per_task"],
        partition=asked["partition"],
        account=asked["account"],
        output=asked["log"],
        array=array,
        master_address=asked["master_addr"],
        may_requeue=not asked["no_requeue"],
        further=further,
    )


def _text(path: Path, request: ScriptRequest) -> str:
    return (
        f"wrote {path}  (the job saves {amounts.duration(request.lead_s)} before its walltime limit)\n"
        f"next: unbroken slurm submit {quoted(path)}"
    )
