"""``unbroken validate``: checks a config before a run starts: values, data, memory, walltime.

One section for each of these, then the command. Needs no torch; the data is checked where numpy is installed.
"""

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
from unbroken.launch.run_config import require_own_run
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.records.deadline import learned_reserve
from unbroken.records.journal import read_journal
from unbroken.records.layout import Layout
from unbroken.records.metrics import Stitched, read_metrics
from unbroken.report.style import Style
from unbroken.report.table import Column, table


def derived(config: Config) -> dict[str, Any]:
    """The values derived for fields that are null, as far as they follow from the config alone."""
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


def data_fields(config: Config, world: int, output: Output, *, is_strict: bool) -> dict[str, Any] | None:
    """The forecast of the data as JSON fields; None if numpy is not installed.

    Raises:
        DataMissing: ``data.path`` does not exist.
        DataUnfit: data and config do not match; lists every problem.
        DataError: the data is damaged or incomplete.
    """
    path = Path(config.data.path)
    if not path.is_dir():
        raise DataMissing(path=path, lacks="the directory of data.path does not exist")
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
    """The number of documents, estimated from the size of the index files: 10 bytes each."""
    return sum(path.stat().st_size for path in Path(config.data.path, "train").rglob("*.idx")) // 10


def data_text(fields: Mapping[str, Any], style: Style) -> str:
    """The same as text."""
    buckets: Sequence[Mapping[str, Any]] = fields["buckets"]
    sequences, tokens = (sum(each[name] for each in buckets) for name in ("sequences", "tokens"))
    counts = f"{amounts.plural(len(buckets), 'bucket')}, {amounts.plural(tokens, 'token')}"
    lines = [
        f"data     {printable(fields['path'])}  ({counts} in {amounts.plural(sequences, 'sequence')})",
        f"steps    {_steps(fields)}",
        *(f"{style.warn('warning')}  {printable(warning)}" for warning in fields["warnings"]),
        "",
        _table(buckets, style),
    ]
    return "\n".join(lines)


def _steps(fields: Mapping[str, Any]) -> str:
    wanted, available = fields["steps_asked"], fields["steps_available"]
    if available is None:
        return f"{amounts.count(wanted)} requested; the data repeats without end"
    return f"{amounts.count(wanted)} requested, {amounts.count(available)} available"


def _table(buckets: Sequence[Mapping[str, Any]], style: Style) -> str:
    names = ("documents", "tokens", "sequences", "fill", "drawn", "passes", "exhausted at")
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


def memory_fields(config: Config, world: int, vocabulary: int | None) -> dict[str, Any] | None:
    """Memory of one rank in bytes; None if the vocabulary size is unknown.

    Args:
        config: the config.
        world: the number of ranks.
        vocabulary: the vocabulary size of the data's tokenizer, if known.
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


def memory_text(fields: Mapping[str, Any] | None, config: Config) -> str:
    """The same as text."""
    if fields is None:
        return "memory   not estimated: model.vocab_size is null and the data does not name its vocabulary size"
    size = {name.removesuffix("_bytes"): amounts.size(fields[name]) for name in fields if name.endswith("_bytes")}
    ranks = amounts.plural(fields["world_size"], "rank")
    held = (
        f"sharded over {ranks}" if fields["sharding"] == "fsdp2" and fields["world_size"] > 1 else f"whole on {ranks}"
    )
    assumed = " (assuming a GPU)" if config.training.mixed_precision is None else ""
    checkpointed = config.training.gradient_checkpointing
    every = "" if checkpointed is True or not checkpointed else f" (1 of {checkpointed} blocks recomputed)"
    kept = ("weights", "gradients", "optimizer", *(("average",) if fields["average_bytes"] else ()), "logits")
    states = ", ".join(f"{name} {size[name]}" for name in kept)
    both = f"{size['activations_recomputed']} with gradient_checkpointing, {size['activations_kept']} without"
    return "\n".join(
        [
            f"memory   {size['total']} per rank, {held}, {fields['compute_bits']}-bit compute{assumed}",
            f"         {states}",
            f"         activations {size['activations']}{every}; {both}",
        ]
    )


def walltime_fields(config: Config, world: int) -> dict[str, Any] | None:
    """The number of jobs the run needs; None if ``training.max_runtime_seconds`` is not set.

    Raises:
        StorageFailed: the records of the run could not be read.
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
        "walltime_s": limit_s,
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


