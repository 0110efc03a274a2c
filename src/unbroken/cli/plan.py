"""``unbroken plan``: how often to save, how much failures will cost, how many jobs, and when it will be done."""

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
from unbroken.cli.facts import instant
from unbroken.cli.output import Output, as_command
from unbroken.config import Config
from unbroken.config.decode import decode
from unbroken.config.source import read
from unbroken.errors import BadPlan, PathMissing, StorageFailed
from unbroken.files import LOCAL
from unbroken.quoting import amounts
from unbroken.records.goodput import UNMEASURED_MTBF_S, Numbers, Plan, make_plan, measured, problems
from unbroken.records.journal import read_journal
from unbroken.records.layout import Layout, require_reachable, run_of
from unbroken.records.summary import summarize
from unbroken.report.style import Style
from unbroken.store.capacity import SIZE_BYTES, write_speed
from unbroken.store.directory import Store

# ---- before a run exists ----

# Loaded by name: it needs torch, and a plan from given numbers does not.
_SPEED: Final = "unbroken.gpt.speed"
_ASSUMED_DISK: Final = 200e6
_COPIED_PER_S: Final = 4e9
_BYTES_TOKENIZER: Final = 257
_USUAL_VOCABULARY: Final = 50_257
_WORD_BYTES: Final = 4


def with_estimates(numbers: Numbers, config: Config) -> tuple[Numbers, list[str]]:
    """The numbers with a step and a save filled in where they are missing, and how each was found."""
    said: list[str] = []
    if numbers.step_s is not None and numbers.save_s is not None:
        return numbers, said
    ids = _BYTES_TOKENIZER if config.data.tokenizer == "bytes" else _USUAL_VOCABULARY
    rows = config.model.rows(ids) or ids
    if config.model.vocab_size is None:
        said.append(f"a vocabulary of {amounts.count(rows)} tokens, since model.vocab_size is null")
    parameters = config.model.parameters(rows)
    if numbers.step_s is None and (found := _step(config, parameters)) is not None:
        numbers = replace(numbers, step_s=found[0])
        said.append(f"a step takes {_short(found[0])}: {found[1]}; --step-time takes a measured one")
    if numbers.save_s is None:
        size = state_bytes(config, parameters)
        speed, where = _disk_speed(Path(config.training.output_dir))
        numbers = replace(numbers, save_s=size / speed, paused_s=min(size / _COPIED_PER_S, size / speed))
        held = f"{amounts.size(size)} at {amounts.size(int(speed))}/s, {where}"
        said.append(f"a save takes {_short(size / speed)}: {held}; --save-time takes a measured one")
    return numbers, said


def state_bytes(config: Config, parameters: int) -> int:
    """The size of a checkpoint: weights and two moments, and the average where there is one."""
    copies = 3 if config.training.ema_decay is None else 4
    return copies * _WORD_BYTES * parameters


def _step(config: Config, parameters: int) -> tuple[float, str] | None:
    """Seconds of a step and how they were estimated; None where nothing here can compute one."""
    try:
        estimate: Callable[[Config, int], tuple[float, str]] = importlib.import_module(_SPEED).step_seconds
    except ModuleNotFoundError:
        return None
    return estimate(config, parameters)


def _disk_speed(run: Path) -> tuple[float, str]:
    """Bytes per second where the run will be, and how that is known."""
    place = next(each for each in (run, *run.absolute().parents) if each.is_dir())
    try:
        if LOCAL.space(place).free_bytes < 8 * SIZE_BYTES:
            return _ASSUMED_DISK, f"assumed: {place} has too little room to measure"
        token = secrets.token_hex(8)
        speed = write_speed(place, clock=time.monotonic, token=token, content=os.urandom)
    except StorageFailed as refused:
        return _ASSUMED_DISK, f"assumed: {place} could not be measured ({refused.cause})"
    return speed, f"measured in {place}"


def _short(seconds: float) -> str:
    return amounts.duration(seconds) if seconds >= 1 else f"{1000 * seconds:.3g} ms"


# ---- the command ----


def _seconds(option: str, meaning: str) -> Callable[[Any], Any]:
    return click.option(option, type=Duration(), metavar="DURATION", help=meaning)


