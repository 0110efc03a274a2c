"""What the commands that ask a model share: which one, how it is asked, where the answers go."""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import click

from unbroken.cli.output import Output
from unbroken.errors import BadUsage, PathMissing
from unbroken.files import LOCAL, Files
from unbroken.gpt.checkpoint import FoundModel
from unbroken.gpt.device import DTYPES
from unbroken.gpt.text import Generation

INPUT_LIMIT_BYTES: Final = 1 << 30
_DEFAULTS: Final = Generation()
_Function = Callable[..., int | None]

ema_option: Final = click.option("--ema", is_flag=True, help="The average of the weights, where the run keeps one.")
device_option: Final = click.option(
    "--device", metavar="DEVICE", help="cpu, cuda or cuda:1; default: the GPU, where there is one."
)
_MODEL: Final = (
    click.argument("run", metavar="[RUN[@STEP]]", required=False),
    click.option("--checkpoint", metavar="DIR", help="One checkpoint, where it is not named by RUN."),
    click.option("--output-dir", metavar="RUN", help="The run, where it is not named by RUN."),
    click.option("--tokenizer", metavar="TOKENIZER", help="Where it is not the one that the run kept."),
    ema_option,
    device_option,
    click.option(
        "--dtype", type=click.Choice([*DTYPES]), help="Type to compute in; default: bf16 on a GPU, fp32 on a CPU."
    ),
)
_GENERATION: Final = (
    click.option(
        "--max-new-tokens", type=int, metavar="N", help="Most new tokens; default: 100, or what the model takes."
    ),
    click.option(
        "--temperature",
        type=float,
        default=_DEFAULTS.temperature,
        show_default=True,
        metavar="T",
        help="Sampling temperature.",
    ),
    click.option("--top-k", type=int, default=_DEFAULTS.top_k, show_default=True, metavar="K", help="0 keeps all."),
    click.option("--top-p", type=float, default=_DEFAULTS.top_p, show_default=True, metavar="P", help="1 keeps all."),
    click.option("--greedy", is_flag=True, help="Take the most likely token each time."),
    click.option(
        "--repetition-penalty", type=float, default=1.0, show_default=True, metavar="F", help="Above 1: fewer repeats."
    ),
    click.option("--seed", type=int, default=_DEFAULTS.seed, show_default=True, metavar="N", help="Seed for sampling."),
    click.option("--return-full-text", is_flag=True, help="Put the prompt before its continuation."),
)


@dataclass(frozen=True)
class Asked:
    """Which model was named, if any; what it is read with, where and in what it computes; and how it is asked."""

    reference: str | None
    tokenizer: str | None
    is_averaged: bool
    device: str | None
    dtype: str | None
    generation: Generation


def text_options(command: str) -> Callable[[_Function], _Function]:
    """RUN and the options for the model and for how it is asked; the function gets all of them as ``asked: Asked``.

    The command then raises:
        GenerationInvalid: values are out of their ranges; all of them are named.
        BadUsage: two different models were named.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def gathered(
            *,
            run: str | None,
            checkpoint: str | None,
            output_dir: str | None,
            tokenizer: str | None,
            ema: bool,
            device: str | None,
            dtype: str | None,
            **others: Any,  # noqa: ANN401 -- the options of Generation, by its names, and the command's own
        ) -> int | None:
            generation = Generation(**{field.name: others.pop(field.name) for field in fields(Generation)})
            reference = _named_model(command, run, checkpoint, output_dir)
            return function(asked=Asked(reference, tokenizer, ema, device, dtype, generation), **others)

        options: _Function = gathered
        for option in reversed((*_MODEL, *_GENERATION)):
            options = option(options)
        return options

    return decorate


def _named_model(command: str, *names: str | None) -> str | None:
    """The one model that was named; None if none was."""
    named = sorted({each for each in names if each is not None})
    if len(named) > 1:
        raise BadUsage(command=command, complaint=f"two models are named: {named[0]} and {named[1]}")
    return named[0] if named else None


def read_text(path: Path, purpose: str) -> str:
    """A file of prompts.

    Raises:
        PathMissing: there is none.
        StorageFailed: the system refused to read it.
    """
    if LOCAL.find(path) is None:
        raise PathMissing(path=path, purpose=purpose)
    # Through a link, too: what a person hands over as input may be one.
    return LOCAL.read_bytes(path.resolve(), limit_bytes=INPUT_LIMIT_BYTES).decode("utf-8-sig", "replace")


def require_writable(command: str, path: Path | None, *inputs: Path | None) -> None:
    """Find out before the work whether its result has a place.

    Raises:
        PathMissing: there is no folder for it.
        BadUsage: a folder stands there, or it is the input.
    """
    if path is None:
        return
    if LOCAL.find(path.parent) is None:
        raise PathMissing(path=path.parent, purpose="folder for the output")
    if path.is_dir():
        raise BadUsage(command=command, complaint=f"--output is a folder: {path}")
    if any(given is not None and path.resolve() == given.resolve() for given in inputs):
        raise BadUsage(command=command, complaint=f"--output is the input: {path}")


def write_lines(path: Path, records: Iterable[Mapping[str, Any]], files: Files = LOCAL) -> None:
    """Write one JSON object a line, all of them in one instant.

    Raises:
        StorageFailed: the system refused; an older file is intact.
    """
    data = "".join(json_line(record) + "\n" for record in records).encode()
    # crash here: the file of an earlier call or none, and a scratch file that the next call removes.
    files.replace(path, data, scratch=f".{path.name}.partial")


def json_line(record: Mapping[str, Any]) -> str:
    """A record on one line."""
    return json.dumps(record, allow_nan=False)


def note_passed_over(output: Output, found: FoundModel, *, before: FoundModel | None = None) -> None:
    """Say which newer checkpoints are not asked, and why; those that are known of ``before`` were said already."""
    told = set() if before is None else {over.name for over in before.passed_over}
    for over in found.passed_over:
        if over.name not in told:
            output.note(f"passed over {over.name}: {over.reason}")
    if before is not None and before.name != found.name:
        output.note(f"took {found.name} in place of {before.name}")


def passed_over_facts(found: FoundModel) -> list[dict[str, str]]:
    """The same for a document."""
    return [{"name": over.name, "reason": over.reason} for over in found.passed_over]
