"""``unbroken seal``: make a folder that any tool wrote a checkpoint like ours."""

import time
from pathlib import Path

import click

from unbroken.cli.facts import manifest_facts
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


@as_command("seal")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(0), metavar="N", help="The step, where the folder does not name it.")
@click.option("--metric", "metrics", multiple=True, metavar="NAME=VALUE", help="A metric to keep the best by.")
@click.option("--all", "is_parent", is_flag=True, help="Seal every folder in DIR that names its step.")
@click.option("--num-workers", type=click.IntRange(1, 64), default=4, show_default=True, help="Threads that read.")
def command(
    output: Output, directory: Path, step: int | None, metrics: tuple[str, ...], is_parent: bool, num_workers: int
) -> None:
    """Add a manifest to a folder, so that it can be verified, kept and pruned.

    Transformers, Accelerate, Lightning, DeepSpeed, torch DCP or plain .pt files: the folder's own files are read, made
    durable and never changed, and nothing in them is executed. Sealing twice verifies.
    """
    if is_parent and (step is not None or metrics):
        raise BadUsage(command="unbroken seal", complaint="--step and --metric speak of one folder, --all of many")
    store, names = _targets(directory, is_parent=is_parent)
    values = dict(map(_metric, metrics))
    total = sum(size or 0 for name in names for _, size in walk_files(LOCAL, store.path(name)))
    with output.progress("seal", total, is_bytes=True) as advance:
        done = [
            seal(store, name, at_ns=time.time_ns(), step=step, metrics=values, workers=num_workers, progress=advance)
            for name in names
        ]
    facts = {
        "store": str(store.root),
        "sealed": [{"is_new": each.is_new, **manifest_facts(each.name, each.manifest)} for each in done],
    }
    output.document("unbroken.seal/2", facts, lambda: _text(store, done, output.style, is_parent=is_parent))


def _targets(directory: Path, *, is_parent: bool) -> tuple[Store, list[str]]:
    # "." has no name of its own; the folder it stands for has.
    path = directory if directory.name not in ("", "..") else directory.resolve()
    if not path.exists():
        raise PathMissing(path=directory, purpose="folder")
    if not path.is_dir():
        raise CannotSeal(path=path, reason="it is a file, and a checkpoint is a folder", remedy=_of_a_file(path))
    if not is_parent:
        return Store(path.parent), [path.name]
    store = Store(path)
    # Sealing twice verifies, also with --all.
    names = list(folders_to_seal(store)) or newest_first(store, scan(store).committed)
    if not names:
        raise CannotSeal(path=path, reason="every folder in it is sealed already, or names no step")
    return store, names


def _of_a_file(path: Path) -> Help:
    """What seals a single file: its folder, if that is named as a checkpoint; else a folder of its own."""
    if step_in_name(path.absolute().parent.name) is not None:
        return Help(f"unbroken seal {quoted(path.parent)}", "seal the folder that holds it")
    told = step_in_name(path.name)
    folder = quoted(path.parent / f"step-{1000 if told is None else told}")
    command = f"mkdir {folder} && mv {quoted(path)} {folder} && unbroken seal {folder}"
    return Help(command, "give it a folder of its own that names its step")


def _metric(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        name = ""
    if not name:
        raise BadUsage(command="unbroken seal", complaint=f"'{text}' is not NAME=VALUE with a number")
    return name, number


def _text(store: Store, done: list[Sealed], style: Style, *, is_parent: bool) -> str:
    if is_parent and not any(each.is_new for each in done):
        many = amounts.plural(len(done), "checkpoint")
        return f"{style.good('sound ')}  {store.root}  {many} sealed before, every digest right"
    return "\n".join(_line(store, each, style) for each in done)


def _line(store: Store, sealed: Sealed, style: Style) -> str:
    manifest = sealed.manifest
    word = style.good("sealed") if sealed.is_new else style.good("sound ")
    parts = amounts.plural(len(manifest.parts), "part")
    note = "" if sealed.is_new else ", sealed before, every digest right"
    return (
        f"{word}  {store.path(sealed.name)}  step {amounts.count(manifest.step)}, {parts}, "
        f"{amounts.size(manifest.size_bytes)}, by {manifest.origin}{note}"
    )
