"""``unbroken kubernetes``: prints a manifest that runs and resumes a training in a cluster."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from unbroken.cli.arguments import DiskPath, write_new
from unbroken.cli.output import Output, as_command
from unbroken.config.decode import decode
from unbroken.config.overrides import take_apart
from unbroken.config.source import read
from unbroken.errors import BadUsage, Help
from unbroken.errors.tree import quoted
from unbroken.files import LOCAL
from unbroken.launch.kubernetes.documents import CONFIG_FOLDER, documents
from unbroken.launch.kubernetes.options import KINDS, Kind, ManifestOptions, Program, grace_of, named_after, require_fit
from unbroken.launch.kubernetes.render import manifest
from unbroken.quoting.shell import shell_line
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout

PROGRAM: Final = "unbroken kubernetes"
_CONFIGS: Final = (".yaml", ".yml", ".json")
_LIMIT_BYTES: Final = 1 << 20


@as_command(
    "kubernetes",
    examples=(
        ("unbroken kubernetes config.yaml --image IMAGE --gpus 8 --claim runs", "a config"),
        ("unbroken kubernetes --image IMAGE --run-dir a -- /app/train.py", "a script in the image"),
        ("unbroken kubernetes config.yaml --image IMAGE --nodes 4 --kind jobset -o job.yaml", "4 nodes"),
    ),
)
@click.argument("words", metavar="CONFIG [OVERRIDE]... | -- SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--image",
    default="",
    show_default=False,
    metavar="IMAGE",
    help="Container image with unbroken, torch and your code. Required.",
)
@click.option(
    "--kind",
    type=click.Choice(KINDS, case_sensitive=False),
    default="job",
    help="Kind of the workload.",
)
@click.option("--name", metavar="NAME", help="Name; default: the last part of the run directory.")
@click.option("--namespace", metavar="NAME", help="Namespace; default: that of the kubectl context.")
@click.option("--nodes", type=click.IntRange(1), default=1, metavar="N", help="Number of pods.")
@click.option("--gpus", type=click.IntRange(0), default=0, metavar="N", help="GPUs per pod, one rank per GPU.")
@click.option("--cpu", metavar="QUANTITY", help="CPUs per pod: 8, 1500m.")
@click.option("--memory", metavar="QUANTITY", help="Memory per pod: 64Gi.")
@click.option("--shared-memory", default="8Gi", metavar="QUANTITY", help="Size of /dev/shm.")
@click.option(
    "--claim",
    default="",
    show_default=False,
    metavar="CLAIM",
    help="PersistentVolumeClaim of the run directory; default: as --name.",
)
@click.option("--mount", default="/runs", metavar="PATH", help="Mount path of the claim.")
@click.option("--storage", metavar="QUANTITY", help="Also create the claim, of this size.")
@click.option("--storage-class", metavar="NAME", help="Storage class of the created claim.")
@click.option(
    "--secret", "secrets", multiple=True, metavar="NAME", help="Secret to import as environment variables; repeatable."
)
@click.option(
    "--grace-seconds",
    type=click.IntRange(1),
    metavar="S",
    help="Termination grace period in seconds; default: from measured saves.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=20,
    metavar="N",
    help="Maximum number of restarts after a crash.",
)
@click.option("--user", type=click.IntRange(1), default=1000, metavar="UID", help="User ID in the pod.")
@click.option("--run-dir", metavar="RUN", help="Run directory of a script; a config has training.output_dir.")
@click.option("-o", "--output", "target", type=DiskPath(), help="File to write; default: standard output.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
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

    A CONFIG (.yaml, .yml, .json) is embedded in the manifest and run by `unbroken train`; a SCRIPT is part of the image
    and run by `unbroken run`. If the run directory can be read from here, the grace period follows from its saves.
    """
    program = _program(words, run_dir)
    options = ManifestOptions(
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
    require_fit(options)
    _print(output, options, target, is_replacing=force)


def _print(output: Output, options: ManifestOptions, target: Path | None, *, is_replacing: bool) -> None:
    text = manifest(options, _made_by(sys.argv[1:]))
    is_file = target is not None and str(target) != "-"
    fields = {
        "kind": options.kind,
        "name": options.name,
        "grace_s": options.grace.seconds,
        "grace_because": options.grace.because,
        "path": str(target) if is_file else None,
        "documents": documents(options),
        "text": text,
    }
    if target is not None and is_file:
        look = f"kubectl diff -f {quoted(target)}"
        remedy = Help(look, "compare the existing file with the cluster; --force overwrites it")
        write_new(PROGRAM, target, text, remedy, is_replacing=is_replacing)
        output.document("unbroken.kubernetes/1", fields, lambda: _wrote(options, target))
        return
    output.document("unbroken.kubernetes/1", fields, lambda: text, is_verbatim=True)


def _wrote(options: ManifestOptions, target: Path) -> str:
    said = f"{options.kind}, {options.nodes} x {options.gpus} GPUs" if options.gpus else options.kind
    grace = f"grace period {options.grace.seconds} s: {options.grace.because}"
    return f"wrote {target}  ({said}; {grace})\nnext: kubectl apply -f {quoted(target)}"


def _made_by(arguments: Sequence[str]) -> str:
    """The command line, quoted, on one line."""
    return shell_line(["unbroken", *arguments])


def _program(words: Sequence[str], run_dir: str | None) -> Program:
    if not words:
        raise BadUsage(command=PROGRAM, complaint="missing argument CONFIG or -- SCRIPT")
    if Path(words[0]).suffix not in _CONFIGS:
        return Program(verb="run", words=tuple(words), run=run_dir or "")
    if run_dir is not None:
        raise BadUsage(command=PROGRAM, complaint="--run-dir needs a SCRIPT; a config has training.output_dir")
    taken = take_apart(words[1:])
    if taken.rest:
        complaint = f"'{taken.rest[0]}' is not an override section.field=value"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    path = Path(words[0])
    config = decode(read(path), taken.overrides, source=str(path)).config
    file = f"config{path.suffix}"
    text = LOCAL.read_bytes(path, limit_bytes=_LIMIT_BYTES).decode()
    inside = (f"{CONFIG_FOLDER}/{file}", *words[1:])
    return Program(verb="train", words=inside, run=config.training.output_dir, config=text, config_file=file)
