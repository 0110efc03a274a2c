"""``unbroken validate``: is this config sound, and where does each value come from."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from unbroken import amounts
from unbroken.cli.output import Output, as_command
from unbroken.config import Config, Resolved
from unbroken.config.commented import as_yaml
from unbroken.config.decode import decode
from unbroken.config.derived import derived
from unbroken.config.document import all_fields
from unbroken.config.overrides import take_apart
from unbroken.config.source import read
from unbroken.errors import BadUsage
from unbroken.report.style import Style
from unbroken.report.table import Column, table

_OPTIONS = ("--config", "--print-config", "--json", "--quiet", "--help")


@as_command("validate", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", metavar="CONFIG [OVERRIDE]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--config", "named", metavar="FILE", help="The config, where it is not the first argument.")
@click.option("--print-config", is_flag=True, help="Print every value and where it came from.")
def command(output: Output, arguments: tuple[str, ...], named: str | None, print_config: bool) -> None:
    """Check a config and name every problem in it.

    CONFIG is a YAML or JSON file. OVERRIDE is --section.field value, --section.field=value or section.field=value.
    Only the config itself is checked: neither data nor devices are looked at.
    """
    taken = take_apart(arguments)
    path = _config_path(taken.rest, named)
    resolved = decode(read(path), taken.overrides, source=str(path))
    facts = _facts(path, resolved)

    def text() -> str:
        said = _said(path, resolved, output.style)
        return f"{_values(resolved, output.style)}\n\n{said}" if print_config else said

    output.document("unbroken.validate/1", facts, text)


def _config_path(rest: Sequence[str], named: str | None) -> Path:
    for option in (each for each in rest if each.startswith("-") and each != "-"):
        close = difflib.get_close_matches(option.partition("=")[0], _OPTIONS, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise BadUsage(command="unbroken validate", complaint=f"there is no option '{option}'{meant}")
    paths = [*([named] if named is not None else []), *rest]
    if not paths:
        raise BadUsage(command="unbroken validate", complaint="the argument CONFIG is missing")
    if len(paths) > 1:
        complaint = f"one config is checked at a time; '{paths[1]}' is neither an option nor section.field=value"
        raise BadUsage(command="unbroken validate", complaint=complaint)
    return Path(paths[0])


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


def _said(path: Path, resolved: Resolved, style: Style) -> str:
    config = resolved.config
    changed = sum(place.source != "default" for place in resolved.origins.values())
    sequences = config.global_batch_size(1)
    tokens = sequences * config.data.max_length
    ranks = "on any number of ranks" if config.training.global_batch_size else "for a run started on 1 rank"
    steps = config.training.max_steps
    lines = [
        f"{style.good('sound')}    {path}  ({changed} of {amounts.plural(len(resolved.origins), 'field')} set)",
        f"model    {_model_line(config)}",
        f"batch    {amounts.plural(sequences, 'sequence')}, {amounts.plural(tokens, 'token')} a step {ranks}",
        f"length   {amounts.plural(steps, 'step')}, {_short(steps * tokens)} tokens",
        f"digest   {config.digest()}",
        style.dim("checked: the config file; not looked at: data, devices, disk"),
    ]
    return "\n".join(lines)


def _model_line(config: Config) -> str:
    model = config.model
    parameters = _parameters(config)
    if parameters is not None:
        return f"{_short(parameters)} parameters ({amounts.count(parameters)})"
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
