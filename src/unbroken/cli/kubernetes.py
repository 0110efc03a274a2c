"""``unbroken kubernetes``: a manifest that starts a run in a cluster and goes on with it after anything."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from unbroken.cli.arguments import write_new
from unbroken.cli.output import Output, as_command
from unbroken.config.decode import decode
from unbroken.config.overrides import take_apart
from unbroken.config.source import read
from unbroken.errors import BadUsage, Help
from unbroken.errors.tree import quoted
from unbroken.files import LOCAL
from unbroken.launch.kubernetes.documents import CONFIG_FOLDER, documents
from unbroken.launch.kubernetes.text import manifest
from unbroken.launch.kubernetes.wanted import KINDS, Kind, Program, Wanted, grace_of, named_after, require_fit
from unbroken.quoting.shell import shell_line
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout

PROGRAM: Final = "unbroken kubernetes"
_CONFIGS: Final = (".yaml", ".yml", ".json")
_LIMIT_BYTES: Final = 1 << 20


@as_command("kubernetes")
@click.argument("words", metavar="CONFIG [OVERRIDE]... | -- SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--image", default="", metavar="IMAGE", help="The image with unbroken, torch and your code. Required.")
@click.option(
    "--kind", type=click.Choice(KINDS, case_sensitive=False), default="job", show_default=True, help="What it is."
)
@click.option("--name", metavar="NAME", help="Name of the object. Default: the last part of the run directory.")
@click.option("--namespace", metavar="NAME", help="Namespace. Default: that of the context it is applied in.")
@click.option("--nodes", type=click.IntRange(1), default=1, metavar="N", help="Pods that train together. Default: 1.")
@click.option("--gpus", type=click.IntRange(0), default=0, metavar="N", help="GPUs of each, one rank on each GPU.")
@click.option("--cpu", metavar="QUANTITY", help="Processors of each pod: 8, 1500m.")
@click.option("--memory", metavar="QUANTITY", help="Memory of each pod: 64Gi.")
@click.option("--shared-memory", default="8Gi", show_default=True, metavar="QUANTITY", help="Size of /dev/shm.")
@click.option("--claim", default="", metavar="NAME", help="The volume claim of the run directory. Default: the name.")
@click.option("--mount", default="/runs", show_default=True, metavar="PATH", help="Where it is mounted.")
@click.option("--storage", metavar="QUANTITY", help="Make the claim, of this size. Not given: it exists.")
@click.option("--storage-class", metavar="NAME", help="The class of storage of that claim.")
@click.option("--secret", "secrets", multiple=True, metavar="NAME", help="A secret whose keys become variables.")
@click.option("--grace-seconds", type=click.IntRange(1), metavar="S", help="Seconds to save in. Default: as measured.")
@click.option(
    "--max-restarts", type=click.IntRange(0), default=20, metavar="N", show_default=True, help="Crashes to survive."
)
@click.option(
    "--user", type=click.IntRange(1), default=1000, metavar="UID", show_default=True, help="User ID in the pod."
)
@click.option("--run-dir", metavar="RUN", help="A script's run directory; a config names its own.")
@click.option("-o", "--output", "target", type=click.Path(path_type=Path), help="Write this file.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def command(
    output: Output,
    words: tuple[str, ...],
    image: str,
    kind: Kind,
    name: str | None,
    namespace: str | None,
    nodes: int,
    gpus: int,
    cpu: str | None,
    memory: str | None,
    shared_memory: str,
    claim: str,
    mount: str,
    storage: str | None,
    storage_class: str | None,
    secrets: tuple[str, ...],
    grace_seconds: int | None,
    max_restarts: int,
    user: int,
    run_dir: str | None,
    target: Path | None,
    force: bool,
) -> None:
    """Print a Kubernetes manifest for a run.

    A CONFIG (.yaml, .yml, .json) is trained by unbroken train and travels in the manifest; a SCRIPT is in the image and
    started by unbroken run. Where the run's records can be read from here, the time to save is the one measured.
    """
    program = _program(words, run_dir)
    wanted = Wanted(
        kind=kind,
        name=named_after(program.run) if name is None else name,
        image=image,
        program=program,
        grace=grace_of(read_history(Layout(Path(program.run))).events if program.run else (), grace_seconds),
        namespace=namespace,
        nodes=nodes,
        gpus=gpus,
        cpu=cpu,
        memory=memory,
        shared_memory=shared_memory,
        claim=claim,
        mount=mount,
        storage=storage,
        storage_class=storage_class,
        secrets=secrets,
        restarts=max_restarts,
        user=user,
    )
    require_fit(wanted)
    _say(output, wanted, target, is_replacing=force)


def _say(output: Output, wanted: Wanted, target: Path | None, *, is_replacing: bool) -> None:
    text = manifest(wanted, _made_by(sys.argv[1:]))
    is_file = target is not None and str(target) != "-"
    facts = {
        "kind": wanted.kind,
        "name": wanted.name,
        "grace_s": wanted.grace.seconds,
        "grace_because": wanted.grace.because,
        "path": str(target) if is_file else None,
        "documents": documents(wanted),
        "text": text,
    }
    if target is not None and is_file:
        look = f"kubectl diff -f {quoted(target)}"
        remedy = Help(look, "see what the one that is there would change; --force replaces it")
        write_new(PROGRAM, target, text, remedy, is_replacing=is_replacing)
        output.document("unbroken.kubernetes/1", facts, lambda: _wrote(wanted, target))
        return
    output.document("unbroken.kubernetes/1", facts, lambda: text)


def _wrote(wanted: Wanted, target: Path) -> str:
    said = f"a {wanted.kind} of {wanted.nodes} x {wanted.gpus} GPUs" if wanted.gpus else f"a {wanted.kind}"
    grace = f"{wanted.grace.seconds} s to save: {wanted.grace.because}"
    return f"wrote {target}  ({said}; {grace})\nnext: kubectl apply -f {quoted(target)}"


def _made_by(arguments: Sequence[str]) -> str:
    """The command as it was given, on one line, whatever is in it."""
    return shell_line(["unbroken", *arguments])


def _program(words: Sequence[str], run_dir: str | None) -> Program:
    if not words:
        raise BadUsage(command=PROGRAM, complaint="the argument CONFIG or -- SCRIPT is missing")
    if Path(words[0]).suffix not in _CONFIGS:
        return Program(verb="run", words=tuple(words), run=run_dir or "")
    if run_dir is not None:
        raise BadUsage(command=PROGRAM, complaint="--run-dir is for a script; a config has training.output_dir")
    taken = take_apart(words[1:])
    if taken.rest:
        complaint = f"a run has one config; '{taken.rest[0]}' is not section.field=value"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    path = Path(words[0])
    config = decode(read(path), taken.overrides, source=str(path)).config
    file = f"config{path.suffix}"
    text = LOCAL.read_bytes(path, limit_bytes=_LIMIT_BYTES).decode()
    inside = (f"{CONFIG_FOLDER}/{file}", *words[1:])
    return Program(verb="train", words=inside, run=config.training.output_dir, config=text, config_file=file)
