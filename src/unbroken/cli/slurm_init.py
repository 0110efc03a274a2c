"""``unbroken slurm init``: a batch script for a config, for several as an array, or for any training script."""

import sys
from pathlib import Path
from typing import Any, Final

import click

from unbroken.cli.arguments import write_new
from unbroken.cli.output import Output, as_command
from unbroken.config.decode import decode
from unbroken.config.overrides import take_apart
from unbroken.config.source import read
from unbroken.errors import BadUsage, Help
from unbroken.errors.tree import quoted
from unbroken.launch.command import require_target, target_of
from unbroken.launch.slurm.script import COMMAND, MOST_LEAD_S, Request, Work, further_options, script_text, time_limit_s
from unbroken.launch.slurm.submit import lead_s, require_lead
from unbroken.quoting import amounts

# Its script and its log are named after the job, and a file's name has 255 bytes at most.
_MOST_NAME: Final = 200
_RANKS: Final = ("gpu", "cpu", "auto")


@as_command("init", context_settings={"ignore_unknown_options": True})
@click.argument("words", metavar="CONFIG... | -- SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option("-o", "--script", "target", type=click.Path(path_type=Path), metavar="FILE", help="Where it is written.")
@click.option("--force", is_flag=True, help="Replace a script that is there.")
@click.option("--run-dir", metavar="RUN", help="The run of a training script; the words after -- start it.")
@click.option("--time", metavar="LIMIT", help="How long a job may take, as sbatch has it: 04:00:00, 1-12.")
@click.option("--nodes", default="1", metavar="N", help="Nodes, or least and most: 1-4.")
@click.option("--nproc-per-node", metavar="N", help="Ranks on each node; as many as GPUs if those are given.")
@click.option("--gpus-per-node", metavar="N", help="GPUs on each node.")
@click.option("--cpus-per-task", type=click.IntRange(1), metavar="N", help="CPU cores on each node.")
@click.option("--partition", metavar="NAME", help="Where the job is to run.")
@click.option("--account", metavar="NAME", help="Who pays.")
@click.option("--output", "log", metavar="FILE", help="Where the job's output goes; %j is its number.")
@click.option("--name", metavar="NAME", help="The job's name; the run's by default.")
@click.option("--array", metavar="RANGE", help="With --run-dir: one run for each number, which replaces %a.")
@click.option("--lead", type=click.IntRange(1, MOST_LEAD_S), metavar="S", help="Warn S seconds before the end.")
@click.option("--master-addr", metavar="HOST", help="Where nodes meet; the first node's name by default.")
@click.option("--no-requeue", is_flag=True, help="The site lets no job be queued again: followers are submitted.")
@click.option("--sbatch", "options", multiple=True, metavar="KEY=VALUE", help="One more option of sbatch; repeatable.")
def command(
    output: Output,
    words: tuple[str, ...],
    target: Path | None,
    force: bool,
    run_dir: str | None,
    array: str | None,
    name: str | None,
    **asked: Any,  # noqa: ANN401 -- click's values, each checked where it is used
) -> None:
    """Write a batch script for a config or a script.

    Its job saves before its time is over, and queues itself again until the run is complete.

    CONFIG is what `unbroken train` takes; several are an array of runs. With --run-dir the words after -- are a
    training script for `unbroken run`. Nothing is submitted: that is `unbroken slurm submit`.
    """
    work = _script_work(words, run_dir, array) if run_dir is not None else _config_work(words, array)
    called = name or _name(work)
    _require_sound(called, {"run_dir": run_dir, "array": array, "name": name, **asked})
    path = (target or Path(f"{called}.sbatch")).absolute()
    request = _request(work, called, array, asked)
    text = script_text(work, request, path)
    remedy = Help(f"unbroken slurm submit {quoted(path)}", "submit the one that is there; --force replaces it")
    write_new(COMMAND, path, text, remedy, is_replacing=force)
    fields = {"path": str(path), "runs": list(work.runs), "lead_s": request.lead_s, "text": text}
    output.document("unbroken.slurm-init/1", fields, lambda: _said(path, request))


def _config_work(words: tuple[str, ...], array: str | None) -> Work:
    if array is not None:
        raise BadUsage(
            command=COMMAND, complaint="--array belongs to --run-dir; several configs are an array by themselves"
        )
    taken = take_apart(words)
    for option in (word for word in taken.rest if word.startswith("-")):
        raise BadUsage(command=COMMAND, complaint=f"there is no option '{option}'")
    if not taken.rest:
        raise BadUsage(
            command=COMMAND, complaint="the argument CONFIG is missing; a script needs --run-dir RUN -- SCRIPT"
        )
    for path in (word for word in taken.rest if word.endswith(".py")):
        complaint = f"{path} is a script, no config; name its run before it: --run-dir RUN -- {path}"
        raise BadUsage(command=COMMAND, complaint=complaint)
    decoded = [decode(read(Path(path)), taken.overrides, source=path).config for path in taken.rest]
    runs = tuple(config.training.output_dir for config in decoded)
    if twice := sorted({run for run in runs if runs.count(run) > 1}):
        complaint = f"two configs have the same training.output_dir: {twice[0]}; each run needs one of its own"
        raise BadUsage(command=COMMAND, complaint=complaint)
    return Work(runs, taken.rest, taken.written)


def _script_work(words: tuple[str, ...], run_dir: str, array: str | None) -> Work:
    target = target_of(COMMAND, None, words)
    # With an array the name may hold the task's number, which is known only then.
    if "%a" not in target.name:
        require_target(COMMAND, target, Path.cwd())
    if array is not None and "%a" not in run_dir:
        complaint = f"--array needs a run for each number: --run-dir {run_dir} has no %a in it"
        raise BadUsage(command=COMMAND, complaint=complaint)
    if array is None and any("%a" in word for word in (run_dir, *words)):
        complaint = "%a is the number of an array's task, and there is no array: --array 0-4 makes one"
        raise BadUsage(command=COMMAND, complaint=complaint)
    return Work((run_dir,), (), words)


def _name(work: Work) -> str:
    return Path(work.runs[0].replace("%a", "")).name.strip("-_.") or "run"


def _require_sound(name: str, asked: dict[str, Any]) -> None:
    """Refuse what SLURM would refuse only at submission, or what would make the job fail as it starts."""
    empty = ["output" if key == "log" else key.replace("_", "-") for key, value in asked.items() if value == ""]
    complaints = [f"--{option} is empty" for option in empty]
    least, _, most = asked["nodes"].partition("-")
    if asked["nodes"] and not all(part.isdecimal() and int(part) > 0 for part in (least, most or least)):
        complaints.append(f"--nodes {asked['nodes']} is not a number of nodes, nor a range: 2, 1-4")
    elif most and int(least) > int(most):
        complaints.append(f"--nodes {asked['nodes']} is a range from more to fewer nodes; write {most}-{least}")
    # A mark like %j is filled in by SLURM, so what folder it makes cannot be known here.
    folder = Path(dict(further_options(asked["options"])).get("chdir", "."), log := asked["log"] or ".").parent
    if log != "." and "%" not in str(folder) and not folder.is_dir():
        complaints.append(f"--output {log} is in a folder that does not exist, and SLURM does not create it: {folder}")
    if "/" in name:
        complaints.append(f"the job name '{name}' contains a slash")
    if len(name) > _MOST_NAME:
        complaints.append(f"the job name has {len(name)} characters, more than {_MOST_NAME}; --name sets a shorter one")
    if complaints:
        raise BadUsage(command=COMMAND, complaint="; ".join(complaints))


def _request(work: Work, name: str, array: str | None, asked: dict[str, Any]) -> Request:
    ranks = asked["nproc_per_node"] or asked["gpus_per_node"]
    if ranks is not None and ranks not in _RANKS and not (ranks.isdecimal() and int(ranks) > 0):
        option = "--nproc-per-node" if asked["nproc_per_node"] else "--gpus-per-node"
        complaint = f"{option} {ranks} is neither a number of ranks nor one of {', '.join(_RANKS)}"
        raise BadUsage(command=COMMAND, complaint=complaint)
    further = further_options(asked["options"])
    # An option of sbatch replaces ours in the script.
    time = dict(further).get("time", asked["time"])
    limit_s = time_limit_s(time) if time else None
    lead = asked["lead"] or lead_s([Path(run) for run in work.runs], limit_s)
    require_lead(lead, limit_s, command=COMMAND)
    return Request(
        name=name,
        folder=Path.cwd(),
        python=sys.executable,
        lead_s=lead,
        learns_lead=asked["lead"] is None,
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


def _said(path: Path, request: Request) -> str:
    return (
        f"wrote {path}  (SLURM warns the job {amounts.duration(request.lead_s)} before its end)\n"
        f"next: unbroken slurm submit {quoted(path)}"
    )
