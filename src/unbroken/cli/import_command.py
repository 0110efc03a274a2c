"""``unbroken import``: makes a new run of a checkpoint that another tool wrote."""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from unbroken.cli.arguments import run_path
from unbroken.cli.output import Output, as_command
from unbroken.errors import BadUsage, CannotImport, ForeignAmbiguous, ForeignKind, Help, NeedsClass
from unbroken.errors.foreign import ImportCall
from unbroken.errors.tree import quoted
from unbroken.launch.run_config import RunConfig
from unbroken.mirror.address import is_url
from unbroken.quoting import amounts
from unbroken.records.layout import Layout
from unbroken.store.foreign import GPT_SIMPLE, KINDS, Foreign, Kind, resolve_foreign

if TYPE_CHECKING:
    from unbroken.foreign.items import Contents
    from unbroken.gpt.foreign_names import MappedConfig

_COMMAND: Final = "unbroken import"
# Items of the trainer that no other tool has in this form.
_OF_TRAINER: Final = ("arithmetic", "data", "rng_state")


def _local(ctx: click.Context, param: click.Parameter, value: str) -> Path:
    """A path as click's callback, unless it is an address."""
    del ctx, param
    if not value:
        raise BadUsage(command=_COMMAND, complaint="SOURCE is empty")
    if not is_url(value):
        return Path(value)
    scheme, _, place = value.partition("://")
    remedy = f"name the path {place}" if scheme == "file" else "copy it to a disk first, with the store's own tool"
    raise BadUsage(command=_COMMAND, complaint=f"{value} is an address; {remedy}")


@as_command(
    "import",
    examples=(
        ("unbroken import outputs/gpt-simple runs/a", "a run of GPT-Simple, to continue with `unbroken train`"),
        ("unbroken import ckpt/step_500 runs/a --config run.yaml", "KempnerForge, with the model of a config"),
        ("unbroken import out/checkpoint-500 runs/a", "Transformers, for Run(..., model=model, optimizer=optimizer)"),
        ("unbroken import ckpt runs/a --require-kind model --step 200", "one kind, one step, or an error"),
    ),
)
@click.argument("source", metavar="SOURCE", callback=_local)
@click.argument("run", metavar="RUN", callback=run_path)
@click.option(
    "--config", "config_file", metavar="FILE", type=click.Path(path_type=Path), help="Config of the model to map to."
)
@click.option("--keep-names", is_flag=True, help="Keep the tensor names; do not map them to `unbroken train`.")
@click.option("--require-kind", type=click.Choice(KINDS), help="Accept only this kind of checkpoint.")
@click.option("--step", type=click.IntRange(0), metavar="N", help="Step to import; or the step, if SOURCE has none.")
@click.option(
    "--item", "items", multiple=True, metavar="NAME[=KEY]", help="Import only this item, from this key; repeatable."
)
@click.option("--prefix", metavar="TEXT", help="Import tensors with this prefix, and remove the prefix.")
@click.option("--tie", "ties", multiple=True, metavar="NAME=NAME", help="Second name of a tied tensor; repeatable.")
@click.option(
    "--allow-class", "allowed", multiple=True, metavar="CLASS", help="Read these objects as plain data; repeatable."
)
@click.option("--dry-run", is_flag=True, help="Read and check everything, write nothing.")
def command(
    output: Output,
    source: Path,
    run: Path,
    config_file: Path | None,
    keep_names: bool,
    require_kind: Kind | None,
    step: int | None,
    items: tuple[str, ...],
    prefix: str | None,
    ties: tuple[str, ...],
    allowed: tuple[str, ...],
    dry_run: bool,
) -> None:
    """Import a checkpoint of another tool into a new run.

    SOURCE is a file, a checkpoint directory, or a directory of checkpoints, of which the newest is imported:
    GPT-Simple, KempnerForge, Transformers, Accelerate, Lightning, torch DCP, model_000100.pt with its optim_ files, or
    any .pt file. Its files are never changed, and no code in them is executed.
    """
    from unbroken.foreign.read import NO_STEP, Selection, read_foreign
    from unbroken.foreign.write import require_new
    from unbroken.gpt.foreign_names import map_names

    if keep_names and config_file is not None:
        raise BadUsage(command=_COMMAND, complaint="--keep-names and --config cannot be used together")
    _require_once("--item", items, "item")
    _require_once("--tie", ties, "name")
    selection = Selection(items, prefix or "", tuple(map(_tie, ties)), allowed)
    require_new(run)
    with _repeating(run):
        found = resolve_foreign(source, require_kind=require_kind, step=step)
        config = None if keep_names else _config(found, config_file, _call(run))
        contents, problems = read_foreign(found, selection)
    number, unknown = _step(found, contents, step)
    problems += unknown
    if config is not None and not problems:
        problems += map_names(found, contents, config.config.model)
    if problems:
        remedy = Help(_call(run).again(found.path, "--step", "1000"), "state the step") if NO_STEP in unknown else None
        raise CannotImport(path=found.path, problems=tuple(problems), remedy=remedy)
    checkpoint = None if dry_run else _write(run, found, contents, number, config)
    following = _next(run, contents, config)
    fields: dict[str, Any] = {
        "source": found.path,
        "tool": found.tool,
        "kind": found.kind,
        "step": number,
        "run": run,
        "checkpoint": checkpoint,
        "is_dry_run": dry_run,
        "items": {name: {"kind": item.kind, "tensors": item.tensors} for name, item in contents.items.items()},
        "left_out": contents.left_out,
        "next": following,
    }
    output.document("unbroken.import/1", fields, lambda: _text(fields, contents, is_short=output.quiet))


