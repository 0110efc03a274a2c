"""``unbroken seal``: adds a manifest to a checkpoint directory of another tool."""

import time
from pathlib import Path

import click

from unbroken.cli.arguments import DiskPath
from unbroken.cli.json_fields import manifest_fields
from unbroken.cli.output import Output, as_command
from unbroken.errors import BadUsage, CannotSeal, Help, PathMissing
from unbroken.errors.tree import quoted
from unbroken.files import LOCAL
from unbroken.quoting import amounts
from unbroken.report.style import Style
from unbroken.store.commit import walk_files
from unbroken.store.directory import Store
from unbroken.store.names import step_in_name
from unbroken.store.scan import newest_first, scan
from unbroken.store.seal import Sealed, folders_to_seal, seal


@as_command(
    "seal",
    examples=(
        ("unbroken seal out/checkpoint-500", "one checkpoint"),
        ("unbroken seal out --all", "all checkpoints in a directory"),
        ("unbroken seal last/ --step 500 --metric val_loss=2.31", "step and metric by hand"),
    ),
)
@click.argument("directory", metavar="DIR", type=DiskPath())
@click.option("--step", type=click.IntRange(0), metavar="N", help="Step; default: from the name of the directory.")
@click.option("--metric", "metrics", multiple=True, metavar="NAME=VALUE", help="Metric for --keep-best; repeatable.")
@click.option("--all", "is_parent", is_flag=True, help="Seal all checkpoint directories in DIR.")
@click.option("--num-workers", type=click.IntRange(1, 64), default=4, metavar="N", help="Number of reader threads.")
def command(
    output: Output, directory: Path, step: int | None, metrics: tuple[str, ...], is_parent: bool, num_workers: int
) -> None:
    """Add a manifest to a checkpoint of another tool.

    Then `unbroken ls`, `verify`, `pin` and `prune` work on it. DIR is a checkpoint of Transformers, Accelerate,
    Lightning, DeepSpeed, torch DCP, or a directory of .pt files. Its files are read and synced to disk, never changed
    or executed. Sealing again verifies all checksums.
    """
    if is_parent and (step is not None or metrics):
        raise BadUsage(command="unbroken seal", complaint="--step and --metric cannot be used with --all")
    store, names = _targets(directory, is_parent=is_parent)
    values = dict(map(_metric, metrics))
    total = sum(size or 0 for name in names for _, size in walk_files(LOCAL, store.path(name)))
    with output.progress("seal", total, is_bytes=True) as advance:
        done = [
            seal(store, name, at_ns=time.time_ns(), step=step, metrics=values, workers=num_workers, progress=advance)
            for name in names
        ]
    fields = {
        "store": str(store.root),
        "sealed": [{"is_new": each.is_new, **manifest_fields(each.name, each.manifest)} for each in done],
    }
    output.document("unbroken.seal/2", fields, lambda: _text(store, done, output.style, is_parent=is_parent))


def _targets(directory: Path, *, is_parent: bool) -> tuple[Store, list[str]]:
    # "." has no name; the directory behind it has.
    path = directory if directory.name not in ("", "..") else directory.resolve()
    if not path.exists():
        raise PathMissing(path=directory, purpose="directory")
    if not path.is_dir():
        raise CannotSeal(path=path, reason="it is a file; a checkpoint is a directory", remedy=_of_a_file(path))
    if not is_parent:
        return Store(path.parent), [path.name]
    store = Store(path)
    # Sealing again verifies, also with --all.
    names = list(folders_to_seal(store)) or newest_first(store, scan(store).committed)
    if not names:
        raise CannotSeal(path=path, reason="no directory in it has a step in its name")
    return store, names


def _of_a_file(path: Path) -> Help:
    """How to seal a single file: its directory if that has a step in its name, else a new directory."""
    if step_in_name(path.absolute().parent.name) is not None:
        return Help(f"unbroken seal {quoted(path.parent)}", "seal the directory that contains it")
    named_step = step_in_name(path.name)
    folder = quoted(path.parent / f"step-{1000 if named_step is None else named_step}")
    command = f"mkdir {folder} && mv {quoted(path)} {folder} && unbroken seal {folder}"
    return Help(command, "move it to a directory with the step in its name")


def _metric(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        name = ""
    if not name:
        raise BadUsage(command="unbroken seal", complaint=f"--metric {text} is not NAME=NUMBER")
    return name, number


def _text(store: Store, done: list[Sealed], style: Style, *, is_parent: bool) -> str:
    if is_parent and not any(each.is_new for each in done):
        many = amounts.plural(len(done), "checkpoint")
        return f"{style.good('ok    ')}  {store.root}  {many} already sealed, all checksums verified"
    return "\n".join(_line(store, each, style) for each in done)


def _line(store: Store, sealed: Sealed, style: Style) -> str:
    manifest = sealed.manifest
    word = style.good("sealed") if sealed.is_new else style.good("ok    ")
    parts = amounts.plural(len(manifest.parts), "part")
    note = "" if sealed.is_new else ", already sealed, all checksums verified"
    return (
        f"{word}  {store.path(sealed.name)}  step {amounts.count(manifest.step)}, {parts}, "
        f"{amounts.size(manifest.size_bytes)}, by {manifest.origin}{note}"
    )
