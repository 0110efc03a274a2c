"""``unbroken outcome``: how the last job of a run ended, as text, as JSON, and as this command's own exit code."""

import time

import click

from unbroken.cli.arguments import named_run
from unbroken.cli.output import Output, as_command
from unbroken.errors import NoOutcome
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.records.lease import Standing
from unbroken.records.outcome import Outcome, judge_outcome, with_exit_code
from unbroken.records.process import process_of
from unbroken.records.takeover import LeaseWatch
from unbroken.report.style import Style

_TODO = {
    "done": "the target is reached",
    "again": "start the same command again",
    "look": "a person must look before it is started again",
    "held": "a job is at work; wait for it",
}


@as_command("outcome")
@click.argument("run", metavar="RUN", required=False)
@click.option("--output-dir", metavar="RUN", help="The same as RUN.")
@click.option(
    "--stopped-exit-code",
    type=click.IntRange(0, 255),
    default=0,
    metavar="N",
    help="The exit code of a clean stop before the target, 75 for requeue loops. Default: 0.",
)
def command(output: Output, run: str | None, output_dir: str | None, stopped_exit_code: int) -> int:
    """Tell how the last job of a run ended, and exit with its exit code.

    Its class says what to do: done, again, look or held. A job that wrote no outcome and cannot be seen from here is
    watched until it renews its lease or the lease has expired, at most a minute.
    """
    layout = named_run("outcome", run, output_dir)
    watch = LeaseWatch(layout.run, monotonic=time.monotonic, process_of=process_of)
    found = judge_outcome(layout, is_live=lambda _: watch.until_known(time.sleep, output.note) is Standing.ALIVE)
    if found is None:
        raise NoOutcome(path=layout.run)
    outcome = with_exit_code(found, stopped_exit_code)
    fields = {
        "run": str(layout.run),
        "class": outcome.verdict,
        "status": outcome.status,
        "exit_code": outcome.exit_code,
        "reason": outcome.reason,
        "step": outcome.step,
        "job": outcome.job,
    }
    output.document("unbroken.outcome/1", fields, lambda: _text(outcome, output.style))
    return outcome.exit_code


def _text(outcome: Outcome, style: Style) -> str:
    paint = {"done": style.good, "again": style.warn, "look": style.bad, "held": style.good}[outcome.verdict]
    at = f" at step {amounts.count(outcome.step)}" if outcome.step is not None else ""
    job = f"job {outcome.job}" if outcome.job is not None else "the last job"
    lines = [("status", f"{paint(outcome.status)}: {job}{at}")]
    if outcome.reason:
        lines.append(("reason", outcome.reason))
    lines.append(("class", f"{outcome.verdict}: {_TODO[outcome.verdict]}"))
    lines.append(("exit", str(outcome.exit_code)))
    return "\n".join(f"{style.dim(label.ljust(7))}  {printable(value)}" for label, value in lines)