def _require_once(option: str, values: tuple[str, ...], kind: str) -> None:
    """Raise where an option names one thing twice, with different sources: the last one would win silently."""
    given: dict[str, str] = {}
    for value in values:
        name = value.partition("=")[0]
        if given.setdefault(name, value) != value:
            complaint = f"{option} {given[name]} and {option} {value} have the same {kind}; give one of them"
            raise BadUsage(command=_COMMAND, complaint=complaint)


def _tie(text: str) -> tuple[str, str]:
    missing, equals, present = text.partition("=")
    if not (missing and equals and present):
        raise BadUsage(command=_COMMAND, complaint=f"--tie {text} is not NAME=NAME")
    return missing, present


def _config(found: Foreign, file: Path | None, call: ImportCall) -> "MappedConfig | None":
    """The config whose model the names are mapped to; None keeps them."""
    from unbroken.gpt.foreign_names import config_of, required_config

    config = config_of(found, file)
    if config is None and found.tool == GPT_SIMPLE:
        raise required_config(found, call)
    return config


def _step(found: Foreign, contents: "Contents", asked: int | None) -> tuple[int, list[str]]:
    """The step of a checkpoint, and why it is not known."""
    from unbroken.foreign.read import NO_STEP, stated_steps

    stated = stated_steps(found, contents)
    if len(stated) > 1 and asked not in stated:
        return 0, [f"its files state different steps: {', '.join(map(str, sorted(stated)))}; choose with --step"]
    if asked is not None and stated and asked not in stated:
        return 0, [f"--step {asked}: the checkpoint is of step {next(iter(stated))}"]
    if asked is None and not stated:
        return 0, [NO_STEP]
    return (asked if asked is not None else stated.pop()), []


@contextlib.contextmanager
def _repeating(run: Path) -> Iterator[None]:
    """Errors of the block whose help lines are this import again, with RUN and the options as they were given."""
    try:
        yield
    except (ForeignAmbiguous, ForeignKind) as refused:
        raise replace(refused, call=_call(run, but=("step", "require_kind"))) from None
    except NeedsClass as refused:
        raise replace(refused, call=_call(run)) from None


def _call(run: Path, *, but: Collection[str] = ()) -> ImportCall:
    """How this import was called, without some of its options."""
    context = click.get_current_context()
    words: list[str] = []
    for option in context.command.params:
        value = context.params.get(str(option.name))
        if isinstance(option, click.Option) and option.name not in but and value not in (None, False, ()):
            values = value if isinstance(value, tuple) else (value,)
            words += [option.opts[0]] if value is True else [word for v in values for word in (option.opts[0], str(v))]
    return ImportCall(run, tuple(words))


def _write(run: Path, found: Foreign, contents: "Contents", step: int, config: "MappedConfig | None") -> Path:
    from unbroken.foreign.write import commit_import
    from unbroken.gpt.run_files import keep_config

    store, name = commit_import(run, found, contents, step=step)
    if config is not None:
        keep_config(Layout(run), RunConfig(config.config.settled(contents.world_size)))
    return store.path(name)


def _next(run: Path, contents: "Contents", config: "MappedConfig | None") -> str:
    """What continues from the new run."""
    if config is None:
        passed = ", ".join(f"{name}={name}" for name in contents.items)
        return f"Run({str(run)!r}, settings=Settings(accept=('rng_state',)), {passed})"
    accepted = [word for name in _OF_TRAINER for word in ("--accept", name)]
    words = [quoted(config.file), f"training.output_dir={quoted(run)}", *config.overrides, *accepted]
    return f"unbroken train {' '.join(words)}"


def _text(fields: dict[str, Any], contents: "Contents", *, is_short: bool) -> str:
    verb, where = ("would import", fields["run"]) if fields["is_dry_run"] else ("imported", fields["checkpoint"])
    lines = [f"{verb}  {where}  step {amounts.count(fields['step'])}, from {fields['source']} ({fields['tool']})"]
    if is_short:
        return lines[0]
    for name, item in contents.items.items():
        lines.append(f"  {name}  {item.kind}" + (f", {amounts.plural(item.tensors, 'tensor')}" if item.tensors else ""))
    lines += [f"  not imported: {name} ({why})" for name, why in sorted(contents.left_out.items())]
    return "\n".join([*lines, f"next  {fields['next']}"])
