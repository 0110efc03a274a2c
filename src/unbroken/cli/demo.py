"""``unbroken demo``: see a run survive, on this machine, in a minute or two; needs no data, no network and no GPU."""

import importlib.util
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

import click

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


@as_command("demo")
@click.option(
    "--dir",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where to keep it; default: a temporary folder.",
)
def command(output: Output, folder: Path | None) -> int:
    """See a run survive being killed, bit for bit.

    A tiny GPT is trained twice: left alone, and as a chain of jobs that are killed, stopped, resized and damaged.

    Takes a minute or two on two cores; needs no data, no network and no GPU. Exit code 3: the bits differ.
    """
    for needed in ("torch", "numpy", "tokenizers"):
        if importlib.util.find_spec(needed) is None:
            raise TorchMissing(purpose="the demo")
    asked = folder if folder is not None else fresh_folder()
    places = prepare(asked, holder=this_holder(), now_s=time.time(), process_of=process_of)
    console = _voice(output)
    console.line("demo", "a tiny GPT, trained twice: left alone, and in jobs that are killed")
    console.line("", "a minute or two; no data, no network and no GPU is needed")
    console.line("folder", str(places.folder))
    try:
        result = run_demo(places, console, os.environ)
    except KeyboardInterrupt:
        output.note(f"interrupted; its jobs have ended. Again: {called()} demo --dir {quoted(places.folder)}")
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
    # Imported when it is needed: comparing loads what a demo that has just begun can do without.
    from unbroken.prove import demo_report

    places = result.places
    found = demo_report.rows(places.chained)
    proof = demo_report.prove(places.alone, places.chained)

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

    output.document("unbroken.demo/1", demo_report.facts(result, found, proof), text)
    return proof.exit_code
