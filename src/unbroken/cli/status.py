"""``unbroken status``: how a run stands, in milliseconds, from any machine that sees its directory."""

import math
import time
from typing import Any

import click

from unbroken import amounts
from unbroken.cli.facts import instant
from unbroken.cli.output import Output, as_command
from unbroken.errors import BadUsage
from unbroken.report.style import Style
from unbroken.run.layout import Layout
from unbroken.run.lease import DIRECTORY as LEASES
from unbroken.run.process import process_of
from unbroken.run.summary import RunSummary, summarize
from unbroken.store.place import Store
from unbroken.store.refer import find_store


@as_command("status")
@click.argument("run", metavar="RUN", required=False)
@click.option("--output-dir", metavar="RUN", help="The same as RUN.")
def command(output: Output, run: str | None, output_dir: str | None) -> None:
    """Show how a run stands: who holds it, how far it is, what it can resume from."""
    named = run or output_dir
    if named is None:
        raise BadUsage(command="unbroken status", complaint="the argument RUN is missing")
    summary = summarize(_store_of(named), now_s=time.time(), process_of=process_of)
    output.document("unbroken.status/1", _facts(summary), lambda: _text(summary, output.style))


def _store_of(named: str) -> Store:
    from pathlib import Path

    layout = Layout(Path(named))
    # A run that has not saved yet has no checkpoints, and a status all the same.
    is_run = layout.run_state.exists() or (layout.run / LEASES).is_dir()
    return Store(layout.checkpoints) if is_run else find_store(layout.run)


def _facts(summary: RunSummary) -> dict[str, Any]:
    lease, state, newest = summary.lease, summary.state, summary.newest_usable
    return {
        "run": summary.run,
        "status": summary.status,
        "job": None
        if lease is None
        else {
            "number": lease.number,
            "host": lease.holder.host,
            "pid": lease.holder.pid,
            "renewed_at": instant(int(lease.renewed_at_s * 1e9)),
        },
        "step": state.step if state else (newest.step if newest else None),
        "max_steps": state.max_steps if state else None,
        "tokens": state.tokens if state else None,
        "loss": state.loss if state and state.loss is not None and math.isfinite(state.loss) else None,
        "error": state.error if state else None,
        "resumable_step": newest.step if newest else None,
        "resumable_checkpoint": summary.newest_usable_name,
        "passed_over": [{"name": name, "reason": reason} for name, reason in summary.passed_over],
        "checkpoints": len(summary.inventory.committed),
        "torn": len(summary.inventory.torn),
        "quarantined": len(summary.inventory.quarantined),
        "abandoned": len(summary.inventory.abandoned),
    }


def _text(summary: RunSummary, style: Style) -> str:
    paint = {"running": style.good, "completed": style.good, "crashed": style.bad, "error": style.bad}
    lines = [("run", f"{summary.run}  {paint.get(summary.status, style.warn)(summary.status)}")]
    state, newest = summary.state, summary.newest_usable
    if summary.lease is not None:
        age = amounts.ago(time.time() - summary.lease.renewed_at_s)
        lines.append(("job", f"{summary.lease.describe()}, last sign of life {age}"))
    if state and state.step is not None:
        target = f" of {amounts.count(state.max_steps)}" if state.max_steps is not None else ""
        loss = f", loss {state.loss:.4f}" if state.loss is not None else ""
        lines.append(("step", f"{amounts.count(state.step)}{target}{loss}"))
    if newest:
        age = amounts.ago((time.time_ns() - newest.saved_at_ns) / 1e9)
        size = amounts.size(newest.size_bytes)
        where = f"step {amounts.count(newest.step)}  ({summary.newest_usable_name}, {size}, {age})"
        lines.append(("resumes", where))
    else:
        lines.append(("resumes", "from nothing: no usable checkpoint"))
    lines += [("passed", f"{name}: {reason}") for name, reason in summary.passed_over]
    found = summary.inventory
    counts = [amounts.plural(len(found.committed), "checkpoint")]
    counts += [f"{len(many)} {word}" for many, word in _others(summary) if many]
    lines.append(("store", ", ".join(counts)))
    if state and state.error:
        lines.append(("error", state.error))
    return "\n".join(f"{style.dim(label.ljust(7))}  {value}" for label, value in lines)


def _others(summary: RunSummary) -> list[tuple[tuple[object, ...], str]]:
    found = summary.inventory
    return [(found.torn, "torn"), (found.quarantined, "quarantined"), (found.abandoned, "abandoned")]
