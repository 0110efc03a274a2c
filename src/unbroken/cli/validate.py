"""``unbroken validate``: is this config sound, and where does each value come from."""

import importlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from unbroken.cli.arguments import allowance_options, allowance_overrides, config_arguments, config_path
from unbroken.cli.output import Output, as_command
from unbroken.config import Config, Resolved
from unbroken.config.commented import as_yaml
from unbroken.config.decode import decode
from unbroken.config.document import all_fields
from unbroken.config.memory_need import compute_bytes, estimate
from unbroken.config.overrides import take_apart
from unbroken.config.source import read
from unbroken.errors import DataMissing
from unbroken.launch.started import require_own
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.records.deadline import learned_reserve
from unbroken.records.journal import read_journal
from unbroken.records.layout import Layout
from unbroken.records.metrics import Stitched, read_metrics
from unbroken.report.style import Style
from unbroken.report.table import Column, table


def derived(config: Config) -> dict[str, Any]:
    """What each null field amounts to, as far as the config alone can tell."""
    model = config.model
    candidates: dict[str, Any] = {
        "model.n_kv_head": model.kv_heads,
        "model.qkv_bias": model.has_qkv_bias,
        "model.attn_out_bias": model.has_attn_out_bias,
        "model.mlp_bias": model.has_mlp_bias,
        "model.intermediate_size": model.mlp_width,
        "optimizer.decay_steps": config.optimizer.resolved_decay_steps(config.training.max_steps),
    }
    return {name: value for name, value in candidates.items() if config.value(name) is None}


# ---- the data ----

NEEDED: Final = "numpy"
_FORECAST: Final = "unbroken.data.forecast"


def data_facts(config: Config, world: int, output: Output, *, is_strict: bool) -> dict[str, Any] | None:
    """The forecast as plain facts; None where nothing here can look at data.

    Raises:
        DataMissing: there is no folder at ``data.path``.
        DataUnfit: data and config do not go together; every problem is in it.
        DataError: the data is damaged or unfinished.
    """
    path = Path(config.data.path)
    if not path.is_dir():
        raise DataMissing(path=path, lacks="the folder that data.path names does not exist")
    try:
        importlib.import_module(NEEDED)
    except ModuleNotFoundError:
        return None
    with output.progress("plan", _documents(config)) as advance:
        found = importlib.import_module(_FORECAST).forecast(config, world, progress=advance)
    if found.problems:
        for warning in found.warnings:
            output.note(f"warning: {warning}")
    found.require_fit(strict=is_strict)
    return {
        "path": str(found.path),
        "world_size": world,
        "sequences_per_step": found.global_batch,
        "steps_asked": found.steps,
        "steps_available": found.steps_available,
        "vocabulary": found.vocabulary,
        "warnings": list(found.warnings),
        "buckets": [
            {
                "name": each.name,
                "shards": each.shards,
                "documents": each.documents,
                "tokens": each.tokens,
                "sequences": each.sequences,
                "fill": float(each.fill),
                "drawn": each.drawn,
                "passes": float(each.passes),
                "exhausted_step": each.exhausted_step,
            }
            for each in found.buckets
        ],
    }


def _documents(config: Config) -> int:
    """How many documents a plan has to look at, by the size of the indexes: 10 bytes each."""
    return sum(path.stat().st_size for path in Path(config.data.path, "train").rglob("*.idx")) // 10


def data_text(facts: Mapping[str, Any], style: Style) -> str:
    """The same for a person."""
    buckets: Sequence[Mapping[str, Any]] = facts["buckets"]
    sequences, tokens = (sum(each[name] for each in buckets) for name in ("sequences", "tokens"))
    counts = f"{amounts.plural(len(buckets), 'bucket')}, {amounts.plural(tokens, 'token')}"
    lines = [
        f"data     {printable(facts['path'])}  ({counts} in {amounts.plural(sequences, 'sequence')})",
        f"reach    {_reach(facts)}",
        *(f"{style.warn('warning')}  {printable(warning)}" for warning in facts["warnings"]),
        "",
        _table(buckets, style),
    ]
    return "\n".join(lines)


def _reach(facts: Mapping[str, Any]) -> str:
    asked, available = facts["steps_asked"], facts["steps_available"]
    if available is None:
        return f"without end; {amounts.plural(asked, 'step')} are asked for"
    return f"{amounts.plural(available, 'step')}; {amounts.count(asked)} are asked for"


def _table(buckets: Sequence[Mapping[str, Any]], style: Style) -> str:
    names = ("documents", "tokens", "sequences", "fill", "drawn", "passes", "dry at step")
    columns = [Column("bucket"), *(Column(name, is_number=True) for name in names)]
    rows = [
        (
            printable(each["name"]),
            *(amounts.count(each[name]) for name in ("documents", "tokens", "sequences")),
            f"{100 * each['fill']:.2f} %",
            amounts.count(each["drawn"]),
            f"{each['passes']:.2f}",
            "-" if each["exhausted_step"] is None else amounts.count(each["exhausted_step"]),
        )
        for each in buckets
    ]
    return table(columns, rows, style=style)


