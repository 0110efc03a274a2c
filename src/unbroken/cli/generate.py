"""``unbroken generate``: what a run's model writes after a prompt."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import click

from unbroken.cli.output import Output, as_command
from unbroken.cli.text_options import (
    Asked,
    note_passed_over,
    passed_over_facts,
    read_text,
    require_writable,
    text_options,
    write_lines,
)
from unbroken.errors import BadUsage, BatchInvalid, GenerationInvalid, SequenceTooLong
from unbroken.gpt.device import chosen_device, chosen_dtype
from unbroken.gpt.text import Continued, Generation, TextSource
from unbroken.quoting import amounts

_COMMAND: Final = "unbroken generate"
_PATH: Final = click.Path(path_type=Path)


@as_command("generate")
@click.option("--prompt", metavar="TEXT", help="The text to be continued.")
@click.option("--prompts-file", metavar="FILE", type=_PATH, help="One prompt a line, each continued by itself.")
@click.option("--output", "target", metavar="FILE", type=_PATH, help="Write one JSON object a line instead.")
@text_options(_COMMAND)
def command(output: Output, asked: Asked, prompt: str | None, prompts_file: Path | None, target: Path | None) -> None:
    """Continue a prompt with a run's model.

    RUN is a run's directory or a checkpoint; the newest usable checkpoint is taken unless a step is named. Nothing of
    the run is changed. The same prompt, options and seed give the same text on the same device.
    """
    if asked.reference is None:
        raise BadUsage(command=_COMMAND, complaint="the argument RUN is missing")
    numbered = _prompts(prompt, prompts_file)
    require_writable(_COMMAND, target, prompts_file)
    place = chosen_device(asked.device)
    source = TextSource.find(asked.reference, asked.tokenizer, is_averaged=asked.is_averaged)
    note_passed_over(output, source.found)
    # Before the weights are read, which takes longer than anything else that can go wrong.
    _require_sound(source, numbered, prompts_file, asked.generation)
    prompts = [each for _, each in numbered]
    model = source.load(place, chosen_dtype(asked.dtype, place))
    note_passed_over(output, model.source.found, before=source.found)
    with output.progress("generate", len(prompts)) as advance:
        records = []
        for each in prompts:
            records.append(_record(each, model.continue_text(each, asked.generation)))
            advance(1)
    if target is not None:
        write_lines(target, records)
    facts = {
        "checkpoint": model.source.found.path,
        "step": model.source.found.manifest.step,
        "skipped_checkpoints": passed_over_facts(model.source.found),
        "output": target,
        "texts": records if target is None else len(records),
    }
    output.document("unbroken.generate/2", facts, lambda: _text(records, target))


def _prompts(prompt: str | None, file: Path | None) -> list[tuple[int, str]]:
    """Each prompt with the line it stands in."""
    if (prompt is None) == (file is None):
        raise BadUsage(command=_COMMAND, complaint="one of --prompt and --prompts-file is needed, and not both")
    if file is None:
        return [(1, prompt or "")]
    # At line feeds alone: a prompt may hold other characters that end a line for somebody.
    read = enumerate(read_text(file, "file of prompts").split("\n"), start=1)
    lines = [(number, line.removesuffix("\r")) for number, line in read if line.strip()]
    if not lines:
        raise BadUsage(command=_COMMAND, complaint=f"--prompts-file holds no prompt: {file}")
    return lines


def _require_sound(
    source: TextSource, prompts: list[tuple[int, str]], file: Path | None, generation: Generation
) -> None:
    problems = []
    for number, each in prompts:
        try:
            source.encode(each, generation)
        except (GenerationInvalid, SequenceTooLong) as wrong:
            if file is None:
                raise
            problems.append(f"{file}:{number}  {wrong.headline()}")
    if file is not None and problems:
        raise BatchInvalid(path=file, problems=tuple(problems))


def _record(prompt: str, said: Continued) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": said.text,
        "prompt_tokens": said.prompt_tokens,
        "new_tokens": said.new_tokens,
        "is_ended": said.is_ended,
    }


def _text(records: Iterable[dict[str, Any]], target: Path | None) -> str:
    texts = [each["text"] for each in records]
    if target is not None:
        return f"wrote  {target}  {amounts.plural(len(texts), 'text')}"
    # A text may hold lone pieces of characters that no terminal takes.
    return "\n".join(text.encode("utf-8", "replace").decode() for text in texts)