@as_command("plan")
@click.argument("place", metavar="CONFIG|RUN", required=False)
@click.option("--steps", type=int, metavar="N", help="Steps still to be done.")
@_seconds("--step-time", "What a step takes.")
@_seconds("--save-time", "What a save takes, and how long the loop stands still for it.")
@_seconds("--mtbf", "Mean time between failures.")
@_seconds("--max-runtime", "What one job gets.")
@_seconds("--walltime-reserve", "What a job keeps of it for its last save.")
@_seconds("--restart-time", "From a failure until training goes on.")
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
    """Say how often to save, and when a run will be done: what failures cost, how many jobs it takes.

    What a run has measured is taken from its journal. For a CONFIG whose run has not started, step and save are
    estimated from the parameters, this machine's devices and a short write to its disk. Options win over both, and with
    enough of them neither CONFIG nor RUN is needed. What is neither measured nor given is said as an assumption. A
    DURATION is seconds, 4h, 1h30m, HH:MM:SS or D-HH:MM:SS.
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
    facts = {
        "given": asdict(numbers),
        "plan": _plan_facts(plan),
        "as_configured": None if as_set is None else _plan_facts(as_set),
        "assumptions": said,
    }
    output.document("unbroken.plan/2", facts, lambda: _text(numbers, plan, as_set, said, output.style))


def _known(place: str | None) -> tuple[Numbers, list[str], Config | None]:
    """What a config and the run it belongs to say; nothing where none is named."""
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


def _as_set(numbers: Numbers, config: Config | None, now_s: float) -> Plan | None:
    """The plan with the cadence that a config sets, where it sets one."""
    save_steps = None if config is None else config.training.save_steps
    if not isinstance(save_steps, int) or numbers.step_s is None:
        return None
    return make_plan(numbers, now_s=now_s, interval_s=save_steps * numbers.step_s)


def _assumptions(numbers: Numbers) -> list[str]:
    found = []
    if numbers.mtbf_s is None:
        found.append(
            f"mean time between failures: {amounts.duration(UNMEASURED_MTBF_S)}, as for a run that never failed"
        )
    if numbers.restart_s == 0:
        found.append("a failed job is started again at once, and goes on at once")
    if numbers.walltime_s is None:
        found.append("a job may run as long as it likes")
    else:
        found.append("no job waits in a queue")
        if numbers.reserve_s is None:
            found.append("kept for a last save: twice what one takes, a step, and 5 s")
    return found


def _plan_facts(plan: Plan) -> dict[str, Any]:
    facts = asdict(plan)
    ends_at_s = facts.pop("ends_at_s")
    return {**facts, "lost_share": plan.lost_share, "ends_at": instant(int(ends_at_s * 1e9))}


def _text(numbers: Numbers, plan: Plan, as_set: Plan | None, said: list[str], style: Style) -> str:
    each = amounts.duration(plan.interval_s)
    lines = [
        ("save", f"every {each}, {amounts.plural(plan.interval_steps, 'step')}"),
        ("lost", f"{amounts.duration(plan.lost_per_failure_s)} a failure, {_failures(plan)}"),
        ("time", f"{amounts.duration(plan.total_s)} for {amounts.plural(numbers.steps or 0, 'step')}, {_shares(plan)}"),
    ]
    if plan.usable_s is not None:
        job = f"of {amounts.duration(numbers.walltime_s or 0)}, {amounts.duration(plan.usable_s)} of them for steps"
        lines.append(("jobs", f"{amounts.plural(plan.jobs, 'job')} {job}"))
    lines.append(("done", instant(int(plan.ends_at_s * 1e9)) or ""))
    if as_set is not None:
        steps = amounts.plural(as_set.interval_steps, "step")
        lines.append(("as set", f"every {steps}: {amounts.duration(as_set.total_s)}, {_shares(as_set)}"))
    lines += [("assumed", sentence) for sentence in said]
    return "\n".join(f"{style.dim(label.ljust(7))}  {value}" for label, value in lines)


def _failures(plan: Plan) -> str:
    times = f"{plan.failures:.1f}" if plan.failures < 10 else f"{plan.failures:,.0f}"
    return f"{times} of them expected, {amounts.duration(plan.losing_s)} in all"


def _shares(plan: Plan) -> str:
    return f"{100 * plan.lost_share:.1f} % of it not for training ({amounts.duration(plan.saving_s)} for saves)"
