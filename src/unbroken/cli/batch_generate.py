"""``unbroken batch-generate``: many prompts from a file, each with a model and options of its own if it wants."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from unbroken.cli.output import Output, as_command
from unbroken.cli.text_options import (
    Asked,
    json_line,
    note_passed_over,
    read_text,
    require_writable,
    text_options,
    write_lines,
)
from unbroken.gpt.batch_prompts import Answer, ModelChoice, PromptBatch, read_batch
from unbroken.gpt.device import chosen_device
from unbroken.quoting import amounts

_COMMAND: Final = "unbroken batch-generate"
_PATH: Final = click.Path(path_type=Path)


@as_command("batch-generate")
@click.option("--input", "source", required=True, metavar="FILE", type=_PATH, help="One JSON object a line.")
@click.option("--output", "target", metavar="FILE", type=_PATH, help="The answers; printed where it is left out.")
@click.option("--dry-run", is_flag=True, help="Check everything and load no model.")
@text_options(_COMMAND)
def command(output: Output, asked: Asked, source: Path, target: Path | None, dry_run: bool) -> int | None:
    """Continue the prompts of a file.

    A line is {"prompt": ...} and, if wanted, "id", "model" {checkpoint or output_dir, dtype, tokenizer, ema} and
    "generation" {max_new_tokens, temperature, top_k, top_p, greedy, repetition_penalty, seed, return_full_text}; the
    options are their defaults. Answers come in the order of the prompts, each with text or with its error. Exit code:
    0, or that of the first record that has an error.
    """
    require_writable(_COMMAND, target, source)
    place = chosen_device(asked.device)
    text = read_text(source, "file of prompts")
    model = ModelChoice(asked.reference, asked.dtype, asked.tokenizer, asked.is_averaged)
    batch = read_batch(source, text, model, asked.generation)
    for found in batch.sources.values():
        note_passed_over(output, found.found)
    models = len(batch.groups(place))
    if dry_run:
        facts = {"input": source, "prompts": len(batch.prompts), "models": models, "is_dry_run": True}
        output.document("unbroken.batch-generate/1", facts, lambda: _sound(source, batch, models))
        return None
    with output.progress("generate", len(batch.prompts)) as advance:
        answers = batch.answers(place, advance)
    for taken in {batch.sources[each.prompt.model].found.path: each for each in answers}.values():
        note_passed_over(output, taken.source.found, before=batch.sources[taken.prompt.model].found)
    records = [answer.facts() for answer in answers]
    if target is not None:
        write_lines(target, records)
    bad = [answer.error for answer in answers if answer.error is not None]
    facts = {
        "input": source,
        "output": target,
        "prompts": len(answers),
        "models": models,
        "errors": len(bad),
        "is_dry_run": False,
        **({"records": records} if target is None else {}),
    }
    output.document("unbroken.batch-generate/1", facts, lambda: _said(answers, records, target, models))
    return bad[0].exit_code if bad else None


def _sound(source: Path, batch: PromptBatch, models: int) -> str:
    asked = amounts.plural(len(batch.prompts), "prompt")
    return f"sound  {source}  {asked} for {amounts.plural(models, 'model')}; nothing was loaded"


def _said(answers: Sequence[Answer], records: Sequence[dict[str, Any]], target: Path | None, models: int) -> str:
    if target is None:
        return "\n".join(map(json_line, records))
    asked = f"{amounts.plural(len(answers), 'prompt')}, {amounts.plural(models, 'model')}"
    bad = [(answer.prompt.line, answer.error) for answer in answers if answer.error is not None]
    lines = [f"line {line}  {error.kind}: {error.headline()}" for line, error in bad]
    return "\n".join([f"wrote  {target}  {asked}", *lines])