def walltime_text(fields: Mapping[str, Any]) -> str:
    """The same as text."""
    job, reserve = amounts.duration(fields["walltime_s"]), amounts.duration(fields["reserve_s"])
    lines = [f"walltime {job} per job, of which {reserve} are reserved for the last save"]
    left = fields["steps_left"]
    if not left:
        return "\n".join([*lines, "         no steps left"])
    if fields["step_s"] is None:
        needed = _seconds(fields["step_s_for_one_job"])
        lines.append(f"         {amounts.plural(left, 'step')} fit into one job if a step takes at most {needed}")
    elif not fields["steps_per_job"]:
        lines.append(f"         a step took {_seconds(fields['step_s'])}: no job is long enough for one step")
    else:
        per_job = f"{amounts.plural(fields['steps_per_job'], 'step')} per job"
        jobs = f"{amounts.plural(fields['jobs'], 'job')} for the remaining {amounts.count(left)}"
        lines.append(f"         a step took {_seconds(fields['step_s'])}: {per_job}, {jobs}")
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return amounts.duration(seconds) if seconds >= 1 else f"{1000 * seconds:.3g} ms"


# ---- the command ----


@as_command(
    "validate",
    examples=(
        ("unbroken validate config.yaml", "check config and data"),
        ("unbroken validate config.yaml --world-size 8", "for a first job on 8 ranks"),
        ("unbroken validate config.yaml data.path=/data/c4", "with an override"),
    ),
    exit_codes={
        0: "the config is valid",
        2: "the config has problems; all of them are listed",
        4: "the data is missing, damaged or does not match the config",
    },
    context_settings={"ignore_unknown_options": True},
)
@config_arguments
@click.option("--print-config", is_flag=True, help="Also print every value and where it comes from.")
@click.option("--world-size", type=click.IntRange(1), default=1, metavar="N", help="Number of ranks of the first job.")
@click.option("--no-data", is_flag=True, help="Check only the config, not the data.")
@click.option("--strict", is_flag=True, help="Treat warnings about the data as errors.")
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
    """Check a config, its data, memory and walltime.

    CONFIG is a YAML or JSON file. OVERRIDE is section.field=value, --section.field=value or --section.field value.

    Lists all problems at once. Reports for how many steps the data lasts, estimates the memory of one rank, and, with
    training.max_runtime_seconds, the number of jobs. GPUs and disk space are not checked.
    """
    taken = take_apart((*arguments, *allowance_overrides(allowed)))
    path = config_path("unbroken validate", taken.rest, named, one="only one config can be checked at a time")
    resolved = decode(read(path), taken.overrides, source=str(path))
    require_own_run(Layout(Path(resolved.config.training.output_dir)))
    data = None if no_data else data_fields(resolved.config, world_size, output, is_strict=strict)
    memory = memory_fields(resolved.config, world_size, data["vocabulary"] if data else None)
    walltime = walltime_fields(resolved.config, world_size)
    fields = {**_fields(path, resolved), "data": data, "memory": memory, "walltime": walltime}

    def text() -> str:
        said = [_values(resolved, output.style) + "\n"] if print_config else []
        said += [_summary(path, resolved, world_size, output.style), memory_text(memory, resolved.config)]
        said += [walltime_text(walltime)] if walltime else []
        said += [data_text(data, output.style), ""] if data else []
        return "\n".join([*said, output.style.dim(_scope(data, no_data=no_data))])

    output.document("unbroken.validate/3", fields, text)


def _scope(data: dict[str, Any] | None, *, no_data: bool) -> str:
    if data:
        return "checked: config, data sizes, indexes and order; not checked: data checksums, GPUs, disk space"
    why = "" if no_data else f" ({NEEDED} is not installed)"
    return f"checked: config; not checked: data{why}, GPUs, disk space"


def _fields(path: Path, resolved: Resolved) -> dict[str, Any]:
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


def _summary(path: Path, resolved: Resolved, world: int, style: Style) -> str:
    config = resolved.config
    changed = sum(place.source != "default" for place in resolved.origins.values())
    sequences = config.global_batch_size(world)
    tokens = sequences * config.data.max_length
    ranks = (
        "on any number of ranks"
        if config.training.global_batch_size
        else f"for a first job on {amounts.plural(world, 'rank')}"
    )
    steps = config.training.max_steps
    lines = [
        f"{style.good('valid')}    {path}  ({changed} of {amounts.plural(len(resolved.origins), 'field')} set)",
        f"model    {_model_line(config)}",
        f"batch    {amounts.plural(sequences, 'sequence')}, {amounts.plural(tokens, 'token')} per step {ranks}",
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
    return f"{_short(blocks)} parameters + {amounts.count(per_row)} per token of the vocabulary"


def _short(number: int) -> str:
    """A large number with three digits and a unit: ``125 M``."""
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
