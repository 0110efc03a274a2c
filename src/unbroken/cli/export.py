"""``unbroken export``: writes the weights of a checkpoint in formats of other libraries."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from unbroken.cli.arguments import DiskPath
from unbroken.cli.model_options import DTYPES, ema_option, note_skipped, skipped_fields
from unbroken.cli.output import Output, as_command
from unbroken.disk import NodeKind
from unbroken.errors import BadUsage, Help, PackageMissing, TokenizerUnknown, WouldOverwrite
from unbroken.errors.tree import quoted
from unbroken.files import LOCAL
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable

if TYPE_CHECKING:
    import torch

    from unbroken.data.corpus.listing import TokenizerIdentity
    from unbroken.gpt.checkpoint import FoundModel, LoadedModel

    # The content of tokenizer.json, its identity, and why the folder has no tokenizer; each may be None.
    KeptTokenizer = tuple[bytes | None, TokenizerIdentity | None, str | None]

_COMMAND: Final = "unbroken export"
_SUFFIXES: Final = {".pt": "torch", ".pth": "torch", ".bin": "torch", ".safetensors": "safetensors"}
_SHOWN: Final = 3
_FORMATS: Final = ("torch", "safetensors", "huggingface")


@as_command(
    "export",
    examples=(
        ("unbroken export runs/a -o model.safetensors", "one safetensors file"),
        ("unbroken export runs/a@1000 -o llama/ --dtype bf16", "a folder for transformers"),
        ("unbroken export runs/a -o model.pt --ema", "EMA weights for torch.load"),
    ),
)
@click.argument("reference", metavar="RUN[@STEP]")
@click.option(
    "-o",
    "--output",
    "target",
    required=True,
    metavar="PATH",
    type=DiskPath(),
    help="File or directory to write.",
)
@click.option("--format", "asked", type=click.Choice(_FORMATS), help="Format; default: from the name of PATH.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Type of the weights; default: fp32, as trained.")
@click.option(
    "--tokenizer", metavar="TOKENIZER", help="Tokenizer for a huggingface export; default: the one saved in the run."
)
@ema_option
@click.option("--force", is_flag=True, help="Overwrite a file, or a directory written by an earlier export.")
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
    """Export weights to PyTorch, safetensors or Hugging Face.

    The name of PATH selects the format: .pt, .pth and .bin for torch.load(PATH, weights_only=True), .safetensors for
    safetensors, anything else for a directory that transformers loads as a Llama. RUN alone is its newest usable
    checkpoint. All checksums are verified.
    """
    import torch

    from unbroken.gpt import device
    from unbroken.gpt.checkpoint import find_model
    from unbroken.gpt.export import to_safetensors, to_torch

    form = _form(target, asked)
    _require_free(target, reference, is_folder=form == "huggingface", force=force)
    looked_at = find_model(reference, is_averaged=ema)
    note_skipped(output, looked_at)
    kept = _tokenizer(looked_at, tokenizer) if form == "huggingface" else None
    loaded = looked_at.load(torch.device("cpu"))
    found = loaded.found
    note_skipped(output, found, before=looked_at)
    kind = None if dtype is None else device.DTYPES[dtype]
    note = None
    if kept is not None:
        note = _write_folder(loaded, target, kept, kind, force=force)
    else:
        write = to_torch if form == "torch" else to_safetensors
        write(loaded.model.state_dict(), target, dtype=kind, is_replacing=force)
    size_bytes = _size(target)
    fields: dict[str, Any] = {
        "checkpoint": found.path,
        "step": found.manifest.step,
        "skipped_checkpoints": skipped_fields(found),
        "format": form,
        "is_averaged": ema,
        "path": target,
        "bytes": size_bytes,
        "note": note,
    }

    def text() -> str:
        lines = [f"exported  {target}  {form}, {amounts.size(size_bytes)}, from {found.path}"]
        return "\n".join([*lines, *([f"note      {note}"] if note else [])])

    output.document("unbroken.export/2", fields, text)


def _form(target: Path, asked: str | None) -> str:
    by_name = _SUFFIXES.get(target.suffix)
    if asked is None:
        return by_name or "huggingface"
    if by_name is not None and by_name != asked:
        complaint = f"--format {asked} does not match {target.name}, which is the name of a {by_name} file"
        raise BadUsage(command=_COMMAND, complaint=complaint)
    return asked


def _require_free(target: Path, reference: str, *, is_folder: bool, force: bool) -> None:
    # Checked first, before the time to load a model is spent.
    there = LOCAL.find(target)
    if there is None:
        return
    again = f"{_COMMAND} {quoted(reference)} --output"
    stands_folder = there.kind is NodeKind.DIRECTORY
    found, is_ours = _looked_into(target) if stands_folder else ("a file of this name", True)
    if is_ours and stands_folder == is_folder:
        if not force:
            remedy = Help(f"{again} {quoted(target)} --force", f"overwrite this {'directory' if is_folder else 'file'}")
            raise WouldOverwrite(path=target, remedy=remedy, found=found)
        return
    if stands_folder != is_folder:
        found += f", but the export is a {'directory' if is_folder else 'file'},"
    free = _free_name(target / "export" if stands_folder and is_folder else target.with_name(f"export-{target.name}"))
    remedy = Help(f"{again} {quoted(free)}", "write to another path")
    raise WouldOverwrite(path=target, remedy=remedy, found=found, is_replaceable=False)


def _looked_into(folder: Path) -> tuple[str, bool]:
    """What a directory holds, as text, and whether it may be overwritten; ``gpt.export`` checks the same again."""
    from unbroken.gpt.export import is_export

    names = sorted(node.name for node in LOCAL.list_directory(folder))
    if not names:
        return "an empty directory", True
    if is_export(LOCAL, folder):
        return "a directory written by an earlier export", True
    contains = amounts.listed([*map(printable, names)], _SHOWN)
    return f"a directory not written by an export (it contains {contains})", False


def _free_name(wanted: Path) -> Path:
    others = (wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}") for number in itertools.count(2))
    return next(path for path in (wanted, *itertools.islice(others, 98)) if LOCAL.find(path) is None)


def _write_folder(
    loaded: "LoadedModel", target: Path, kept: "KeptTokenizer", dtype: "torch.dtype | None", *, force: bool
) -> str | None:
    from unbroken.gpt.huggingface import to_huggingface

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


def _tokenizer(found: "FoundModel", asked: str | None) -> "KeptTokenizer":
    from unbroken.gpt.huggingface import require_expressible
    from unbroken.gpt.vocabulary import vocabulary_of

    # Before the weights are loaded, which takes longest.
    require_expressible(found.config.model)
    try:
        vocabulary = vocabulary_of(found, asked)
    except (TokenizerUnknown, PackageMissing) as unknown:
        if asked is not None:
            raise
        # The weights are complete without a tokenizer.
        return None, None, f"no tokenizer written: {unknown.headline()}"
    if vocabulary.file.content is None:
        note = "no tokenizer written: token ids are bytes, for which transformers has no tokenizer; id 256 ends a text"
        return None, vocabulary.identity, note
    return vocabulary.file.content, vocabulary.identity, None


def _size(target: Path) -> int:
    paths = [target / node.name for node in LOCAL.list_directory(target)] if target.is_dir() else [target]
    return sum(found.size_bytes for path in paths if (found := LOCAL.find(path)) is not None)
