"""``unbroken status``: the state of a run, from any machine that can read its directory."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import click

from unbroken.cli.arguments import named_store
from unbroken.cli.json_fields import iso_time
from unbroken.cli.output import Output, as_command
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.records.deadline import TOLERATED_S
from unbroken.records.journal import Event
from unbroken.records.lease import Lease, Standing
from unbroken.records.process import process_of
from unbroken.records.snapshot import RunState
from unbroken.records.summary import MirrorLag, RunSummary, summarize
from unbroken.report.style import Style
from unbroken.store.fields import as_number
from unbroken.store.foreign import import_from_store

MOST_MISMATCHES: Final = 10
MOST_LINKS: Final = 5
MOST_PARTS: Final = 4


@as_command(
    "status",
    examples=(
        ("unbroken status runs/a", "once"),
        ("watch -n 5 unbroken status runs/a", "refresh every 5 seconds"),
        ("unbroken status runs/a --json", "for scripts"),
    ),
)
@click.argument("run", metavar="RUN", required=False)
@click.option("--output-dir", metavar="RUN", help="Same as RUN.")
def command(output: Output, run: str | None, output_dir: str | None) -> None:
    """Show the state of a run.

    Prints its status, its job, the last step and loss, and the checkpoint it would resume from. Reads only the run
    directory, so it works on a login node without torch.
    """
    store = named_store("status", run, output_dir)
    summary = summarize(store, now_s=time.time(), process_of=process_of)
    output.document("unbroken.status/2", _fields(summary), lambda: summary_text(summary, output.style))
    if summary.newest_usable is None and (importing := import_from_store(store.root, store.files)):
        output.note(f"another tool has written checkpoints here; to make a run of one: {importing}")


def _fields(summary: RunSummary) -> dict[str, Any]:
    lease, state, newest = summary.lease, summary.state, summary.newest_usable
    records, outcome = summary.records, summary.outcome
    return {
        "run": summary.run,
        "status": summary.status,
        "job": None
        if lease is None
        else {
            "number": lease.number,
            "host": lease.holder.host,
            "pid": lease.holder.pid,
            "renewed_at": iso_time(int(lease.renewed_at_s * 1e9)),
            "is_released": lease.is_released,
            "liveness": summary.standing.value if summary.standing else None,
        },
        "step": state.step if state else (newest.step if newest else None),
        "max_steps": state.max_steps if state else None,
        "tokens": state.tokens if state else None,
        "loss": state.loss if state and state.loss is not None and math.isfinite(state.loss) else None,
        "loss_step": state.loss_step if state else None,
        "error": state.error if state else None,
        "class": outcome.verdict if outcome else None,
        "exit_code": outcome.exit_code if outcome else None,
        "reason": outcome.reason if outcome else None,
        "jobs": records.jobs,
        "crashed_jobs": records.crashed,
        "last_commit": _commit_fields(records.last_commit),
        "first_step": _start_fields(records.first_step),
        "recomputed": {
            "compared": records.recomputed.compared,
            "agreeing": records.recomputed.agreeing,
            "mismatches": [asdict(each) for each in records.recomputed.mismatches[:MOST_MISMATCHES]],
        },
        "data": asdict(summary.account) if summary.account is not None else None,
        "placements": [{"job": job, **placed.as_json()} for job, placed in records.placements],
        "deadline": iso_time(None if records.deadline_s is None else int(records.deadline_s * 1e9)),
        "is_stop_requested": records.is_stop_requested,
        "torn_records": records.torn,
        "resumable_step": newest.step if newest else None,
        "resumable_checkpoint": summary.newest_usable_name,
        "skipped_checkpoints": [{"name": name, "reason": reason} for name, reason in summary.skipped],
        "mirrors": [_mirror_fields(lag) for lag in summary.mirrors],
        "trackers": [asdict(each) for each in summary.trackers],
        "emergency_dumps": [asdict(each) for each in summary.emergencies],
        "saved_to": summary.saved_to,
        "checkpoints": len(summary.inventory.committed),
        "torn": len(summary.inventory.torn),
        "quarantined": len(summary.inventory.quarantined),
        "abandoned": len(summary.inventory.abandoned),
    }


def _mirror_fields(lag: MirrorLag) -> dict[str, Any]:
    return {
        "mirror": lag.mirror,
        "pending": list(lag.pending),
        "pending_bytes": lag.pending_bytes,
        "oldest_pending_saved_at": iso_time(lag.oldest_saved_at_ns),
        "newest_step": lag.newest_step,
        "refusal": lag.refusal,
    }


def _commit_fields(commit: Event | None) -> dict[str, Any] | None:
    if commit is None:
        return None
    return {
        "step": commit.whole("step"),
        "name": commit.text("name"),
        "seconds": commit.number("seconds"),
        "at": iso_time(None if commit.at_s is None else int(commit.at_s * 1e9)),
    }


def _start_fields(event: Event | None) -> dict[str, Any] | None:
    if event is None:
        return None
    return {
        "job": event.job,
        "seconds": event.number("seconds"),
        "parts": _numbers(event.values.get("parts")),
        "cpu_parts": _numbers(event.values.get("cpu_parts")),
    }


def _numbers(found: object) -> dict[str, float]:
    """The finite numbers of a table in the journal, which anybody may have edited."""
    listed = found if isinstance(found, Mapping) else {}
    return {str(name): number for name, value in listed.items() if (number := as_number(value)) is not None}


def summary_text(summary: RunSummary, style: Style) -> str:
    """The state of a run as text."""
    paint = {"running": style.good, "completed": style.good, "crashed": style.bad, "error": style.bad}
    lines = [("run", f"{summary.run}  {paint.get(summary.status, style.warn)(summary.status)}")]
    state, newest = summary.state, summary.newest_usable
    if summary.lease is not None:
        lines.append(("job", _job(summary.lease, summary.standing)))
    if state and state.step is not None:
        target = f" of {amounts.count(state.max_steps)}" if state.max_steps is not None else ""
        lines.append(("step", f"{amounts.count(state.step)}{target}{_loss(state)}"))
    if newest:
        age = amounts.ago((time.time_ns() - newest.saved_at_ns) / 1e9)
        size = amounts.size(newest.size_bytes)
        where = f"from step {amounts.count(newest.step)}  ({summary.newest_usable_name}, {size}, {age})"
        lines.append(("resume", where))
    else:
        lines.append(("resume", _without_checkpoint(summary)))
    if summary.saved_to is not None:
        lines.append(("saved to", summary.saved_to))
    lines += [("emergency", f"step {amounts.count(each.step)}  ({each.sentence()})") for each in summary.emergencies]
    lines += [("skipped", f"{name}: {reason}") for name, reason in summary.skipped]
    lines += [("tracker", each.sentence()) for each in summary.trackers]
    lines += [("mirror", lag.sentence(time.time())) for lag in summary.mirrors]
    if (account := summary.account) is not None:
        lines.append(("data", account.sentence() if account.agrees else style.bad(account.sentence())))
    lines += _recorded(summary, style)
    found = summary.inventory
    counts = [amounts.plural(len(found.committed), "checkpoint")]
    counts += [f"{len(many)} {word}" for many, word in _others(summary) if many]
    if summary.is_readable:
        lines.append(("stored", ", ".join(counts)))
    if state and state.error:
        lines.append(("error", state.error))
    return "\n".join(f"{style.dim(label.ljust(10))}  {printable(value)}" for label, value in lines)


def _loss(state: RunState) -> str:
    """The newest loss; metrics are copied from the device every few steps, so it may be that of an earlier step."""
    if state.loss is None:
        return ""
    older = state.loss_step is not None and state.loss_step != state.step
    return f", loss {state.loss:.4f}" + (f" at step {amounts.count(state.loss_step or 0)}" if older else "")


def _job(lease: Lease, standing: Standing | None) -> str:
    age_s = time.time() - lease.renewed_at_s
    renewed = f"lease renewed {amounts.ago(age_s)}"
    if standing is Standing.UNKNOWN:
        if age_s < -TOLERATED_S:
            renewed = f"lease renewed {amounts.duration(-age_s)} in the future"
        renewed += " by the clock of that machine; its process is not visible from here"
    return f"{lease.describe()}, {renewed}"


def _without_checkpoint(summary: RunSummary) -> str:
    """What a run without a usable checkpoint resumes from: emergency dumps of all ranks, or nothing."""
    if not summary.is_readable:
        return f"not known: {summary.saved_to} could not be read; no job starts before it can be"
    complete = next((each for each in summary.emergencies if each.is_complete), None)
    if complete is None:
        return "no usable checkpoint; the next job starts at step 0"
    return f"from the emergency dumps of step {amounts.count(complete.step)}, if usable; no usable checkpoint"


def _recorded(summary: RunSummary, style: Style) -> list[tuple[str, str]]:
    records, lines = summary.records, list[tuple[str, str]]()
    if records.jobs:
        crashed = f", {amounts.count(records.crashed)} crashed" if records.crashed else ""
        lines.append(("jobs", f"{amounts.count(records.jobs)}{crashed}"))
    if records.placements:
        lines.append(("scheduler", _chain(summary)))
    if (commit := records.last_commit) is not None and (seconds := commit.number("seconds")) is not None:
        step = commit.whole("step")
        lines.append(("last save", f"step {amounts.count(step or 0)} in {amounts.duration(seconds)}"))
    if (start := records.first_step) is not None and (seconds := start.number("seconds")) is not None:
        lines.append(("start", f"first step of job {start.job} done after {_start(start, seconds)}"))
    if sentence := records.recomputed.sentence():
        lines.append(("recomputed", style.bad(sentence) if records.recomputed.mismatches else sentence))
    if records.deadline_s is not None:
        lines.append(("walltime", f"limit in {amounts.duration(max(0.0, records.deadline_s - time.time()))}"))
    if records.is_stop_requested:
        lines.append(("stop", "requested; the job saves and exits after its current step"))
    if summary.outcome is not None and summary.outcome.status != "running" and summary.outcome.reason:
        lines.append(("reason", summary.outcome.reason))
    return lines


def _start(event: Event, seconds: float) -> str:
    """The whole time, and the longest parts of it."""
    parts = _numbers(event.values.get("parts"))
    longest = sorted(parts, key=lambda name: -parts[name])[:MOST_PARTS]
    shown = ", ".join(f"{name.replace('_', ' ')} {amounts.duration(parts[name])}" for name in longest)
    return f"{amounts.duration(seconds)} ({shown})" if shown else amounts.duration(seconds)


def _chain(summary: RunSummary) -> str:
    shown = [placed.sentence() for _, placed in summary.records.placements[-MOST_LINKS:]]
    older = len(summary.records.placements) - len(shown)
    before = f"{amounts.plural(older, 'earlier job')}, then " if older else ""
    return f"{summary.records.placements[-1][1].scheduler} {before}{' -> '.join(shown)}"


def _others(summary: RunSummary) -> list[tuple[tuple[object, ...], str]]:
    found = summary.inventory
    return [(found.torn, "torn"), (found.quarantined, "quarantined"), (found.abandoned, "abandoned")]
