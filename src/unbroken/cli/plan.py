"""``unbroken plan``: estimates checkpoint interval, time lost to failures, number of jobs and the end of a run.

First the estimates for a run that has not started, then the command.
"""

import importlib
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import click

from unbroken.cli.arguments import Duration, named_store
from unbroken.cli.json_fields import iso_time
from unbroken.cli.output import Output, as_command
from unbroken.config import Config
from unbroken.config.decode import decode
from unbroken.config.source import read
from unbroken.errors import BadPlan, PathMissing, StorageFailed
from unbroken.files import LOCAL
from unbroken.quoting import amounts
from unbroken.records.goodput import UNMEASURED_MTBF_S, Numbers, RunForecast, make_plan, measured, problems
from unbroken.records.journal import read_journal
from unbroken.records.layout import Layout, require_reachable, run_of
from unbroken.records.summary import summarize
from unbroken.report.style import Style
from unbroken.store.capacity import SIZE_BYTES, write_speed
from unbroken.store.directory import Store

# ---- estimates before a run has measured anything ----

# Imported by name: it needs torch, which a plan from given numbers does not.
_SPEED: Final = "unbroken.gpt.speed"
_ASSUMED_DISK: Final = 200e6
_COPIED_PER_S: Final = 4e9
_BYTES_TOKENIZER: Final = 257
_USUAL_VOCABULARY: Final = 50_257
_WORD_BYTES: Final = 4


def with_estimates(numbers: Numbers, config: Config) -> tuple[Numbers, list[str]]:
    """The numbers with step time and save time estimated where they are missing, and how each was estimated."""
    said: list[str] = []
    if numbers.step_s is not None and numbers.save_s is not None:
        return numbers, said
    ids = _BYTES_TOKENIZER if config.data.tokenizer == "bytes" else _USUAL_VOCABULARY
    rows = config.model.rows(ids) or ids
    if config.model.vocab_size is None:
        said.append(f"vocabulary of {amounts.count(rows)} tokens (model.vocab_size is null)")
    parameters = config.model.parameters(rows)
    if numbers.step_s is None and (found := _step(config, parameters)) is not None:
        numbers = replace(numbers, step_s=found[0])
        said.append(f"step time {_short(found[0])}: {found[1]} (set with --step-time)")
    if numbers.save_s is None:
        size = state_bytes(config, parameters)
        speed, where = _disk_speed(Path(config.training.output_dir))
        numbers = replace(numbers, save_s=size / speed, paused_s=min(size / _COPIED_PER_S, size / speed))
        held = f"{amounts.size(size)} at {amounts.size(int(speed))}/s, {where}"
        said.append(f"save time {_short(size / speed)}: {held} (set with --save-time)")
    return numbers, said


def state_bytes(config: Config, parameters: int) -> int:
    """The size of a checkpoint: weights, two optimizer moments, and the EMA weights if there are any."""
    copies = 3 if config.training.ema_decay is None else 4
    return copies * _WORD_BYTES * parameters


def _step(config: Config, parameters: int) -> tuple[float, str] | None:
    """Step time in seconds and how it was estimated; None without torch."""
    try:
        estimate: Callable[[Config, int], tuple[float, str]] = importlib.import_module(_SPEED).step_seconds
    except ModuleNotFoundError:
        return None
    return estimate(config, parameters)


def _disk_speed(run: Path) -> tuple[float, str]:
    """Write speed at the run directory in bytes per second, and how it is known."""
    place = next(each for each in (run, *run.absolute().parents) if each.is_dir())
    try:
        if LOCAL.space(place).free_bytes < 8 * SIZE_BYTES:
            return _ASSUMED_DISK, f"assumed: too little free space in {place} to measure"
        token = secrets.token_hex(8)
        speed = write_speed(place, clock=time.monotonic, token=token, content=os.urandom)
    except StorageFailed as refused:
        return _ASSUMED_DISK, f"assumed: could not measure {place} ({refused.cause})"
    return speed, f"measured in {place}"


def _short(seconds: float) -> str:
    return amounts.duration(seconds) if seconds >= 1 else f"{1000 * seconds:.3g} ms"


# ---- the command ----


def _seconds(option: str, meaning: str) -> Callable[[Any], Any]:
    return click.option(option, type=Duration(), metavar="DURATION", help=meaning)