# ---- the model ----

SPEED: Final = "tokens_per_s"
_RECENT: Final = 50


def memory_facts(config: Config, world: int, vocabulary: int | None) -> dict[str, Any] | None:
    """Bytes on one rank; None where nobody says how many ids there are.

    Args:
        config: what is trained.
        world: the number of ranks.
        vocabulary: the ids of the tokenizer that made the data, where that is known.
    """
    rows = config.model.rows(vocabulary)
    if rows is None:
        return None
    found = estimate(config, rows, world)
    return {
        **{f"{name}_bytes": size for name, size in asdict(found).items()},
        "total_bytes": found.total,
        "world_size": world,
        "sharding": config.training.sharding,
        "vocab_size": rows,
        "compute_bits": 8 * compute_bytes(config),
    }


def memory_text(facts: Mapping[str, Any] | None, config: Config) -> str:
    """The same for a person."""
    if facts is None:
        return "memory   not estimated: model.vocab_size is null, and no data says how many ids there are"
    size = {name.removesuffix("_bytes"): amounts.size(facts[name]) for name in facts if name.endswith("_bytes")}
    ranks = amounts.plural(facts["world_size"], "rank")
    held = f"sharded over {ranks}" if facts["sharding"] == "fsdp2" and facts["world_size"] > 1 else f"whole on {ranks}"
    assumed = ", as on a GPU" if config.training.mixed_precision is None else ""
    checkpointed = config.training.gradient_checkpointing
    every = "" if checkpointed is True or not checkpointed else f" (one block in {checkpointed} recomputed)"
    kept = ("weights", "gradients", "optimizer", *(("average",) if facts["average_bytes"] else ()), "logits")
    states = ", ".join(f"{name} {size[name]}" for name in kept)
    both = f"{size['activations_recomputed']} with gradient_checkpointing, {size['activations_kept']} without"
    return "\n".join(
        [
            f"memory   {size['total']} a rank, {held}, computed in {facts['compute_bits']} bits{assumed}",
            f"         {states}",
            f"         activations {size['activations']}{every}; {both}",
        ]
    )


def walltime_facts(config: Config, world: int) -> dict[str, Any] | None:
    """How many jobs the run takes; None where no wall time is set.

    Raises:
        StorageFailed: the system refused to read the records of the run.
    """
    limit_s = config.training.max_runtime_seconds
    if limit_s is None:
        return None
    layout = Layout(Path(config.training.output_dir))
    measured = read_metrics(layout)
    reserve_s = learned_reserve(read_journal(layout), config.training.walltime_reserve_seconds).seconds(limit_s)
    usable_s = max(0.0, limit_s - reserve_s)
    done = max(measured.kept, default=0)
    left = max(0, config.training.max_steps - done)
    step_s = _step_s(measured, config.global_batch_size(world) * config.data.max_length)
    steps_per_job = None if step_s is None else int(usable_s / step_s)
    return {
        "job_s": limit_s,
        "reserve_s": reserve_s,
        "usable_s": usable_s,
        "steps_done": done,
        "steps_left": left,
        "step_s": step_s,
        "steps_per_job": steps_per_job,
        "jobs": math.ceil(left / steps_per_job) if steps_per_job else None,
        "step_s_for_one_job": usable_s / left if left else None,
    }


def _step_s(measured: Stitched, tokens_per_step: int) -> float | None:
    speeds = [value for _, value in measured.series(SPEED)[-_RECENT:] if value > 0]
    return tokens_per_step / statistics.median(speeds) if speeds else None


def walltime_text(facts: Mapping[str, Any]) -> str:
    """The same for a person."""
    job, reserve = amounts.duration(facts["job_s"]), amounts.duration(facts["reserve_s"])
    lines = [f"walltime {job} a job, which stops {reserve} before its end"]
    left = facts["steps_left"]
    if not left:
        return "\n".join([*lines, "         no step is left"])
    if facts["step_s"] is None:
        needed = _seconds(facts["step_s_for_one_job"])
        lines.append(
            f"         {amounts.plural(left, 'step')} in one job if a step takes {needed}, in two if twice as long"
        )
    elif not facts["steps_per_job"]:
        lines.append(f"         a step took {_seconds(facts['step_s'])}: no job would finish one")
    else:
        per_job = f"{amounts.plural(facts['steps_per_job'], 'step')} a job"
        jobs = f"{amounts.plural(facts['jobs'], 'job')} for the {amounts.count(left)} left"
        lines.append(f"         a step took {_seconds(facts['step_s'])}: {per_job}, {jobs}")
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return amounts.duration(seconds) if seconds >= 1 else f"{1000 * seconds:.3g} ms"


# ---- the command ----


