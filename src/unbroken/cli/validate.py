"""``unbroken validate``: is this config sound, and where does each value come from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from unbroken import amounts
from unbroken.cli.config_words import allowance_options, allowance_overrides, config_arguments, config_path
from unbroken.cli.data_section import NEEDED, data_facts, data_text
from unbroken.cli.model_section import memory_facts, memory_text, walltime_facts, walltime_text
from unbroken.cli.output import Output, as_command
from unbroken.config import Config, Resolved
from unbroken.config.commented import as_yaml
from unbroken.config.decode import decode
from unbroken.config.derived import derived
from unbroken.config.document import all_fields
from unbroken.config.overrides import take_apart
from unbroken.config.source import read
from unbroken.launch.started import require_own
from unbroken.report.style import Style
from unbroken.report.table import Column, table
from unbroken.run.layout import Layout


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

    output.document("unbroken.validate/1", facts, text)


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