@as_command(
    "plan",
    examples=(
        ("unbroken plan config.yaml", "before a run, with estimates"),
        ("unbroken plan runs/a", "from what the run has measured"),
        ("unbroken plan --steps 100000 --step-time 1.2 --save-time 40 --mtbf 12h", "by numbers"),
    ),
)
@click.argument("place", metavar="[CONFIG|RUN]", required=False)
@click.option("--steps", type=int, metavar="N", help="Remaining steps.")
@_seconds("--step-time", "Time per step.")
@_seconds("--save-time", "Time per save; counts as a pause of training.")
@_seconds("--mtbf", "Mean time between failures.")
@_seconds("--max-runtime", "Walltime limit of one job.")
@_seconds("--walltime-reserve", "Part of the walltime reserved for the last save.")
@_seconds("--restart-time", "Time from a failure until training resumes.")
def command(
    output: Output,
    place: str | None,
    steps: int | None,
    step_time: float | None,
    save_time: float | None,
    mtbf: float | None,
    max_runtime: float | None,
    walltime_reserve: float | None,
    restart_time: float | None,
) -> None:
    """Estimate save interval, lost time and end of a run.

    Step time, save time and failure rate of a RUN come from its journal. For a CONFIG that has not started, step and
    save time are estimated from the model size, this machine's devices and a short write test. Options override both;
    with enough of them neither CONFIG nor RUN is needed. All assumptions are listed.

    A DURATION is seconds, 4h, 1h30m, HH:MM:SS or D-HH:MM:SS.
    """
    numbers, assumed, config = _known(place)
    given = {
        "steps": steps,
        "step_s": step_time,
        "save_s": save_time,
        "paused_s": save_time,
        "mtbf_s": mtbf,
        "walltime_s": max_runtime,
        "reserve_s": walltime_reserve,
        "restart_s": restart_time,
    }
    numbers = replace(numbers, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    numbers, estimated = (numbers, []) if config is None else with_estimates(numbers, config)
    if found := problems(numbers):
        raise BadPlan(problems=tuple(found))
    now_s = time.time()
    plan = make_plan(numbers, now_s=now_s)
    as_set = _as_set(numbers, config, now_s)
    said = [*estimated, *([] if mtbf is not None else assumed), *_assumptions(numbers)]
    fields = {
        "given": asdict(numbers),
        "plan": _plan_fields(plan),
        "as_configured": None if as_set is None else _plan_fields(as_set),
        "assumptions": said,
    }
    output.document("unbroken.plan/2", fields, lambda: _text(numbers, plan, as_set, said, output.style))


def _known(place: str | None) -> tuple[Numbers, list[str], Config | None]:
    """The numbers known from a config and its run; none without CONFIG or RUN."""
    if place is None:
        return Numbers(), [], None
    require_reachable(place)
    if not Path(place).exists():
        raise PathMissing(path=Path(place), purpose="config or run")
    if not Path(place).is_file():
        store = named_store("plan", place, None)
        return *_of_run(store, None), None
    config = decode(read(Path(place)), (), source=place).config
    return *_of_run(Store(Layout(Path(config.training.output_dir)).checkpoints), config), config


def _of_run(store: Store, config: Config | None) -> tuple[Numbers, list[str]]:
    layout = run_of(store)
    is_there = LOCAL.find(layout.run) is not None
    numbers, assumed = measured(read_journal(layout)) if is_there else (Numbers(), [])
    summary = summarize(store, now_s=time.time()) if is_there else None
    done = summary.newest_usable.step if summary is not None and summary.newest_usable is not None else 0
    target = summary.state.max_steps if summary is not None and summary.state is not None else None
    if config is not None:
        training = config.training
        target = training.max_steps
        numbers = replace(
            numbers,
            walltime_s=training.max_runtime_seconds,
            reserve_s=training.walltime_reserve_seconds
            if training.walltime_reserve_seconds is not None
            else numbers.reserve_s,
        )
    return replace(numbers, steps=None if target is None else max(0, target - done)), assumed


def _as_set(numbers: Numbers, config: Config | None, now_s: float) -> RunForecast | None:
    """The plan with ``training.save_steps`` of the config, if it is a number."""
    save_steps = None if config is None else config.training.save_steps
    if not isinstance(save_steps, int) or numbers.step_s is None:
        return None
    return make_plan(numbers, now_s=now_s, interval_s=save_steps * numbers.step_s)


def _assumptions(numbers: Numbers) -> list[str]:
    found = []
    if numbers.mtbf_s is None:
        found.append(f"mean time between failures {amounts.duration(UNMEASURED_MTBF_S)} (set with --mtbf)")
    if numbers.restart_s == 0:
        found.append("no time between a failure and the restart (set with --restart-time)")
    if numbers.walltime_s is None:
        found.append("no walltime limit (set with --max-runtime)")
    else:
        found.append("no queue time between jobs")
        if numbers.reserve_s is None:
            found.append("reserve for the last save: 2 saves, 1 step and 5 s (set with --walltime-reserve)")
    return found


def _plan_fields(plan: RunForecast) -> dict[str, Any]:
    fields = asdict(plan)
    ends_at_s = fields.pop("ends_at_s")
    return {**fields, "lost_share": plan.lost_share, "ends_at": iso_time(int(ends_at_s * 1e9))}


def _text(numbers: Numbers, plan: RunForecast, as_set: RunForecast | None, said: list[str], style: Style) -> str:
    each = amounts.duration(plan.interval_s)
    lines = [
        ("interval", f"save every {each} ({amounts.plural(plan.interval_steps, 'step')})"),
        ("failures", f"{_failures(plan)}, {amounts.duration(plan.lost_per_failure_s)} lost per failure"),
        (
            "duration",
            f"{amounts.duration(plan.total_s)} for {amounts.plural(numbers.steps or 0, 'step')}, {_shares(plan)}",
        ),
    ]
    if plan.usable_s is not None:
        job = f"of {amounts.duration(numbers.walltime_s or 0)} ({amounts.duration(plan.usable_s)} for training)"
        lines.append(("jobs", f"{amounts.plural(plan.jobs, 'job')} {job}"))
    lines.append(("ends", iso_time(int(plan.ends_at_s * 1e9)) or ""))
    if as_set is not None:
        steps = amounts.plural(as_set.interval_steps, "step")
        lines.append(("as set", f"save every {steps}: {amounts.duration(as_set.total_s)}, {_shares(as_set)}"))
    lines += [("assumed", sentence) for sentence in said]
    return "\n".join(f"{style.dim(label.ljust(8))}  {value}" for label, value in lines)


def _failures(plan: RunForecast) -> str:
    times = f"{plan.failures:.1f}" if plan.failures < 10 else f"{plan.failures:,.0f}"
    return f"{times} expected, {amounts.duration(plan.losing_s)} lost in total"


def _shares(plan: RunForecast) -> str:
    return f"{100 * plan.lost_share:.1f} % overhead ({amounts.duration(plan.saving_s)} saving)"