@as_command("validate", context_settings={"ignore_unknown_options": True})
@config_arguments
@click.option("--print-config", is_flag=True, help="Print every value and where it came from.")
@click.option("--world-size", type=click.IntRange(1), default=1, metavar="N", help="Ranks of the first job; 1.")
@click.option("--no-data", is_flag=True, help="Check the config alone.")
@click.option("--strict", is_flag=True, help="Take every warning about the data for a problem.")
@allowance_options
def command(
    output: Output,
    arguments: tuple[str, ...],
    named: str | None,
    print_config: bool,
    world_size: int,
    no_data: bool,
    strict: bool,
    **allowed: bool,
) -> None:
    """Check a config and name every problem in it.

    CONFIG is a YAML or JSON file. OVERRIDE is --section.field value, --section.field=value or section.field=value.
    Then the data is looked at: how far it reaches, and what does not fit. The memory of a rank is counted, devices are
    not looked at; where a wall time is set, the number of jobs is. Exit code 0: sound; 2: the config has problems; 4:
    the data is missing, damaged or does not fit.
    """
    taken = take_apart((*arguments, *allowance_overrides(allowed)))
    path = config_path("unbroken validate", taken.rest, named, one="one config is checked at a time")
    resolved = decode(read(path), taken.overrides, source=str(path))
    require_own(Layout(Path(resolved.config.training.output_dir)))
    data = None if no_data else data_facts(resolved.config, world_size, output, is_strict=strict)
    memory = memory_facts(resolved.config, world_size, data["vocabulary"] if data else None)
    walltime = walltime_facts(resolved.config, world_size)
    facts = {**_facts(path, resolved), "data": data, "memory": memory, "walltime": walltime}

    def text() -> str:
        said = [_values(resolved, output.style) + "\n"] if print_config else []
        said += [_said(path, resolved, world_size, output.style), memory_text(memory, resolved.config)]
        said += [walltime_text(walltime)] if walltime else []
        said += [data_text(data, output.style), ""] if data else []
        return "\n".join([*said, output.style.dim(_looked_at(data, no_data=no_data))])

    output.document("unbroken.validate/2", facts, text)


def _looked_at(data: dict[str, Any] | None, *, no_data: bool) -> str:
    if data:
        return "checked: the config file; the data's sizes, indexes and order; not looked at: devices, disk"
    why = "" if no_data else f" ({NEEDED} is not installed)"
    return f"checked: the config file; not looked at: data{why}, devices, disk"


def _facts(path: Path, resolved: Resolved) -> dict[str, Any]:
    config = resolved.config
    values = config.values()
    return {
        "path": str(path),
        "is_sound": True,
        "digest": config.digest(),
        "parameters": _parameters(config),
        "parameters_without_embedding": config.model.block_parameters(),
        "sequences_per_step_on_one_rank": config.global_batch_size(1),
        "tokens_per_step_on_one_rank": config.global_batch_size(1) * config.data.max_length,
        "fields": {
            name: {
                "value": values[field.section][field.name],
                "from": str(resolved.origins[name]),
                "resume": field.declaration.resume.value,
            }
            for name, field in all_fields().items()
        },
        "derived": derived(config),
    }


def _parameters(config: Config) -> int | None:
    vocab_size = config.model.vocab_size
    return None if vocab_size is None else config.model.parameters(vocab_size)


def _said(path: Path, resolved: Resolved, world: int, style: Style) -> str:
    config = resolved.config
    changed = sum(place.source != "default" for place in resolved.origins.values())
    sequences = config.global_batch_size(world)
    tokens = sequences * config.data.max_length
    ranks = (
        "on any number of ranks"
        if config.training.global_batch_size
        else f"for a run started on {amounts.plural(world, 'rank')}"
    )
    steps = config.training.max_steps
    lines = [
        f"{style.good('sound')}    {path}  ({changed} of {amounts.plural(len(resolved.origins), 'field')} set)",
        f"model    {_model_line(config)}",
        f"batch    {amounts.plural(sequences, 'sequence')}, {amounts.plural(tokens, 'token')} a step {ranks}",
        f"length   {amounts.plural(steps, 'step')}, {_short(steps * tokens)} tokens",
        f"digest   {config.digest()}",
    ]
    return "\n".join(lines)


def _model_line(config: Config) -> str:
    model = config.model
    parameters = _parameters(config)
    if parameters is not None:
        short, exact = _short(parameters), amounts.count(parameters)
        return f"{exact} parameters" if short == exact else f"{short} parameters ({exact})"
    blocks, per_row = model.block_parameters(), model.embedding_parameters(1)
    return f"{_short(blocks)} parameters + {amounts.count(per_row)} for each token of the vocabulary"


def _short(number: int) -> str:
    """A large number with three digits and a word: ``125 M``."""
    for unit, power in (("T", 12), ("B", 9), ("M", 6)):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {unit}"
    return amounts.count(number)


def _values(resolved: Resolved, style: Style) -> str:
    values = resolved.config.values()
    filled: Mapping[str, Any] = derived(resolved.config)
    rows = []
    for name, field in all_fields().items():
        value = as_yaml(values[field.section][field.name])
        if name in filled:
            value += f" -> {as_yaml(filled[name])} (derived)"
        rows.append((name, value, str(resolved.origins[name])))
    return table([Column("field"), Column("value"), Column("from", paint=style.dim)], rows, style=style)
