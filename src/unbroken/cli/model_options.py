"""Options of the commands that load a model: which checkpoint, how to sample, where to write the result."""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from unbroken.cli.output import Output
from unbroken.errors import BadUsage, PathMissing
from unbroken.files import LOCAL, Files
from unbroken.gpt.sampling import Generation

if TYPE_CHECKING:
    # What loads torch is imported when a command runs, so that its --help is shown at once.
    from unbroken.gpt.checkpoint import FoundModel

INPUT_LIMIT_BYTES: Final = 1 << 30
# The names in ``unbroken.gpt.device.DTYPES``.
DTYPES: Final = ("fp32", "fp16", "bf16")
_DEFAULTS: Final = Generation()
_Function = Callable[..., int | None]

ema_option: Final = click.option("--ema", is_flag=True, help="Use the EMA weights of the checkpoint.")
device_option: Final = click.option(
    "--device", metavar="DEVICE", help="cpu, cuda or cuda:N; default: cuda if available."
)
_MODEL: Final = (
    click.argument("run", metavar="[RUN[@STEP]]", required=False),
    click.option("--checkpoint", metavar="DIR", help="Checkpoint directory, instead of RUN."),
    click.option("--output-dir", metavar="RUN", help="Run directory, instead of RUN."),
    click.option("--tokenizer", metavar="TOKENIZER", help="Tokenizer; default: the one saved in the run."),
    ema_option,
    device_option,
    click.option("--dtype", type=click.Choice(DTYPES), help="Compute type; default: bf16 on a GPU, fp32 on a CPU."),
)
_GENERATION: Final = (
    click.option(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="Maximum number of new tokens; default: 100, or what fits the context.",
    ),
    click.option(
        "--temperature",
        type=float,
        default=_DEFAULTS.temperature,
        metavar="T",
        help="Sampling temperature.",
    ),
    click.option(
        "--top-k",
        type=int,
        default=_DEFAULTS.top_k,
        metavar="K",
        help="Sample from the K most likely tokens; 0: all.",
    ),
    click.option(
        "--top-p",
        type=float,
        default=_DEFAULTS.top_p,
        metavar="P",
        help="Sample from the top probability mass P; 1: all.",
    ),
    click.option("--greedy", is_flag=True, help="Always take the most likely token."),
    click.option(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="F",
        help="Penalty on repeated tokens; 1: none.",
    ),
    click.option("--seed", type=int, default=_DEFAULTS.seed, metavar="N", help="Random seed."),
    click.option("--return-full-text", is_flag=True, help="Print the prompt before the generated text."),
)


@dataclass(frozen=True)
class ModelArguments:
    """The checkpoint, if one is named; tokenizer, weights, device and type; and the sampling parameters."""

    reference: str | None
    tokenizer: str | None
    is_averaged: bool
    device: str | None
    dtype: str | None
    generation: Generation


def model_options(command: str) -> Callable[[_Function], _Function]:
    """Give a command RUN and the options of model and sampling; its function gets them as ``asked: ModelArguments``.

    The command then raises:
        GenerationInvalid: sampling parameters are out of range; all of them are listed.
        BadUsage: two different checkpoints are named.
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
            return function(asked=ModelArguments(reference, tokenizer, ema, device, dtype, generation), **others)

        options: _Function = gathered
        for option in reversed((*_MODEL, *_GENERATION)):
            options = option(options)
        return options

    return decorate


def _named_model(command: str, *names: str | None) -> str | None:
    """The one checkpoint that is named; None if none is."""
    named = sorted({each for each in names if each is not None})
    if len(named) > 1:
        raise BadUsage(command=command, complaint=f"two different checkpoints are named: {named[0]} and {named[1]}")
    return named[0] if named else None


def read_text(path: Path, purpose: str) -> str:
    """The text of an input file.

    Raises:
        PathMissing: it does not exist.
        StorageFailed: it could not be read.
    """
    if LOCAL.find(path) is None:
        raise PathMissing(path=path, purpose=purpose)
    # Resolved: an input file may be a symlink.
    return LOCAL.read_bytes(path.resolve(), limit_bytes=INPUT_LIMIT_BYTES).decode("utf-8-sig", "replace")


def require_writable(command: str, path: Path | None, *inputs: Path | None) -> None:
    """Check before the work that its result can be written.

    Raises:
        PathMissing: the directory of the output does not exist.
        BadUsage: the output is a directory, or is the input.
    """
    if path is None:
        return
    if LOCAL.find(path.parent) is None:
        raise PathMissing(path=path.parent, purpose="directory for the output")
    if path.is_dir():
        raise BadUsage(command=command, complaint=f"--output is a directory: {path}")
    if any(given is not None and path.resolve() == given.resolve() for given in inputs):
        raise BadUsage(command=command, complaint=f"--output and the input are the same file: {path}")


def write_lines(path: Path, records: Iterable[Mapping[str, Any]], files: Files = LOCAL) -> None:
    """Write one JSON object per line, atomically.

    Raises:
        StorageFailed: it could not be written; an older file is intact.
    """
    data = "".join(json_line(record) + "\n" for record in records).encode()
    # crash here: the file of an earlier call or none, and a scratch file that the next call removes.
    files.replace(path, data, scratch=f".{path.name}.partial")


def json_line(record: Mapping[str, Any]) -> str:
    """A record as one line of JSON."""
    return json.dumps(record, allow_nan=False)


def note_skipped(output: Output, found: "FoundModel", *, before: "FoundModel | None" = None) -> None:
    """Print which newer checkpoints are skipped and why; not again those of ``before``."""
    printed = set() if before is None else {over.name for over in before.skipped}
    for over in found.skipped:
        if over.name not in printed:
            output.note(f"skipped {over.name}: {over.reason}")
    if before is not None and before.name != found.name:
        output.note(f"using {found.name} instead of {before.name}")


def skipped_fields(found: "FoundModel") -> list[dict[str, str]]:
    """The skipped checkpoints as JSON fields."""
    return [{"name": over.name, "reason": over.reason} for over in found.skipped]
