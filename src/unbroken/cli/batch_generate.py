"""``unbroken batch-generate``: generates text for a file of prompts, each with its own model and options if given."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from unbroken.cli.arguments import DiskPath
from unbroken.cli.model_options import (
    ModelArguments,
    json_line,
    model_options,
    note_skipped,
    read_text,
    require_writable,
    write_lines,
)
from unbroken.cli.output import Output, as_command
from unbroken.quoting import amounts

if TYPE_CHECKING:
    from unbroken.gpt.batch_prompts import Answer, PromptBatch

_COMMAND: Final = "unbroken batch-generate"
_PATH: Final = DiskPath()


@as_command(
    "batch-generate",
    examples=(
        ("unbroken batch-generate runs/a --input prompts.jsonl --output out.jsonl", "one model for all"),
        ("unbroken batch-generate --input prompts.jsonl --dry-run", "check the file, load no model"),
    ),
    exit_codes={0: "all prompts succeeded", 2: "the file has problems, or a prompt failed; see its record"},
)
@click.option("--input", "source", required=True, metavar="FILE", type=_PATH, help="Prompts, one JSON object per line.")
@click.option(
    "-o", "--output", "target", metavar="FILE", type=_PATH, help="File for the results; default: standard output."
)
@click.option("--dry-run", is_flag=True, help="Check the file without loading a model.")
@model_options(_COMMAND)
def command(output: Output, asked: ModelArguments, source: Path, target: Path | None, dry_run: bool) -> int | None:
    """Generate text for a file of prompts.

    A line is {"prompt": ...} with optional "id", "model" {checkpoint or output_dir, dtype, tokenizer, ema} and
    "generation" {max_new_tokens, temperature, top_k, top_p, greedy, repetition_penalty, seed, return_full_text}; the
    options below are their defaults.

    Results keep the order of the prompts; each has a text or an error. The exit code is that of the first error.
    """
    from unbroken.gpt.batch_prompts import ModelChoice, read_batch
    from unbroken.gpt.device import chosen_device

    require_writable(_COMMAND, target, source)
    place = chosen_device(asked.device)
    text = read_text(source, "prompts file")
    model = ModelChoice(asked.reference, asked.dtype, asked.tokenizer, asked.is_averaged)
    batch = read_batch(source, text, model, asked.generation)
    for found in batch.sources.values():
        note_skipped(output, found.found)
    models = len(batch.groups(place))
    if dry_run:
        fields = {"input": source, "prompts": len(batch.prompts), "models": models, "is_dry_run": True}
        output.document("unbroken.batch-generate/1", fields, lambda: _checked(source, batch, models))
        return None
    with output.progress("generate", len(batch.prompts)) as advance:
        answers = batch.answers(place, advance)
    for taken in {batch.sources[each.prompt.model].found.path: each for each in answers}.values():
        note_skipped(output, taken.source.found, before=batch.sources[taken.prompt.model].found)
    records = [answer.json_fields() for answer in answers]
    if target is not None:
        write_lines(target, records)
    bad = [answer.error for answer in answers if answer.error is not None]
    fields = {
        "input": source,
        "output": target,
        "prompts": len(answers),
        "models": models,
        "errors": len(bad),
        "is_dry_run": False,
        **({"records": records} if target is None else {}),
    }
    output.document("unbroken.batch-generate/1", fields, lambda: _text(answers, records, target, models))
    return bad[0].exit_code if bad else None


def _checked(source: Path, batch: "PromptBatch", models: int) -> str:
    asked = amounts.plural(len(batch.prompts), "prompt")
    return f"ok  {source}  {asked} for {amounts.plural(models, 'model')}; no model loaded"


def _text(answers: Sequence["Answer"], records: Sequence[dict[str, Any]], target: Path | None, models: int) -> str:
    if target is None:
        return "\n".join(map(json_line, records))
    asked = f"{amounts.plural(len(answers), 'prompt')}, {amounts.plural(models, 'model')}"
    bad = [(answer.prompt.line, answer.error) for answer in answers if answer.error is not None]
    lines = [f"line {line}  {error.kind}: {error.headline()}" for line, error in bad]
    return "\n".join([f"wrote  {target}  {asked}", *lines])
