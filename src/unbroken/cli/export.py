"""``unbroken export``: a checkpoint's weights as files that other programs read."""

import itertools
from pathlib import Path
from typing import Any, Final

import click
import torch

from unbroken.cli.output import Output, as_command
from unbroken.cli.text_options import ema_option, note_passed_over, passed_over_facts
from unbroken.data.corpus.listing import TokenizerIdentity
from unbroken.disk import NodeKind
from unbroken.errors import BadUsage, Help, PackageMissing, TokenizerUnknown, WouldOverwrite
from unbroken.errors.tree import quoted
from unbroken.files import LOCAL
from unbroken.gpt.checkpoint import FoundModel, LoadedModel, find_model
from unbroken.gpt.device import DTYPES
from unbroken.gpt.export import is_export, to_safetensors, to_torch
from unbroken.gpt.huggingface import require_expressible, to_huggingface
from unbroken.gpt.vocabulary import vocabulary_of
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable

_COMMAND: Final = "unbroken export"
_SUFFIXES: Final = {".pt": "torch", ".pth": "torch", ".bin": "torch", ".safetensors": "safetensors"}
_SHOWN: Final = 3
_FORMATS: Final = ("torch", "safetensors", "huggingface")
# Its file, what its ids mean, and why there is none in the folder; each None where there is no such thing.
KeptTokenizer = tuple[bytes | None, TokenizerIdentity | None, str | None]


@as_command("export")
@click.argument("reference", metavar="RUN[@STEP]")
@click.option(
    "-o",
    "--output",
    "target",
    required=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="The file or folder to write.",
)
@click.option("--format", "asked", type=click.Choice(_FORMATS), help="Where the name of PATH does not tell it.")
@click.option("--dtype", type=click.Choice([*DTYPES]), help="Type of the weights; default: as trained, fp32.")
@click.option("--tokenizer", metavar="TOKENIZER", help="For a folder, where it is not the one that the run kept.")
@ema_option
@click.option("--force", is_flag=True, help="Replace a file, or a folder that an export wrote.")
def command(
    output: Output,
    reference: str,
    target: Path,
    asked: str | None,
    dtype: str | None,
    tokenizer: str | None,
    ema: bool,
    force: bool,
) -> None:
    """Write a checkpoint's weights for other programs.

    PATH ends in .pt: a state for torch.load(PATH, weights_only=True). In .safetensors: one such file. Else it is a
    folder that transformers loads as a Llama. The newest usable checkpoint is taken unless a step is named; every byte
    that is read is proven.
    """
    form = _form(target, asked)
    _require_free(target, reference, is_folder=form == "huggingface", force=force)
    looked_at = find_model(reference, is_averaged=ema)
    note_passed_over(output, looked_at)
    kept = _tokenizer(looked_at, tokenizer) if form == "huggingface" else None
    loaded = looked_at.load(torch.device("cpu"))
    found = loaded.found
    note_passed_over(output, found, before=looked_at)
    kind = None if dtype is None else DTYPES[dtype]
    note = None
    if kept is not None:
        note = _write_folder(loaded, target, kept, kind, force=force)
    else:
        write = to_torch if form == "torch" else to_safetensors
        write(loaded.model.state_dict(), target, dtype=kind, is_replacing=force)
    size_bytes = _size(target)
    facts: dict[str, Any] = {
        "checkpoint": found.path,
        "step": found.manifest.step,
        "skipped_checkpoints": passed_over_facts(found),
        "format": form,
        "is_averaged": ema,
        "path": target,
        "bytes": size_bytes,
        "note": note,
    }

    def text() -> str:
        lines = [f"exported  {target}  {form}, {amounts.size(size_bytes)}, from {found.path}"]
        return "\n".join([*lines, *([f"tokenizer {note}"] if note else [])])

    output.document("unbroken.export/2", facts, text)


def _form(target: Path, asked: str | None) -> str:
    told = _SUFFIXES.get(target.suffix)
    if asked is None:
        return told or "huggingface"
    if told is not None and told != asked:
        complaint = f"--format is {asked} and {target.name} is the name of a {told} file"
        raise BadUsage(command=_COMMAND, complaint=complaint)
    return asked


def _require_free(target: Path, reference: str, *, is_folder: bool, force: bool) -> None:
    # Looked at first: what would be refused in the end should not take the time of reading a model.
    there = LOCAL.find(target)
    if there is None:
        return
    again = f"{_COMMAND} {quoted(reference)} --output"
    stands_folder = there.kind is NodeKind.DIRECTORY
    found, is_ours = _looked_into(target) if stands_folder else ("a file with this name", True)
    if is_ours and stands_folder == is_folder:
        if not force:
            remedy = Help(f"{again} {quoted(target)} --force", f"replace this {'folder' if is_folder else 'file'}")
            raise WouldOverwrite(path=target, remedy=remedy, found=found)
        return
    if stands_folder != is_folder:
        found += f", where a {'folder' if is_folder else 'file'} is to be written,"
    free = _free_name(target / "export" if stands_folder and is_folder else target.with_name(f"export-{target.name}"))
    remedy = Help(f"{again} {quoted(free)}", "write to a path that is free")
    raise WouldOverwrite(path=target, remedy=remedy, found=found, is_replaceable=False)


def _looked_into(folder: Path) -> tuple[str, bool]:
    """What a folder holds, in words, and whether it may be replaced, as ``gpt.export`` decides it at the end."""
    names = sorted(node.name for node in LOCAL.list_directory(folder))
    if not names:
        return "an empty folder", True
    if is_export(LOCAL, folder):
        return "a folder that an export wrote", True
    more = f" and {amounts.count(len(names) - _SHOWN)} more" if len(names) > _SHOWN else ""
    return f"a folder that no export wrote (it holds {', '.join(map(printable, names[:_SHOWN]))}{more})", False


def _free_name(wanted: Path) -> Path:
    others = (wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}") for number in itertools.count(2))
    return next(path for path in (wanted, *itertools.islice(others, 98)) if LOCAL.find(path) is None)


def _write_folder(
    loaded: LoadedModel, target: Path, kept: KeptTokenizer, dtype: torch.dtype | None, *, force: bool
) -> str | None:
    content, identity, note = kept
    to_huggingface(
        loaded.model.state_dict(),
        loaded.config.model,
        target,
        tokenizer=content,
        end_token=None if identity is None else identity.eod_id,
        dtype=dtype,
        is_replacing=force,
    )
    return note


def _tokenizer(found: FoundModel, asked: str | None) -> KeptTokenizer:
    # Before the weights are read, which takes longer than anything else that can go wrong.
    require_expressible(found.config.model)
    try:
        vocabulary = vocabulary_of(found, asked)
    except (TokenizerUnknown, PackageMissing) as unknown:
        if asked is not None:
            raise
        # The weights are whole without it, and the ids are what they are.
        return None, None, f"none is in the folder: {unknown.headline()}"
    if vocabulary.file.content is None:
        note = "none is in the folder: the ids are bytes, which transformers has no tokenizer for; 256 ends a text"
        return None, vocabulary.identity, note
    return vocabulary.file.content, vocabulary.identity, None


def _size(target: Path) -> int:
    paths = [target / node.name for node in LOCAL.list_directory(target)] if target.is_dir() else [target]
    return sum(found.size_bytes for path in paths if (found := LOCAL.find(path)) is not None)
