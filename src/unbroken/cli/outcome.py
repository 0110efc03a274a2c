"""``unbroken outcome``: how the last job of a run ended, as text, as JSON and as exit code."""

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
from unbroken.records.stop import StopReason
from unbroken.records.takeover import LeaseWatch
from unbroken.report.style import Style

_NEXT = {
    "done": "target reached",
    "again": "run the same command again",
    "look": "needs your attention before it is restarted",
    "held": "a job is running; wait for it",
}


@as_command(
    "outcome",
    examples=(
        ("unbroken outcome runs/a", "after a job"),
        ("unbroken outcome runs/a --stopped-exit-code 75 -q", "in a requeue loop"),
    ),
    exit_codes={
        0: "done, or stopped cleanly (see --stopped-exit-code)",
        2: "no job has run yet, or the command is wrong",
        7: "a job is running",
    },
)
@click.argument("run", metavar="RUN", required=False)
@click.option("--output-dir", metavar="RUN", help="Same as RUN.")
@click.option(
    "--stopped-exit-code",
    type=click.IntRange(0, 255),
    default=0,
    metavar="N",
    help="Exit code of a clean stop before the target; 75 lets a requeue loop tell it from done.",
)
def command(output: Output, run: str | None, output_dir: str | None, stopped_exit_code: int) -> int:
    """Show how the last job of a run ended.

    Exits with the exit code of that job; any other code is listed by `unbroken explain exit-codes`. The class says what
    to do: done, again (run it again), look (needs your attention) or held (a job is running). If the last job wrote no
    outcome and is not visible from here, its lease is watched for up to a minute.
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
    # A training may be complete before its target, by early stopping for example: the reason says so.
    is_early = outcome.verdict == "done" and outcome.reason != StopReason("done").sentence()
    following = "the training has ended" if is_early else _NEXT[outcome.verdict]
    lines.append(("class", f"{outcome.verdict}: {following}"))
    lines.append(("exit", str(outcome.exit_code)))
    return "\n".join(f"{style.dim(label.ljust(7))}  {printable(value)}" for label, value in lines)
