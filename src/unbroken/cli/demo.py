"""``unbroken demo``: a run that is killed and resumed on this machine, without data, network or GPU."""

import importlib.util
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

import click

from unbroken.cli.arguments import DiskPath
from unbroken.cli.output import Advance, Output, as_command
from unbroken.cli.status import summary_text
from unbroken.errors import TorchMissing
from unbroken.errors.tree import quoted
from unbroken.prove.demo import Console, DemoResult, run_demo
from unbroken.prove.demo_setup import called, fresh_folder, prepare
from unbroken.quoting import amounts
from unbroken.records.layout import Layout
from unbroken.records.process import process_of, this_holder
from unbroken.records.summary import summarize
from unbroken.report.style import Style, wants_color
from unbroken.store.directory import Store


@as_command(
    "demo",
    examples=(("unbroken demo", "in a temporary directory"), ("unbroken demo --dir demo", "keep the runs")),
    exit_codes={0: "both runs are equal bit for bit", 3: "they differ"},
)
@click.option(
    "--dir",
    "folder",
    metavar="DIR",
    type=DiskPath(),
    help="Directory to keep the runs in; default: a temporary one.",
)
def command(output: Output, folder: Path | None) -> int:
    """Train a tiny GPT, kill it, resume it, compare every bit.

    Trains it twice: once without interruption, and once as a chain of jobs that are killed, stopped, resized and
    damaged. Takes one to two minutes on two CPU cores; needs no data, network or GPU.
    """
    for needed in ("torch", "numpy", "tokenizers"):
        if importlib.util.find_spec(needed) is None:
            raise TorchMissing(purpose="the demo")
    asked = folder if folder is not None else fresh_folder()
    places = prepare(asked, holder=this_holder(), now_s=time.time(), process_of=process_of)
    console = _voice(output)
    console.line("demo", "training a tiny GPT twice: uninterrupted, and in jobs that are killed")
    console.line("", "takes 1 to 2 minutes; needs no data, network or GPU")
    console.line("directory", str(places.folder))
    try:
        result = run_demo(places, console, os.environ)
    except KeyboardInterrupt:
        output.note(f"interrupted; all jobs have exited. Run again: {called()} demo --dir {quoted(places.folder)}")
        raise
    return _show(output, result)


def _voice(output: Output) -> Console:
    from unbroken.prove.demo_report import labelled

    style = Style(wants_color(output.stderr, output.environ))

    def line(label: str, text: str) -> None:
        output.note(labelled([(label, text)], style))

    def bar(title: str, total: int) -> AbstractContextManager[Advance]:
        return output.progress(title, total)

    return Console(line, bar)


def _show(output: Output, result: DemoResult) -> int:
    # Imported late: the comparison needs numpy and torch, the start of the demo does not.
    from unbroken.prove import demo_report

    places = result.places
    found = demo_report.rows(places.chained)
    proof = demo_report.prove_demo(places.alone, places.chained)

    def text() -> str:
        style = output.style
        summary = summarize(Store(Layout(places.chained).checkpoints), now_s=time.time(), process_of=process_of)
        run = places.chained.relative_to(places.folder)
        took = demo_report.labelled([("took", amounts.duration(result.seconds))], style)
        pieces = [
            demo_report.jobs_table(found, style),
            f"{proof.text(style)}\n{took}",
            f"{style.dim(f'$ unbroken status {run}')}\n{summary_text(summary, style)}",
            demo_report.next_steps(result, called(), style),
        ]
        return "\n" + "\n\n".join(pieces)

    output.document("unbroken.demo/1", demo_report.json_fields(result, found, proof), text)
    return proof.exit_code
